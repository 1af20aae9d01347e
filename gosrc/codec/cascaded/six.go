package cascaded

import (
	"math/bits"

	"github.com/overwire/overwire/gosrc/fault"
)

// What nvCOMP 6 writes is another block (its asymmetric mode; found by what it
// wrote of small inputs):
//
//	u8[3]   0
//	u8      type + 0x80
//	u32     bytes of content, a multiple of T
//
// and the elements as they are, up to a multiple of 4, where nothing made them
// fewer. Otherwise, in fewer bytes, chunks, each of 4096 bytes of content but
// the last, each a multiple of 4 and of T long:
//
//	u16     bytes of the chunk, with this
//	u8      its stages, a bit each, the first the lowest
//	u8      those of its stages that are run lengths; others are differences
//	u32     bytes of the values
//	        of each stage in turn
//	  u32     run lengths: their bytes
//	  array   and they, u16
//	  T       differences: the first value, up to a multiple of 4
//	        up to a multiple of 4 and of T
//	array   the values
//
// Every array is packed; its smallest value is that of unsigned numbers, if the
// type is unsigned, up to the first differences. nvCOMP tries run lengths and
// differences by turns (differences alone, where run lengths are not wanted): it
// goes through run lengths if they make the chunk smaller than it was, through
// differences always, and keeps the stages with which it was smallest.
const (
	six     = 0x80
	stages  = 7
	sixHead = 8
	byTurns = 0x55 // the stages that are run lengths
	alone   = 3    // the most stages of differences alone
)

// tried lists the stages that an encoder tries, and says which are run lengths.
func tried(o Options) (list []int, runs uint8) {
	if o.RLEs == 0 {
		for i := range min(o.Deltas, alone) {
			list = append(list, i)
		}
		return list, 0
	}
	for i := range stages {
		if i%2 == 0 && i/2 < o.RLEs || i%2 == 1 && i/2 < o.Deltas {
			list = append(list, i)
		}
	}
	return list, byTurns
}

// Level is what nvCOMP 6 calls options: how many stages it tries.
func (o Options) Level() int {
	if o.RLEs == 0 {
		return min(o.Deltas, alone)
	}
	return min(max(2*o.RLEs-1, 2*o.Deltas), stages)
}

// Encode6 appends the block of src to dst as nvCOMP 6 has it, which always packs
// bits. The layers of o are the most that a chunk has, of which nvCOMP 6 knows
// four of run lengths and three of differences. Otherwise as Encode.
func Encode6(dst, src []byte, o Options) ([]byte, error) {
	if err := o.check(src); err != nil {
		return dst, err
	}
	start := len(dst)
	limit := start + Bound(len(src))
	dst = append(dst, 0, 0, 0, byte(o.Type)|six)
	dst = le.AppendUint32(dst, uint32(len(src)))
	s := scratches.Get().(*scratch)
	defer scratches.Put(s)
	list, runs := tried(o)
	for at := 0; at < len(src) && len(dst) < limit; at += chunkBytes {
		part := src[at:min(at+chunkBytes, len(src))]
		set, path := uint8(0), uint8(0)
		size := s.stage(nil, part, o.Type, set, runs)
		last := size
		for _, i := range list {
			n := s.stage(nil, part, o.Type, path|1<<i, runs)
			if n == 0 {
				break
			}
			if runs>>i&1 != 0 && n >= last {
				continue
			}
			path |= 1 << i
			if last = n; n < size {
				set, size = path, n
			}
		}
		from := len(dst)
		dst = grow(dst, size)
		s.stage(dst[from:], part, o.Type, set, runs)
	}
	if len(dst) >= limit { // as it is
		dst = append(dst[:start+headBytes], src...)
		dst = grow(dst, limit-len(dst))
	}
	return dst, nil
}

// stage writes a chunk of these stages into dst, which has its length and zeros,
// and returns the length; with dst nil it only does that. 0: there is nothing
// left for a stage.
func (s *scratch) stage(dst, src []byte, typ Type, set, runs uint8) int {
	size := typ.Size()
	signed := typ%2 == 0
	mask := ^uint64(0) >> (64 - 8*size)
	in, out := s.a[:len(src)/size], s.b[:]
	load(in, src, size)
	at := sixHead
	for i := range stages {
		switch {
		case set>>i&1 == 0:
		case runs>>i&1 != 0:
			n := 0
			for k, v := range in {
				if k > 0 && v == in[k-1] {
					s.counts[n-1]++
					continue
				}
				out[n], s.counts[n] = v, 1
				n++
			}
			in, out = out[:n], in[:cap(in)]
			bytes := packedBytes(s.counts[:n], 2, true)
			if dst != nil {
				le.PutUint32(dst[at:], uint32(bytes))
				array(dst[:at+4], s.counts[:n], 2, true, true)
			}
			at += 4 + bytes
		default:
			if len(in) == 0 {
				return 0
			}
			if dst != nil {
				store(dst[at:], size, in[0])
			}
			at += up(size, 4)
			signed = true
			for k := range in[1:] {
				out[k] = (in[k+1] - in[k]) & mask
			}
			in, out = out[:len(in)-1], in[:cap(in)]
		}
	}
	at = up(at, max(4, size))
	bytes := packedBytes(in, size, signed)
	total := up(at+bytes, max(4, size))
	if dst != nil {
		array(dst[:at], in, size, true, signed)
		le.PutUint32(dst, uint32(total)|uint32(set)<<16|uint32(set&runs)<<24)
		le.PutUint32(dst[4:], uint32(bytes))
	}
	return total
}

