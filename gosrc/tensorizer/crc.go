package tensorizer

// This file combines the CRC-32 sums of consecutive pieces.

import (
	"hash/crc32"
	"sync"
)

// The arithmetic of CRC-32 (IEEE) works on polynomials modulo the CRC polynomial. Their bits are reversed, as in the
// sums, so 1<<31 is the polynomial 1.

// multiplyCRC returns the product of two polynomials.
func multiplyCRC(a, b uint32) uint32 {
	var p uint32
	for m := uint32(1) << 31; m != 0; m >>= 1 {
		if a&m != 0 {
			p ^= b
		}
		b = b>>1 ^ crc32.IEEE&-(b&1)
	}
	return p
}

// crcPower returns x to the power n. Multiplying a sum by it has the effect of appending n zero bits.
func crcPower(n uint64) uint32 {
	p := uint32(1) << 31
	for k := 0; n != 0; k, n = k+1, n>>1 {
		if n&1 != 0 {
			p = multiplyCRC(crcSquares()[k&31], p)
		}
	}
	return p
}

// crcJoin returns the CRC-32 of two consecutive pieces with the sums a and b. n is the length of the second piece in
// bytes.
func crcJoin(a, b uint32, n int64) uint32 { return multiplyCRC(crcPower(uint64(n)*8), a) ^ b }

// crcSquares returns x to the powers 2^0 to 2^31. After that, the values repeat.
var crcSquares = sync.OnceValue(func() (all [32]uint32) {
	all[0] = 1 << 30 // x
	for i := 1; i < len(all); i++ {
		all[i] = multiplyCRC(all[i-1], all[i-1])
	}
	return all
})
