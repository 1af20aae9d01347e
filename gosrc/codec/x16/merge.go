package x16

// Joins symbol values and planes into elements (scalar reference).

import "encoding/binary"

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

// patchEscape replaces the sentinel in element i by v. It returns false if the element does not have the sentinel.
func (d *decoder) patchEscape(i int, v byte) bool {
	le := binary.LittleEndian
	x := v ^ d.sentinel // XOR with x replaces the sentinel by v
	switch d.transform {
	case BF16:
		w := le.Uint16(d.dst[2*i:])
		le.PutUint16(d.dst[2*i:], w^uint16(x)<<7)
		return byte(w>>7) == d.sentinel
	case FP16:
		w := le.Uint16(d.dst[2*i:])
		le.PutUint16(d.dst[2*i:], w^uint16(x)<<10)
		return byte(w>>10)&31 == d.sentinel
	case FP32:
		w := le.Uint32(d.dst[4*i:])
		le.PutUint32(d.dst[4*i:], w^uint32(x)<<23)
		return byte(w>>23) == d.sentinel
	case E5M2:
		w := d.dst[i]
		d.dst[i] = w ^ x<<2
		return w>>2&31 == d.sentinel
	case Bytes:
		w := d.dst[i]
		d.dst[i] = v
		return w == d.sentinel
	}
	return false // other transforms have no escapes
}