// packedBytes is the length of a packed array.
func packedBytes(values []uint64, size int, signed bool) int {
	_, width := span(values, size, signed)
	return packedHead(size) + (len(values)*width+31)/32*4
}

// span is the smallest of values, of which the lowest size bytes count, as
// numbers with a sign or not, and the bits of the largest above it.
func span(values []uint64, size int, signed bool) (least uint64, width int) {
	shift := 64 - 8*size
	flip := uint64(0) // makes signed numbers ordered as unsigned ones
	if signed {
		flip = 1 << 63
	}
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

// decodeSix decodes what follows the head of a block of nvCOMP 6.
func (s *scratch) decodeSix(dst, body []byte, size int) error {
	if len(body) >= len(dst) && len(body) <= up(len(dst), 4) {
		copy(dst, body)
		return nil
	}
	for len(body) > 0 {
		used, made, err := s.chunkSix(dst, body, size)
		if err != nil {
			return err
		}
		dst, body = dst[made:], body[used:]
	}
	if len(dst) > 0 {
		return corrupt("%d bytes are missing", len(dst))
	}
	return nil
}

// chunkSix decodes the chunk that src begins with to the front of dst.
func (s *scratch) chunkSix(dst, src []byte, size int) (used, made int, err error) {
	if len(src) < sixHead {
		return 0, 0, corrupt("a chunk is cut")
	}
	used = int(le.Uint16(src))
	set := src[2]
	if used < sixHead || used > len(src) || used%max(4, size) != 0 {
		return 0, 0, corrupt("a chunk of %d bytes, %d are left", used, len(src))
	}
	runs := src[3]
	if set>>stages != 0 || runs&^set != 0 {
		return 0, 0, corrupt("a chunk with stages %#x and %#x", set, runs)
	}
	src = src[:used]
	var places [stages][]byte // the run lengths of a stage, or its first value
	at := sixHead
	for i := range stages {
		n := up(size, 4)
		switch {
		case set>>i&1 == 0:
			continue
		case runs>>i&1 != 0:
			if len(src)-at < 4 {
				return 0, 0, corrupt("a chunk is cut")
			}
			n = int(le.Uint32(src[at:]))
			at += 4
		}
		if n > len(src)-at || n%4 != 0 {
			return 0, 0, corrupt("a stage of %d bytes at %d of %d", n, at, len(src))
		}
		places[i] = src[at : at+n]
		at += n
	}
	at = up(at, max(4, size))
	bytes := int(le.Uint32(src[4:]))
	if at > len(src) || bytes > len(src)-at || up(at+bytes, max(4, size)) != used {
		return 0, 0, corrupt("values of %d bytes at %d of %d", bytes, at, len(src))
	}

	most := chunkBytes / size
	n, err := values(s.a[:], src[at:at+bytes], size, true, most)
	if err != nil {
		return 0, 0, err
	}
	in, out := s.a[:n], s.b[:]
	for i := stages - 1; i >= 0; i-- {
		switch {
		case set>>i&1 == 0:
			continue
		case runs>>i&1 != 0:
			n, err = s.repeat(out, in, places[i], true, most)
		default:
			n, err = addUp(out, in, places[i], size, most)
		}
		if err != nil {
			return 0, 0, err
		}
		in, out = out[:n], in[:cap(in)]
	}
	if made, err = put(dst, in, size); err != nil {
		return 0, 0, err
	}
	return used, made, nil
}

// addUp makes values of the first of them and differences.
func addUp(out, in []uint64, first []byte, size, most int) (int, error) {
	if len(in) >= most {
		return 0, corrupt("more than %d elements in a chunk", most)
	}
	load(out[:1], first, size)
	v := out[0]
	for i, d := range in {
		v += d
		out[i+1] = v
	}
	return len(in) + 1, nil
}

// repeat makes values of runs of them.
func (s *scratch) repeat(out, in []uint64, lengths []byte, packed bool, most int) (int, error) {
	runs, err := values(s.counts[:], lengths, 2, packed, most)
	if err != nil {
		return 0, err
	}
	if runs != len(in) {
		return 0, corrupt("%d run lengths for %d values", runs, len(in))
	}
	n := 0
	for i, v := range in {
		times := int(s.counts[i])
		if times > most-n {
			return 0, corrupt("more than %d elements in a chunk", most)
		}
		for k := range times {
			out[n+k] = v
		}
		n += times
	}
	return n, nil
}

func (o Options) check(src []byte) error {
	if err := o.Check(); err != nil {
		return err
	}
	if size := o.Type.Size(); len(src)%size != 0 || uint64(len(src)) > 1<<32-1 {
		return fault.New(fault.ErrArgument, "Cascaded: %d bytes are no whole number of elements of %d", len(src), size)
	}
	return nil
}
