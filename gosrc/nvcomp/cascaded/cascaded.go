// Package cascaded implements Cascaded: run lengths, differences and packed bits of integers. The layout is that of
// nvCOMP's last open release, 2.2: github.com/NVIDIA/nvcomp, branch-2.2, src/CascadedKernels.cuh (BSD-3).
//
// All integers are little-endian. T is the element size: 1, 2, 4 or 8 bytes.
//
//	u8      number of run-length layers R, at most 7
//	u8      number of difference layers D
//	u8      whether bits are packed
//	u8      type: 0 int8, 1 uint8, 2 int16, and so on to 7 uint64
//	u32     bytes of content, a multiple of T
//
// If R, D and packing are all 0, the plain elements follow. Otherwise chunks follow. Each has 4096 bytes of content,
// except the last one, and starts at a multiple of T:
//
//	u32     bytes of the chunk, including this field
//	u32[R]  bytes of the run lengths of each layer
//	u32     bytes of the values
//	        padding to a multiple of T
//	T[D]    the first value of each difference layer
//	        padding to a multiple of 4
//	arrays  the run lengths (u16) of each layer, each at a multiple of 4
//	array   the values, at a multiple of T and of 4
//
// If i < R, layer i first replaces each run of equal values by one value. Then, if i < D, it replaces the values by
// their differences, which are one fewer. An unpacked array is its elements. A packed array starts with the smallest
// element, as a signed number. A u16 count and a u16 with the bits per element follow at the next multiple of 4. The
// elements minus the smallest one follow at the next multiple of the element size and of 4. Their bits are concatenated
// from low to high in words of 4 bytes.
package cascaded

import (
	"encoding/binary"
	"math/bits"
	"sync"

	"github.com/overwire/overwire/gosrc/errs"
)

const (
	headBytes  = 8
	chunkBytes = 4096
	maxRLEs    = 7
	maxDeltas  = 7
)

// Options are the options of Encode.
type Options struct {
	Type   Type `json:"-"`
	RLEs   int  `json:"rles"`   // layers of run lengths
	Deltas int  `json:"deltas"` // layers of differences
	Pack   bool `json:"pack"`   // whether to pack the bits of the remaining values
}

// Default returns the options that nvCOMP 2.2 chooses for a type.
func Default(t Type) Options { return Options{Type: t, RLEs: 2, Deltas: 1, Pack: true} }

// Type is an element type. The numbers match nvCOMP's nvcompType_t.
type Type uint8

// Element types.
const (
	Char Type = iota
	UChar
	Short
	UShort
	Int
	UInt
	LongLong
	ULongLong
)

// Size returns the size of an element in bytes.
func (t Type) Size() int { return 1 << (t / 2) }

// Check returns errs.ErrArgument if the options are invalid.
func (o Options) Check() error {
	if o.Type > ULongLong || o.RLEs < 0 || o.RLEs > maxRLEs || o.Deltas < 0 || o.Deltas > maxDeltas {
		return errs.New(errs.ErrArgument,
			"Cascaded: invalid options: %d run-length and %d difference layers of type %d: expected at most %d "+
				"of each, and types up to %d",
			o.RLEs, o.Deltas, o.Type, maxRLEs, ULongLong)
	}
	return nil
}

// Bound returns the maximum number of bytes that Encode appends for n bytes.
func Bound(n int) int { return headBytes + roundUp(n, 4) }

// MaxRatio is an upper bound for the number of bytes that one byte decodes to. The smallest chunk has 8 bytes.
const MaxRatio = chunkBytes / 8

func roundUp(n, to int) int { return (n + to - 1) &^ (to - 1) }

// metaBytes returns the size of the part of a chunk before the arrays, and the offset in it of the difference layers'
// first values.
func metaBytes(size, rles, deltas int) (all, firsts int) {
	firsts = roundUp(4+4*(rles+1), size)
	return firsts + roundUp(size*deltas, 4), firsts
}

// packedHead returns the size of the part of a packed array before the bits.
func packedHead(size int) int { return roundUp(max(4, size)+4, max(4, size)) }

var le = binary.LittleEndian

// loadElements reads elements of the given size. storeElements writes them.
func loadElements(out []uint64, p []byte, size int) {
	switch size {
	case 1:
		for i, v := range p[:len(out)] {
			out[i] = uint64(v)
		}
	case 2:
		for i := range out {
			out[i] = uint64(le.Uint16(p[2*i:]))
		}
	case 4:
		for i := range out {
			out[i] = uint64(le.Uint32(p[4*i:]))
		}
	default:
		for i := range out {
			out[i] = le.Uint64(p[8*i:])
		}
	}
}

