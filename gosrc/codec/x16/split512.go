//go:build goexperiment.simd && amd64 && !scalar

package x16

// Divides elements into symbol values and planes with AVX-512.

import (
	"simd/archsimd"
	"unsafe"

	"github.com/overwire/overwire/gosrc/internal/avx"
)

// unzip512 selects the odd bytes of two registers, then the even bytes.
var unzip512 = func() (z [2][64]uint8) {
	for i := range 64 {
		z[0][i], z[1][i] = uint8(2*i+1), uint8(2*i)
	}
	return
}()

// splitFast is splitScalar with AVX-512. It returns false if splitScalar must do the work.
func splitFast(l Level, transform uint8, src, vals []byte, p *[maxPlanes][]byte) bool {
	n := len(vals)
	s, v, q, ok := planePointers(transform, src, vals, p)
	if l != AVX512 || !ok {
		return false
	}
	switch transform {
	case BF16:
		splitBF16(s, v, q[0], n)
	case FP16:
		splitFP16(s, v, &q, n)
	case FP32:
		splitFP32(s, v, &q, n)
	case E4M3:
		splitE4M3(s, v, q[0], n)
	case E5M2:
		splitE5M2(s, v, &q, n)
	case Int8:
		splitInt8(s, v, q[0], n)
	case Nibbles:
		splitNibbles(s, v, n)
	default:
		return false
	}
	avx.Clear()
	return true
}

// In all these functions, n is a multiple of 256, and each pointer refers to the bytes of n symbols.

func splitBF16(s, v, p unsafe.Pointer, n int) {
	odd, even := archsimd.LoadUint8x64(&unzip512[0]), archsimd.LoadUint8x64(&unzip512[1])
	for i := 0; i < n; i += 64 {
		a := archsimd.LoadUint16x32(at[[32]uint16](s, 2*i))
		b := archsimd.LoadUint16x32(at[[32]uint16](s, 2*i+64))
		a8 := a.ShiftAllLeftConcat(1, a).AsUint8x64()
		b8 := b.ShiftAllLeftConcat(1, b).AsUint8x64()
		a8.ConcatPermute(b8, odd).Store(at[[64]uint8](v, i))
		a8.ConcatPermute(b8, even).Store(at[[64]uint8](p, i))
	}
}

func splitFP32(s, v unsafe.Pointer, p *[maxPlanes]unsafe.Pointer, n int) {
	odd, even := archsimd.LoadUint8x64(&unzip512[0]), archsimd.LoadUint8x64(&unzip512[1])
	z0, z1 := archsimd.LoadUint8x64(&zip512[0]), archsimd.LoadUint8x64(&zip512[1])
	for i := 0; i < n; i += 64 {
		a, b := archsimd.LoadUint8x64(at[[64]uint8](s, 4*i)), archsimd.LoadUint8x64(at[[64]uint8](s, 4*i+64))
		c, d := archsimd.LoadUint8x64(at[[64]uint8](s, 4*i+128)), archsimd.LoadUint8x64(at[[64]uint8](s, 4*i+192))
		lo0, lo1 := a.ConcatPermute(b, even), c.ConcatPermute(d, even) // bytes 0 and 2 of each
		hi0, hi1 := a.ConcatPermute(b, odd), c.ConcatPermute(d, odd)   // bytes 1 and 3
		lo0.ConcatPermute(lo1, even).Store(at[[64]uint8](p[2], i))
		hi0.ConcatPermute(hi1, even).Store(at[[64]uint8](p[1], i))
		// Bytes 2 and 3 as a word, rotated by 1, are the plane and the value.
		x, y := lo0.ConcatPermute(lo1, odd), hi0.ConcatPermute(hi1, odd)
		w0, w1 := y.ConcatPermute(x, z0).AsUint16x32(), y.ConcatPermute(x, z1).AsUint16x32()
		a8, b8 := w0.ShiftAllLeftConcat(1, w0).AsUint8x64(), w1.ShiftAllLeftConcat(1, w1).AsUint8x64()
		a8.ConcatPermute(b8, odd).Store(at[[64]uint8](v, i))
		a8.ConcatPermute(b8, even).Store(at[[64]uint8](p[0], i))
	}
}

