package planes

// Encodes and decodes blocks with rANS over 256 values, with four interleaved 32-bit states, 16-bit words and 12-bit
// probabilities.

import (
	"encoding/binary"
	"math"
	"math/bits"
)

const (
	lanes     = 4
	start     = 1 << 16 // encoders start with this state and decoders end with it
	scaleBits = 12
	scale     = 1 << scaleBits
	// blockHead is the size of an encoded block without its words.
	blockHead = 4*lanes + 2
)

// A table holds the frequencies of the values. They sum to scale, and at least two are not zero.
type table struct{ freq [256]uint16 }

// slots is an expanded table. A slot is value | frequency << 8 | rank << 20.
type slots [scale]uint32

// appendTable appends a table: a bit for each value that occurs, then the frequency of each. A frequency below 128
// takes one byte. Others take two: 128 + the high bits, then the low 8 bits.
func (t *table) appendTable(dst []byte) []byte {
	var set [32]byte
	for v, f := range t.freq {
		if f > 0 {
			set[v/8] |= 1 << (v % 8)
		}
	}
	dst = append(dst, set[:]...)
	for _, f := range t.freq {
		switch {
		case f >= 128:
			dst = append(dst, 128|byte(f>>8), byte(f))
		case f > 0:
			dst = append(dst, byte(f))
		}
	}
	return dst
}

// encodedSize returns the number of bytes that appendTable appends.
func (t *table) encodedSize() int {
	n := 32
	for _, f := range t.freq {
		if f > 0 {
			n++
		}
		if f >= 128 {
			n++
		}
	}
	return n
}

func (t *table) readTable(src []byte) (int, error) {
	if len(src) < 32 {
		return 0, corruptError("a table is truncated: %d bytes", len(src))
	}
	*t = table{}
	at, sum := 32, 0
	for v := range t.freq {
		if src[v/8]>>(v%8)&1 == 0 {
			continue
		}
		if at >= len(src) {
			return 0, corruptError("a table is truncated")
		}
		f := int(src[at])
		at++
		if f >= 128 {
			if at >= len(src) {
				return 0, corruptError("a table is truncated")
			}
			f = f&127<<8 | int(src[at])
			at++
			if f < 128 {
				return 0, corruptError("frequency %d is stored in two bytes, expected one", f)
			}
		}
		if f == 0 || f >= scale {
			return 0, corruptError("invalid frequency %d of value %d", f, v)
		}
		t.freq[v] = uint16(f)
		sum += f
	}
	if sum != scale {
		return 0, corruptError("the frequencies sum to %d, expected 4096", sum)
	}
	return at, nil
}

// expandSlots expands a valid table into slots.
func (t *table) expandSlots(s *slots) {
	at := 0
	for v, f := range t.freq {
		for r := range uint32(f) {
			s[at] = uint32(v) | uint32(f)<<8 | r<<20
			at++
		}
	}
}

// decodeValues fills dst; value i uses state i mod 4. It checks that all words are used and that every state ends
// with the start state of encoders.
func decodeValues(dst, words []byte, x [lanes]uint32, s *slots) error {
	x0, x1, x2, x3 := x[0], x[1], x[2], x[3]
	at := 0
	for len(dst) >= lanes && len(words)-at >= 2*lanes {
		out := (*[lanes]byte)(dst)
		w := (*[2 * lanes]byte)(words[at:])
		symbols := 0
		out[0], x0, symbols = decodeStep(x0, s, w, symbols)
		out[1], x1, symbols = decodeStep(x1, s, w, symbols)
		out[2], x2, symbols = decodeStep(x2, s, w, symbols)
		out[3], x3, symbols = decodeStep(x3, s, w, symbols)
		at += symbols
		dst = dst[lanes:]
	}
	x = [lanes]uint32{x0, x1, x2, x3}
	for i := range dst {
		e := s[x[i%lanes]%scale]
		v := e>>8&(scale-1)*(x[i%lanes]>>scaleBits) + e>>20
		if v < start {
			if len(words)-at < 2 {
				return corruptError("words extend past the end of the block")
			}
			v = v<<16 | uint32(binary.LittleEndian.Uint16(words[at:]))
			at += 2
		}
		dst[i], x[i%lanes] = byte(e), v
	}
	if at != len(words) {
		return corruptError("%d bytes of words are left over at the end of the block", len(words)-at)
	}
	for l, v := range x {
		if v != start {
			return corruptError("state %d ends as %#x, expected 0x10000", l, v)
		}
	}
	return nil
}

