//go:build goexperiment.simd && amd64 && !scalar

package x16

// Joins symbol values and planes into elements with 512-bit vectors.

import (
	"simd/archsimd"
	"unsafe"
)

// zip512 interleaves the bytes of two registers of 64 bytes. Index 64 + i selects from the second register.
var zip512 = func() (z [2][64]uint8) {
	for i := range 128 {
		z[i/64][i%64] = uint8(i/2 + (1-i%2)*64)
	}
	return
}()

// mergeBF16x512 computes (value << 8 | plane), rotated right by 1 in 16 bits.
func mergeBF16x512(o, v, p unsafe.Pointer, n int) {
	z0, z1 := archsimd.LoadUint8x64(&zip512[0]), archsimd.LoadUint8x64(&zip512[1])
	for i := 0; i < n; i += 64 {
		a := archsimd.LoadUint8x64(at[[64]uint8](v, i))
		b := archsimd.LoadUint8x64(at[[64]uint8](p, i))
		w0 := a.ConcatPermute(b, z0).AsUint16x32()
		w1 := a.ConcatPermute(b, z1).AsUint16x32()
		w0.ShiftAllRightConcat(1, w0).AsUint8x64().Store(at[[64]uint8](o, 2*i))
		w1.ShiftAllRightConcat(1, w1).AsUint8x64().Store(at[[64]uint8](o, 2*i+64))
	}
}

// joinTopBytes512 is joinTopBytes256 for 64 bytes.
func joinTopBytes512(v, low, next, sign unsafe.Pointer, i int,
	bit0, bit1, bit7 archsimd.Uint8x64) archsimd.Uint8x64 {
	w := archsimd.LoadUint16x32(at[[32]uint16](v, i)).ShiftAllLeft(2).AsUint8x64()
	w = w.Or(bit0.Masked(archsimd.Mask8x64FromBits(*at[uint64](low, i/8))))
	w = w.Or(bit1.Masked(archsimd.Mask8x64FromBits(*at[uint64](next, i/8))))
	return w.Or(bit7.Masked(archsimd.Mask8x64FromBits(*at[uint64](sign, i/8))))
}

func mergeFP16x512(o, v unsafe.Pointer, p *[maxPlanes]unsafe.Pointer, n int) {
	z0, z1 := archsimd.LoadUint8x64(&zip512[0]), archsimd.LoadUint8x64(&zip512[1])
	bit0, bit1, bit7 := archsimd.BroadcastUint8x64(1), archsimd.BroadcastUint8x64(2), archsimd.BroadcastUint8x64(0x80)
	for i := 0; i < n; i += 64 {
		hi := joinTopBytes512(v, p[1], p[2], p[3], i, bit0, bit1, bit7)
		lo := archsimd.LoadUint8x64(at[[64]uint8](p[0], i))
		hi.ConcatPermute(lo, z0).Store(at[[64]uint8](o, 2*i))
		hi.ConcatPermute(lo, z1).Store(at[[64]uint8](o, 2*i+64))
	}
}

func mergeE5M2x512(o, v unsafe.Pointer, p *[maxPlanes]unsafe.Pointer, n int) {
	bit0, bit1, bit7 := archsimd.BroadcastUint8x64(1), archsimd.BroadcastUint8x64(2), archsimd.BroadcastUint8x64(0x80)
	for i := 0; i < n; i += 64 {
		joinTopBytes512(v, p[0], p[1], p[2], i, bit0, bit1, bit7).Store(at[[64]uint8](o, i))
	}
}
