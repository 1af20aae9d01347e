package x16

// Divides elements into symbol values and planes (scalar reference).

import "encoding/binary"

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
