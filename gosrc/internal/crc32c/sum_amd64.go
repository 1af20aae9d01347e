//go:build goexperiment.simd && amd64 && !scalar

package crc32c

// This file computes CRC-32C with AVX-512 and carry-less multiplication.

import (
	"hash/crc32"
	"simd/archsimd"
	"unsafe"

	"github.com/overwire/overwire/gosrc/internal/avx"
)

// Each fold moves 256 bytes of state 2,048 bits ahead with two carry-less multiplications per lane (V. Gopal et al.,
// "Fast CRC computation for generic polynomials using PCLMULQDQ", Intel, 2009; here bit-reflected for CRC-32C). The
// final 256 bytes have the same remainder as all bytes that were folded into them. Their CRC is computed in the usual
// way.
const (
	foldLow  = 0x0dcb17aa4 // x^(2048+32) mod P, reflected and shifted
	foldHigh = 0x0b9e02b86 // x^(2048-32) mod P
	block    = 256
	folded   = 4 * block // minimum length at which folding is faster
)

var (
	canFold = archsimd.X86.AVX512() && archsimd.X86.AVX512VPCLMULQDQ()
	folds   = [8]uint64{foldLow, foldHigh, foldLow, foldHigh, foldLow, foldHigh, foldLow, foldHigh}
	seed    = [8]uint64{0xffffffff}
)

func sumBytes(p []byte) uint32 {
	if !canFold || len(p) < folded {
		return crc32.Checksum(p, castagnoli)
	}
	var tail [block]byte
	n := foldBlocks(&tail, p)
	// Update inverts its input and output, so ^0 passes a state of 0.
	return crc32.Update(crc32.Update(^uint32(0), castagnoli, tail[:]), castagnoli, p[n:])
}

// foldBlocks folds the whole blocks of p (at least two), and returns their length in bytes.
func foldBlocks(left *[block]byte, p []byte) int {
	k := archsimd.LoadUint64x8(&folds)
	at := unsafe.Pointer(unsafe.SliceData(p))
	load := func(i int) archsimd.Uint64x8 { return archsimd.LoadUint64x8((*[8]uint64)(unsafe.Add(at, i))) }
	a, b, c, d := load(0).Xor(archsimd.LoadUint64x8(&seed)), load(64), load(128), load(192)
	n := block
	for ; len(p)-n >= block; n += block {
		a = a.CarrylessMultiplyGrouped(0, 0, k).Xor(a.CarrylessMultiplyGrouped(1, 1, k)).Xor(load(n))
		b = b.CarrylessMultiplyGrouped(0, 0, k).Xor(b.CarrylessMultiplyGrouped(1, 1, k)).Xor(load(n + 64))
		c = c.CarrylessMultiplyGrouped(0, 0, k).Xor(c.CarrylessMultiplyGrouped(1, 1, k)).Xor(load(n + 128))
		d = d.CarrylessMultiplyGrouped(0, 0, k).Xor(d.CarrylessMultiplyGrouped(1, 1, k)).Xor(load(n + 192))
	}
	to := unsafe.Pointer(left)
	a.Store((*[8]uint64)(to))
	b.Store((*[8]uint64)(unsafe.Add(to, 64)))
	c.Store((*[8]uint64)(unsafe.Add(to, 128)))
	d.Store((*[8]uint64)(unsafe.Add(to, 192)))
	avx.Clear()
	return n
}
