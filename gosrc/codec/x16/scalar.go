package x16

// Decodes segments without vectors, as the reference for the other decoders.

import (
	"bytes"
	"encoding/binary"
)

// scalarSlots holds the frequency, rank and value of each slot for the scalar decoder.
type scalarSlots struct {
	freq, rank [256]uint16
	value      [256]uint8
}

func (d *decoder) buildSlots() {
	t := &d.slots
	for s, e := range d.table.expandSlots() {
		t.freq[s], t.rank[s], t.value[s] = uint16(d.table.freq[e.symbol]), uint16(e.rank), d.values[e.symbol]
	}
}

// decodeScalar decodes len(vals)/256 tiles of s. It returns false if a word would be after the end of the segment.
// The other decoders must give the same results.
func (d *decoder) decodeScalar(s *segment, vals []byte) bool {
	src := d.src[:s.end]
	all := vals
	cur := s.cur
	var spare [2 * lanes]byte
	for ; len(vals) >= tileSyms; vals = vals[tileSyms:] {
		tile := (*[tileSyms]byte)(vals)
		for pair := 0; pair < 8; pair += 2 {
			// A pair of steps reads at most one word per lane. The last words of a segment are read from a copy that
			// is long enough.
			words := src[min(cur, len(src)):]
			if len(words) < 2*lanes {
				spare = [2 * lanes]byte{}
				copy(spare[:], words)
				words = spare[:]
			}
			cur += decodePair(&s.x, &d.slots, (*[2 * lanes]byte)(words), tile, pair)
			if cur > len(src) {
				return false
			}
		}
	}
	if d.escape >= 0 {
		s.escs += bytes.Count(all, []byte{d.sentinel})
	}
	s.cur = cur
	return true
}

// decodePair decodes a pair of steps in all lanes and returns the number of bytes of words that it used. It is a
// separate function so that the loop gets enough registers. It does not branch on whether a lane needs a word,
// because that is unpredictable.
func decodePair(states *[lanes]uint32, t *scalarSlots, w *[2 * lanes]byte, tile *[tileSyms]byte, pair int) (used int) {
	for l := range states {
		x := states[l]
		i := uint8(x)
		out := (*[2]byte)(tile[(int(units[l])+pair)&254:])
		x = uint32(t.freq[i])*(x>>8) + uint32(t.rank[i])
		out[0] = t.value[i]
		i = uint8(x)
		x = uint32(t.freq[i])*(x>>8) + uint32(t.rank[i])
		out[1] = t.value[i]
		with := x<<16 | uint32(binary.LittleEndian.Uint16(w[used&62:]))
		need := (uint64(x) - start) >> 63
		if need != 0 {
			x = with
		}
		states[l] = x
		used += int(2 * need)
	}
	return used
}
