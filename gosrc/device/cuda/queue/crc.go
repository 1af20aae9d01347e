package queue

/*
#include "../../../../cuda/abi_crc.h"
*/
import "C"

import (
	"hash/crc32"
	"sync"

	"github.com/overwire/overwire/gosrc/tensor"
)

// This file compares checksums of stored bytes on the device. A kernel computes sums of parts of the chunks
// (cuda/crc.cuh), and the host combines them.

const (
	crcPoly = 0x82f63b78 // polynomial of CRC-32C; the lowest bit of a word is the highest power of x
	crcOne  = 0x80000000
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// multiplyCRC returns the product of two polynomials.
func multiplyCRC(a, b uint32) (p uint32) {
	for ; a != 0; a <<= 1 {
		if a&crcOne != 0 {
			p ^= b
		}
		b = b>>1 ^ crcPoly&-(b&1)
	}
	return p
}

// crcPowers holds powers of x.
type crcPowers struct {
	bytes [C.OW_CRC_PART]uint32                             // [n]: x^(8 n)
	parts [4][tensor.MaxChunkBytes/C.OW_CRC_PART + 1]uint32 // [k][n]: x^(8 n OW_CRC_PART - 8 k)
}

var powers = sync.OnceValue(func() *crcPowers {
	table := &crcPowers{}
	v := uint32(crcOne)
	for n := range table.bytes {
		table.bytes[n] = v
		v = multiplyCRC(crcOne>>8, v)
	}
	part := v
	v = crcOne
	for n := range table.parts[0] {
		table.parts[0][n] = v
		v = multiplyCRC(part, v)
	}
	for k := range table.parts[1:] {
		for n, v := range table.parts[k] {
			for range 8 { // divide by x
				v = (v^crcPoly&-(v>>31))<<1 | v>>31
			}
			table.parts[k+1][n] = v
		}
	}
	return table
})

// crcOfZeros returns the CRC of n zero bytes, to which the sums of the parts are added. It is not 0, because a CRC
// starts with all bits set and is inverted at the end.
func crcOfZeros(n uint32) uint32 {
	pow := powers()
	return ^multiplyCRC(^uint32(0), multiplyCRC(pow.bytes[n%C.OW_CRC_PART], pow.parts[0][n/C.OW_CRC_PART]))
}