// bitPlane returns the plane of one bit of 32 words.
func bitPlane(w, bit archsimd.Uint16x32) uint32 { return w.And(bit).Equal(bit).ToBits() }

func splitFP16(s, v unsafe.Pointer, p *[maxPlanes]unsafe.Pointer, n int) {
	b8, b9 := archsimd.BroadcastUint16x32(1<<8), archsimd.BroadcastUint16x32(1<<9)
	b15, low5 := archsimd.BroadcastUint16x32(1<<15), archsimd.BroadcastUint16x32(31)
	for i := 0; i < n; i += 32 {
		w := archsimd.LoadUint16x32(at[[32]uint16](s, 2*i))
		w.ShiftAllRightConcat(10, w).And(low5).TruncateToUint8().Store(at[[32]uint8](v, i))
		w.TruncateToUint8().Store(at[[32]uint8](p[0], i))
		*at[uint32](p[1], i/8) = bitPlane(w, b8)
		*at[uint32](p[2], i/8) = bitPlane(w, b9)
		*at[uint32](p[3], i/8) = bitPlane(w, b15)
	}
}

func splitE5M2(s, v unsafe.Pointer, p *[maxPlanes]unsafe.Pointer, n int) {
	b0, b1 := archsimd.BroadcastUint8x64(1), archsimd.BroadcastUint8x64(2)
	b7, low5 := archsimd.BroadcastUint8x64(0x80), archsimd.BroadcastUint8x64(31)
	for i := 0; i < n; i += 64 {
		b := archsimd.LoadUint8x64(at[[64]uint8](s, i))
		shiftDown(b, 2).And(low5).Store(at[[64]uint8](v, i))
		*at[uint64](p[0], i/8) = b.And(b0).Equal(b0).ToBits()
		*at[uint64](p[1], i/8) = b.And(b1).Equal(b1).ToBits()
		*at[uint64](p[2], i/8) = b.And(b7).Equal(b7).ToBits()
	}
}

// shiftDown shifts 16-bit words right. The caller must mask the bits that move from one byte to the next.
func shiftDown(b b64, by uint8) b64 {
	w := b.AsUint16x32()
	return w.ShiftAllRightConcat(by, w).AsUint8x64()
}

// putNibbles packs the low nibbles of 64 bytes into the plane at p.
func putNibbles(b b64, weights archsimd.Int8x64, p unsafe.Pointer, i int) {
	b.DotProductPairsSaturated(weights).AsUint16x32().TruncateToUint8().Store(at[[32]uint8](p, i/2))
}

func splitE4M3(s, v, p unsafe.Pointer, n int) {
	low4, low3, b3 := archsimd.BroadcastUint8x64(15), archsimd.BroadcastUint8x64(7), archsimd.BroadcastUint8x64(8)
	weights := archsimd.LoadInt8x64(&packWeights)
	for i := 0; i < n; i += 64 {
		b := archsimd.LoadUint8x64(at[[64]uint8](s, i))
		shiftDown(b, 3).And(low4).Store(at[[64]uint8](v, i))
		putNibbles(b.And(low3).Or(shiftDown(b, 4).And(b3)), weights, p, i)
	}
}

func splitInt8(s, v, p unsafe.Pointer, n int) {
	low4, weights := archsimd.BroadcastUint8x64(15), archsimd.LoadInt8x64(&packWeights)
	for i := 0; i < n; i += 64 {
		b := archsimd.LoadUint8x64(at[[64]uint8](s, i))
		shiftDown(b, 4).And(low4).Store(at[[64]uint8](v, i))
		putNibbles(b.And(low4), weights, p, i)
	}
}

func splitNibbles(s, v unsafe.Pointer, n int) {
	low := archsimd.BroadcastUint16x32(0x0f0f)
	for i := 0; i < n; i += 64 {
		w := archsimd.LoadUint8x32(at[[32]uint8](s, i/2)).ExtendToUint16()
		w.Or(w.ShiftAllLeft(4)).And(low).AsUint8x64().Store(at[[64]uint8](v, i))
	}
}