func storeElements(p []byte, size int, values ...uint64) {
	switch size {
	case 1:
		for i, v := range values {
			p[i] = byte(v)
		}
	case 2:
		for i, v := range values {
			le.PutUint16(p[2*i:], uint16(v))
		}
	case 4:
		for i, v := range values {
			le.PutUint32(p[4*i:], uint32(v))
		}
	default:
		for i, v := range values {
			le.PutUint64(p[8*i:], v)
		}
	}
}

// scratch holds the values of one chunk before and after a layer.
type scratch struct {
	a, b   [chunkBytes]uint64
	counts [chunkBytes]uint64
}

var scratches = sync.Pool{New: func() any { return new(scratch) }}

// Encode appends the block of src to dst. The length of src must be a multiple of the type's size. It is safe for
// concurrent use.
func Encode(dst, src []byte, o Options) ([]byte, error) {
	if err := o.checkContent(src); err != nil {
		return dst, err
	}
	start := len(dst)
	limit := start + Bound(len(src))
	dst = append(dst, byte(o.RLEs), byte(o.Deltas), 0, byte(o.Type))
	if o.Pack {
		dst[start+2] = 1
	}
	dst = le.AppendUint32(dst, uint32(len(src)))
	s := scratches.Get().(*scratch)
	defer scratches.Put(s)
	ok := o.RLEs > 0 || o.Deltas > 0 || o.Pack
	for at := 0; at < len(src) && ok; at += chunkBytes {
		dst, ok = s.encodeChunk(dst, start, src[at:min(at+chunkBytes, len(src))], o)
		ok = ok && len(dst) <= limit
	}
	if !ok || len(src) == 0 { // store the plain elements
		dst = dst[:start+headBytes]
		clear(dst[start : start+3])
		dst = append(dst, src...)
		dst = appendZeros(dst, limit-len(dst))
	}
	return dst, nil
}

func appendZeros(dst []byte, n int) []byte {
	return append(dst, make([]byte, n)...)
}

// encodeChunk appends a chunk to the block that starts at dst[start]. ok is false if a layer of differences gets no
// values.
func (s *scratch) encodeChunk(dst []byte, start int, src []byte, o Options) ([]byte, bool) {
	size := o.Type.Size()
	mask := ^uint64(0) >> (64 - 8*size)
	meta, firsts := metaBytes(size, o.RLEs, o.Deltas)
	chunk := len(dst)
	dst = appendZeros(dst, meta)
	in, out := s.a[:len(src)/size], s.b[:]
	loadElements(in, src, size)
	for layer := range max(o.RLEs, o.Deltas) {
		if layer < o.RLEs {
			n := 0
			for i, v := range in {
				if i > 0 && v == in[i-1] {
					s.counts[n-1]++
					continue
				}
				out[n], s.counts[n] = v, 1
				n++
			}
			in, out = out[:n], in[:cap(in)]
			before := len(dst)
			dst = appendArray(dst, s.counts[:n], 2, o.Pack)
			le.PutUint32(dst[chunk+4*(layer+1):], uint32(len(dst)-before))
			dst = appendZeros(dst, roundUp(len(dst)-start, 4)-(len(dst)-start))
		}
		if layer < o.Deltas {
			if len(in) == 0 {
				return dst, false
			}
			storeElements(dst[chunk+firsts+layer*size:], size, in[0])
			for i := range in[1:] {
				out[i] = (in[i+1] - in[i]) & mask // the mask makes equal differences form runs
			}
			in, out = out[:len(in)-1], in[:cap(in)]
		}
	}
	dst = appendZeros(dst, roundUp(len(dst)-start, max(4, size))-(len(dst)-start))
	before := len(dst)
	dst = appendArray(dst, in, size, o.Pack)
	le.PutUint32(dst[chunk+4*(o.RLEs+1):], uint32(len(dst)-before))
	dst = appendZeros(dst, roundUp(len(dst)-start, max(4, size))-(len(dst)-start))
	le.PutUint32(dst[chunk:], uint32(len(dst)-chunk))
	return dst, true
}

