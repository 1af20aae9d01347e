// Package crc is the arithmetic of CRC-32 (IEEE): polynomials modulo its own, bits
// reversed as its sums are, so that 1<<31 is one.
package crc

import (
	"hash/crc32"
	"sync"
)

// Times multiplies.
func Times(a, b uint32) uint32 {
	var p uint32
	for m := uint32(1) << 31; m != 0; m >>= 1 {
		if a&m != 0 {
			p ^= b
		}
		b = b>>1 ^ crc32.IEEE&-(b&1)
	}
	return p
}

// Power is x to the n: what a sum is multiplied by when n bits follow.
func Power(n uint64) uint32 {
	p := uint32(1) << 31
	for k := 0; n != 0; k, n = k+1, n>>1 {
		if n&1 != 0 {
			p = Times(squares()[k&31], p)
		}
	}
	return p
}

// Join is the CRC-32 of what a and b are the sums of, one behind the other; of the
// latter n bytes.
func Join(a, b uint32, n int64) uint32 { return Times(Power(uint64(n)*8), a) ^ b }

// squares are x to the powers of two, which come again after 32.
var squares = sync.OnceValue(func() (all [32]uint32) {
	all[0] = 1 << 30 // x
	for i := 1; i < len(all); i++ {
		all[i] = Times(all[i-1], all[i-1])
	}
	return all
})