// decodeStep decodes a value. It does not branch on whether the state needs a word, because that is unpredictable.
func decodeStep(x uint32, s *slots, w *[2 * lanes]byte, used int) (value byte, state uint32, now int) {
	e := s[x%scale]
	x = e>>8&(scale-1)*(x>>scaleBits) + e>>20
	need := uint32((uint64(x) - start) >> 63)
	x = x<<(need<<4&31) | uint32(binary.LittleEndian.Uint16(w[used&6:]))&-need
	return byte(e), x, used + int(2*need)
}

// encodeBlock appends the encoded block of src. Every value in src must have a frequency.
func (e *Encoder) encodeBlock(dst, src []byte, t *table) []byte {
	var first [256]uint32
	sum := uint32(0)
	for v, f := range t.freq {
		first[v] = sum
		sum += uint32(f)
	}
	// A value produces at most one word, and one extra word may be written before the first one.
	if cap(e.words) < 2*blockBytes+2 {
		e.words = make([]byte, 2*blockBytes+2)
	}
	words := e.words[:cap(e.words)]
	at := len(words)
	x := [lanes]uint32{start, start, start, start}
	for i := len(src) - 1; i >= 0; i-- {
		v, s := src[i], x[i%lanes]
		f := uint32(t.freq[v])
		// The word is always written, but only kept if `at` moves.
		binary.LittleEndian.PutUint16(words[at-2:], uint16(s))
		full := 1 - uint32((uint64(s>>(32-scaleBits))-uint64(f))>>63)
		at -= int(2 * full)
		s >>= full << 4 & 31
		x[i%lanes] = s/f<<scaleBits + s%f + first[v]
	}
	for _, s := range x {
		dst = binary.LittleEndian.AppendUint32(dst, s)
	}
	dst = binary.LittleEndian.AppendUint16(dst, uint16((len(words)-at)/2))
	return append(dst, words[at:]...)
}

// logs holds the base-2 logarithms of 2048..4095, minus 11, in units of 2^-16. They are integers, so that every
// machine makes the same choices.
var logs = func() (t [2048]uint32) {
	for i := range t {
		t[i] = uint32(math.Round(65536 * (math.Log2(float64(2048+i)) - 11)))
	}
	return
}()

// logOf returns the base-2 logarithm of x in units of 2^-16. x must be 1 to 4095.
func logOf(x uint32) uint64 {
	n := bits.Len32(x)
	return uint64(n-1)<<16 + uint64(logs[x<<(12-n)-2048])
}

// A histogram counts the values of one or more blocks.
type histogram [256]uint32

// fitTable distributes the slots among the values of a histogram of n values. At least two different values must occur.
// It rounds each share, then moves single slots to or from the value with the best gain until the sum is correct.
func fitTable(h *histogram, n uint32) (t table) {
	sum := 0
	for v, c := range h {
		if c > 0 {
			f := (uint64(c)*scale + uint64(n)/2) / uint64(n)
			t.freq[v] = uint16(min(max(f, 1), scale-1))
			sum += int(t.freq[v])
		}
	}
	more := func() (at int) { // the value that saves most with one more slot
		at, best := -1, uint64(0)
		for v, f := range t.freq {
			if f > 0 && f < scale-1 {
				if g := uint64(h[v]) * (logOf(uint32(f)+1) - logOf(uint32(f))); at < 0 || g > best {
					at, best = v, g
				}
			}
		}
		return at
	}
	less := func() (at int) { // the value that loses least with one slot less
		at, best := -1, uint64(0)
		for v, f := range t.freq {
			if f > 1 {
				if g := uint64(h[v]) * (logOf(uint32(f)) - logOf(uint32(f)-1)); at < 0 || g < best {
					at, best = v, g
				}
			}
		}
		return at
	}
	for ; sum < scale; sum++ {
		t.freq[more()]++
	}
	for ; sum > scale; sum-- {
		t.freq[less()]--
	}
	return t
}

// costOf returns the size in bytes of a histogram's values if they are encoded with the table. If a value has no
// frequency, the result is larger than any real size.
func (t *table) costOf(h *histogram) uint64 {
	sum := uint64(0)
	for v, c := range h {
		if c > 0 {
			if t.freq[v] == 0 {
				return math.MaxUint32
			}
			sum += uint64(c) * (scaleBits<<16 - logOf(uint32(t.freq[v])))
		}
	}
	return sum >> 19
}