// appendArray appends an array of values. It only uses their lowest size bytes.
func appendArray(dst []byte, values []uint64, size int, pack bool) []byte {
	if !pack {
		at := len(dst)
		dst = appendZeros(dst, len(values)*size)
		storeElements(dst[at:], size, values...)
		return dst
	}
	mask := ^uint64(0) >> (64 - 8*size)
	least, width := valueSpan(values, size)
	at := len(dst)
	words := (len(values)*width + 31) / 32
	dst = appendZeros(dst, packedHead(size)+4*words)
	storeElements(dst[at:], size, least)
	le.PutUint32(dst[at+max(4, size):], uint32(width)<<16|uint32(len(values)))
	put := dst[at+packedHead(size):]
	var low, high uint64 // at most 31 remaining bits and 64 bits of a value
	n := 0
	for _, v := range values {
		x := (v - least) & mask
		low |= x << n
		high = x >> (64 - n)
		for n += width; n >= 32; n -= 32 {
			le.PutUint32(put, uint32(low))
			put = put[4:]
			low = low>>32 | high<<32
			high >>= 32
		}
	}
	if n > 0 {
		le.PutUint32(put, uint32(low))
	}
	return dst
}

// valueSpan returns the smallest value and the bit width of the largest minus the smallest. It uses the lowest size
// bytes of values as signed numbers.
func valueSpan(values []uint64, size int) (least uint64, width int) {
	shift := 64 - 8*size
	const flip = 1 << 63 // makes signed numbers comparable as unsigned ones
	var most uint64
	for i, v := range values {
		x := v<<shift ^ flip
		if i == 0 || x < least {
			least = x
		}
		if i == 0 || x > most {
			most = x
		}
	}
	return (least ^ flip) >> shift, bits.Len64((most - least) >> shift)
}

func (o Options) checkContent(src []byte) error {
	if err := o.Check(); err != nil {
		return err
	}
	if size := o.Type.Size(); len(src)%size != 0 || uint64(len(src)) > 1<<32-1 {
		return errs.New(errs.ErrArgument, "Cascaded: %d bytes are over 4 GiB or not a multiple of the element size, %d",
			len(src), size)
	}
	return nil
}

func corruptError(format string, args ...any) error {
	return errs.New(errs.ErrCorrupt, "Cascaded: "+format, args...)
}

// Size returns the length of the content that the block states. It refuses lengths that the block's bytes cannot
// decode to. Errors are errs.ErrCorrupt.
func Size(src []byte) (int64, error) {
	n, _, err := parseHead(src)
	return n, err
}

func parseHead(src []byte) (n int64, o Options, err error) {
	if len(src) < headBytes {
		return 0, Options{}, corruptError("the block is too short: %d bytes", len(src))
	}
	o = Options{RLEs: int(src[0]), Deltas: int(src[1]), Pack: src[2] != 0, Type: Type(src[3])}
	if o.Check() != nil || src[2] > 1 {
		return 0, o, corruptError("invalid header: layers %d and %d, packing %d, type %d",
			src[0], src[1], src[2], src[3])
	}
	n = int64(le.Uint32(src[4:]))
	if n%int64(o.Type.Size()) != 0 {
		return 0, o, corruptError("%d bytes are not a multiple of the element size, %d", n, o.Type.Size())
	}
	if n > int64(len(src)-headBytes)*MaxRatio {
		return 0, o, corruptError("%d bytes cannot decode to %d bytes", len(src), n)
	}
	return n, o, nil
}

// Decode fills dst, which must have the length of the content. A different length or an invalid block gives
// errs.ErrCorrupt. It never writes outside dst. It is safe for concurrent use.
func Decode(dst, src []byte) error {
	n, o, err := parseHead(src)
	if err != nil {
		return err
	}
	if n != int64(len(dst)) {
		return corruptError("the block has %d bytes, expected %d", n, len(dst))
	}
	body := src[headBytes:]
	if o.RLEs == 0 && o.Deltas == 0 && !o.Pack {
		if len(body) < len(dst) || len(body) > roundUp(len(dst), 4) {
			return corruptError("invalid plain elements: %d bytes are stored as %d bytes", len(dst), len(body))
		}
		copy(dst, body)
		return nil
	}
	s := scratches.Get().(*scratch)
	defer scratches.Put(s)
	for at := 0; at < len(body); {
		inputBytes, outputBytes, err := s.decodeChunk(dst, body[at:], o)
		if err != nil {
			return err
		}
		dst = dst[outputBytes:]
		at += inputBytes
	}
	if len(dst) > 0 {
		return corruptError("the chunks end %d bytes before the end of the content", len(dst))
	}
	return nil
}

