package x16

// Implements the codec without vectors, as the reference for the other implementations: decodes segments, divides
// elements into symbol values and planes, and joins them.

import (
	"bytes"
	"encoding/binary"
)

// scalarSlots holds the frequency, rank and value of each slot for the scalar decoder.
type scalarSlots struct {
	freq, rank [256]uint16
	value      [256]uint8
}

func (t *scalarSlots) build(y *symbols) {
	for s, e := range y.table.expandSlots() {
		t.freq[s], t.rank[s], t.value[s] = uint16(y.table.freq[e.symbol]), uint16(e.rank), y.values[e.symbol]
	}
}

// decodeScalar decodes len(vals)/256 tiles of s. It returns false if a word would be after the end of the segment.
// The other decoders must give the same results.
func (d *decoder) decodeScalar(s *segment, vals []byte) bool {
	src := d.chunk.src[:s.end]
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
	if d.chunk.symbols.escape >= 0 {
		s.escs += bytes.Count(all, []byte{d.chunk.symbols.sentinel})
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

// splitScalar divides elements into symbol values and planes. vals must have whole tiles, and the lengths must match.
func splitScalar(transform uint8, src, vals []byte, p *[maxPlanes][]byte) {
	le := binary.LittleEndian
	switch transform {
	case BF16:
		pl := p[0][:len(vals)]
		for i := range vals {
			w := le.Uint16(src[2*i:])
			vals[i] = byte(w >> 7)
			pl[i] = byte(w<<1 | w>>15)
		}
	case FP16:
		pl := p[0][:len(vals)]
		for i := 0; i < len(vals); i += 8 {
			var a, b, c byte
			for j := range 8 {
				w := le.Uint16(src[2*(i+j):])
				vals[i+j] = byte(w>>10) & 31
				pl[i+j] = byte(w)
				a |= byte(w>>8) & 1 << j
				b |= byte(w>>9) & 1 << j
				c |= byte(w>>15) << j
			}
			p[1][i/8], p[2][i/8], p[3][i/8] = a, b, c
		}
	case FP32:
		a, b, c := p[0][:len(vals)], p[1][:len(vals)], p[2][:len(vals)]
		for i := range vals {
			w := le.Uint32(src[4*i:])
			vals[i] = byte(w >> 23)
			a[i] = byte(w>>16<<1) | byte(w>>31)
			b[i] = byte(w >> 8)
			c[i] = byte(w)
		}
	case E4M3:
		for i := 0; i < len(vals); i += 2 {
			w, y := src[i], src[i+1]
			vals[i], vals[i+1] = w>>3&15, y>>3&15
			p[0][i/2] = w>>4&8 | w&7 | y&0x80 | y&7<<4
		}
	case E5M2:
		for i := 0; i < len(vals); i += 8 {
			var a, b, c byte
			for j := range 8 {
				w := src[i+j]
				vals[i+j] = w >> 2 & 31
				a |= w & 1 << j
				b |= w >> 1 & 1 << j
				c |= w >> 7 << j
			}
			p[0][i/8], p[1][i/8], p[2][i/8] = a, b, c
		}
	case Int8:
		for i := 0; i < len(vals); i += 2 {
			w, y := src[i], src[i+1]
			vals[i], vals[i+1] = w>>4, y>>4
			p[0][i/2] = w&15 | y<<4
		}
	case Nibbles:
		for i, w := range src {
			vals[2*i], vals[2*i+1] = w&15, w>>4
		}
	case Bytes:
		copy(vals, src)
	}
}

// mergeScalar joins symbol values and planes. It is the inverse of splitScalar. vals must have whole tiles, and the
// lengths must match.
func mergeScalar(transform uint8, dst, vals []byte, p *[maxPlanes][]byte) {
	le := binary.LittleEndian
	switch transform {
	case BF16:
		pl := p[0][:len(vals)]
		dst = dst[:2*len(vals)]
		for i := 0; i+4 <= len(vals); i += 4 {
			// Process four elements at a time: spread the bytes to words, then rotate each word by 1.
			w := spreadBytes(le.Uint32(vals[i:]))<<8 | spreadBytes(le.Uint32(pl[i:]))
			le.PutUint64(dst[2*i:], w>>1&0x7fff7fff7fff7fff|w<<15&0x8000800080008000)
		}
	case FP16:
		pl := p[0][:len(vals)]
		for i, v := range vals {
			w := uint16(v)<<10 | uint16(pl[i]) | bitAt(p[1], i)<<8 | bitAt(p[2], i)<<9 | bitAt(p[3], i)<<15
			le.PutUint16(dst[2*i:], w)
		}
	case FP32:
		a, b, c := p[0][:len(vals)], p[1][:len(vals)], p[2][:len(vals)]
		for i, v := range vals {
			hi := uint32(v)<<23 | uint32(a[i]>>1)<<16 | uint32(a[i])<<31
			le.PutUint32(dst[4*i:], hi|uint32(b[i])<<8|uint32(c[i]))
		}
	case E4M3:
		for i, v := range vals {
			n := nibbleAt(p[0], i)
			dst[i] = v<<3 | n&7 | n>>3<<7
		}
	case E5M2:
		for i, v := range vals {
			dst[i] = v<<2 | byte(bitAt(p[0], i)|bitAt(p[1], i)<<1|bitAt(p[2], i)<<7)
		}
	case Int8:
		for i, v := range vals {
			dst[i] = v<<4 | nibbleAt(p[0], i)
		}
	case Nibbles:
		for i := range dst {
			dst[i] = vals[2*i] | vals[2*i+1]<<4
		}
	case Bytes:
		copy(dst, vals)
	}
}

// spreadBytes spreads four bytes to the low halves of four 16-bit words.
func spreadBytes(x uint32) uint64 {
	w := (uint64(x) | uint64(x)<<16) & 0x0000ffff0000ffff
	return (w | w<<8) & 0x00ff00ff00ff00ff
}

func bitAt(p []byte, i int) uint16 { return uint16(p[i>>3]>>(i&7)) & 1 }

func nibbleAt(p []byte, i int) byte { return p[i>>1] >> (i & 1 << 2) & 15 }
