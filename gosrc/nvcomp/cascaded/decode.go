package cascaded

// Decodes Cascaded blocks.

import "github.com/overwire/overwire/gosrc/errs"

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