func (s *scratch) decodeChunk(dst, src []byte, o Options) (used, made int, err error) {
	size := o.Type.Size()
	meta, firsts := metaBytes(size, o.RLEs, o.Deltas)
	if len(src) < meta {
		return 0, 0, corruptError("a chunk is truncated")
	}
	used = int(le.Uint32(src))
	if used < meta || used > len(src) || used%max(4, size) != 0 {
		return 0, 0, corruptError("a chunk has an invalid size: %d bytes, with %d left", used, len(src))
	}
	src = src[:used]

	// Find the arrays of the chunk.
	var arrays [maxRLEs + 1][]byte
	at := meta
	for i := range o.RLEs + 1 {
		if i == o.RLEs {
			at = roundUp(at, max(4, size))
		}
		n := int(le.Uint32(src[4*(i+1):]))
		if at > len(src) || n > len(src)-at {
			return 0, 0, corruptError("an array of %d bytes at %d ends after the chunk, which has %d", n, at, len(src))
		}
		arrays[i] = src[at : at+n]
		at = roundUp(at+n, 4)
	}

	most := chunkBytes / size
	n, err := readArray(s.a[:], arrays[o.RLEs], size, o.Pack, most)
	if err != nil {
		return 0, 0, err
	}
	in, out := s.a[:n], s.b[:]
	for layer := max(o.RLEs, o.Deltas) - 1; layer >= 0; layer-- {
		if layer < o.Deltas {
			if n, err = addUp(out, in, src[firsts+layer*size:], size, most); err != nil {
				return 0, 0, err
			}
			in, out = out[:n], in[:cap(in)]
		}
		if layer < o.RLEs {
			if n, err = s.repeatRuns(out, in, arrays[layer], o.Pack, most); err != nil {
				return 0, 0, err
			}
			in, out = out[:n], in[:cap(in)]
		}
	}
	made = len(in) * size
	if made == 0 || made > len(dst) {
		return 0, 0, corruptError("a chunk decodes to %d bytes, expected %d", made, len(dst))
	}
	storeElements(dst, size, in...)
	return used, made, nil
}

// readArray reads an array of at most `most` elements and returns their number.
func readArray(out []uint64, src []byte, size int, packed bool, most int) (int, error) {
	if !packed {
		n := len(src) / size
		if len(src)%size != 0 || n > most {
			return 0, corruptError("invalid array of %d bytes", len(src))
		}
		loadElements(out[:n], src, size)
		return n, nil
	}
	head := packedHead(size)
	if len(src) < head {
		return 0, corruptError("a packed array is too short: %d bytes", len(src))
	}
	var first [1]uint64
	loadElements(first[:], src, size)
	least := first[0]
	word := le.Uint32(src[max(4, size):])
	width, n := int(word>>16), int(word&0xFFFF)
	if width > 8*size || n > most || (n*width+31)/32*4 != len(src)-head {
		return 0, corruptError("invalid packed array: %d values of %d bits in %d bytes", n, width, len(src))
	}
	src = src[head:]
	mask := uint64(1)<<width - 1
	if width == 64 {
		mask = ^uint64(0)
	}
	for i := range n {
		at := i * width
		word, skip := at/32, at%32
		var v uint64
		for k := 0; k < 3 && 4*(word+k) < len(src) && 32*k < skip+width; k++ {
			x := uint64(le.Uint32(src[4*(word+k):]))
			if k == 0 {
				v = x >> skip
			} else {
				v |= x << (32*k - skip)
			}
		}
		out[i] = v&mask + least
	}
	return n, nil
}

// addUp computes values from the first value and the differences.
func addUp(out, in []uint64, first []byte, size, most int) (int, error) {
	if len(in) >= most {
		return 0, corruptError("more than %d elements in a chunk", most)
	}
	loadElements(out[:1], first, size)
	v := out[0]
	for i, d := range in {
		v += d
		out[i+1] = v
	}
	return len(in) + 1, nil
}

func (s *scratch) repeatRuns(out, in []uint64, lengths []byte, packed bool, most int) (int, error) {
	runs, err := readArray(s.counts[:], lengths, 2, packed, most)
	if err != nil {
		return 0, err
	}
	if runs != len(in) {
		return 0, corruptError("a chunk has %d run lengths for %d values", runs, len(in))
	}
	n := 0
	for i, v := range in {
		times := int(s.counts[i])
		if times > most-n {
			return 0, corruptError("more than %d elements in a chunk", most)
		}
		for k := range times {
			out[n+k] = v
		}
		n += times
	}
	return n, nil
}
