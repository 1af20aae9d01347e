package cudatest

// Generates bytes that compress like weights.

import (
	"encoding/binary"
	"math/rand/v2"

	"github.com/overwire/overwire/gosrc/codec/x16"
)

// Weights returns n bytes that compress with a transform.
func Weights(r *rand.Rand, transform uint8, n int) []byte {
	b := make([]byte, n)
	le := binary.LittleEndian
	for i := 0; i < n; i++ {
		switch transform {
		case x16.BF16, x16.FP16:
			shift := 7
			if transform == x16.FP16 {
				shift = 10
			}
			if i+2 <= n {
				exp := 12 + int(1.5*r.NormFloat64())
				le.PutUint16(b[i:], uint16(exp&31)<<shift|uint16(r.Uint32())&(1<<shift-1)|uint16(r.Uint32())&0x8000)
				i++
			}
		case x16.FP32:
			if i+4 <= n {
				exp := uint32(120+int(2*r.NormFloat64())) & 255
				le.PutUint32(b[i:], exp<<23|r.Uint32()&0x807fffff)
				i += 3
			}
		case x16.E4M3:
			b[i] = byte(7+int(r.NormFloat64()))&15<<3 | byte(r.Uint32())&0x87
		case x16.E5M2:
			b[i] = byte(15+int(r.NormFloat64()))&31<<2 | byte(r.Uint32())&0x83
		case x16.Int8:
			b[i] = byte(int8(10 * r.NormFloat64()))
		case x16.Nibbles:
			b[i] = byte(int(r.NormFloat64()))&15 | byte(int(r.NormFloat64()))&15<<4
		default:
			b[i] = byte(r.IntN(3) * r.IntN(3))
		}
	}
	return b
}
