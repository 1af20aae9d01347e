//go:build goexperiment.simd && amd64 && !scalar

package x16

// Joins symbol values and planes into elements with 256-bit vectors.

import (
	"simd/archsimd"
	"unsafe"

	"github.com/overwire/overwire/gosrc/internal/avx"
)

// mergeFast is mergeScalar with vectors of 256 bits, or with 512 bits for some transforms at the AVX-512 level. It
// returns false if mergeScalar must do the work: for the transform Bytes, or if the lengths are wrong.
func mergeFast(l Level, transform uint8, dst, vals []byte, p *[maxPlanes][]byte) bool {
	n := len(vals)
	o, v, q, ok := planePointers(transform, dst, vals, p)
	if !ok {
		return false
	}
	switch transform {
	case BF16:
		if l == AVX512 {
			mergeBF16x512(o, v, q[0], n)
		} else {
			mergeBF16(o, v, q[0], n)
		}
	case FP16:
		if l == AVX512 {
			mergeFP16x512(o, v, &q, n)
		} else {
			mergeFP16(o, v, &q, n)
		}
	case FP32:
		mergeFP32(o, v, &q, n)
	case E4M3:
		mergeE4M3(o, v, q[0], n)
	case E5M2:
		if l == AVX512 {
			mergeE5M2x512(o, v, &q, n)
		} else {
			mergeE5M2(o, v, &q, n)
		}
	case Int8:
		mergeInt8(o, v, q[0], n)
	case Nibbles:
		mergeNibbles(o, v, n)
	default:
		return false
	}
	avx.Clear()
	return true
}

// In all these functions, n is a multiple of 256, and each pointer refers to the bytes of n symbols.

// loadWide loads 16 bytes as 16 words.
func loadWide(p unsafe.Pointer, i int) archsimd.Uint16x16 {
	return archsimd.LoadUint8x16(at[[16]uint8](p, i)).ExtendToUint16()
}

// join16 computes (v << 8 | p) rotated right by 1. half is 1 << 15; MulHigh with it shifts right by 1.
func join16(v, p, half archsimd.Uint16x16) archsimd.Uint16x16 {
	return v.ShiftAllLeft(7).Or(p.MulHigh(half)).Or(p.ShiftAllLeft(15))
}

func mergeBF16(o, v, p unsafe.Pointer, n int) {
	half := archsimd.BroadcastUint16x16(1 << 15)
	for i := 0; i < n; i += 16 {
		join16(loadWide(v, i), loadWide(p, i), half).Store(at[[16]uint16](o, 2*i))
	}
}

func mergeFP32(o, v unsafe.Pointer, p *[maxPlanes]unsafe.Pointer, n int) {
	half := archsimd.BroadcastUint16x16(1 << 15)
	for i := 0; i < n; i += 16 {
		hi := join16(loadWide(v, i), loadWide(p[0], i), half)
		lo := loadWide(p[1], i).ShiftAllLeft(8).Or(loadWide(p[2], i))
		a, b := lo.InterleaveLoGrouped(hi).AsUint8x32(), lo.InterleaveHiGrouped(hi).AsUint8x32()
		a.Select128FromPair(0, 2, b).Store(at[[32]uint8](o, 4*i))
		a.Select128FromPair(1, 3, b).Store(at[[32]uint8](o, 4*i+32))
	}
}

var bits8, byteOfBit = func() (b [32]uint8, at [32]int8) {
	for i := range b {
		b[i], at[i] = 1<<(i%8), int8(i/8)
	}
	return
}()

// spread8 returns 32 bytes. A byte is `bit` if its bit is set in the 32 bits at p, otherwise 0.
func spread8(p unsafe.Pointer, i int, each archsimd.Uint8x32, of archsimd.Int8x32, bit uint8) archsimd.Uint8x32 {
	m := archsimd.BroadcastUint32x8(*at[uint32](p, i/8)).AsUint8x32().PermuteOrZeroGrouped(of)
	return archsimd.BroadcastUint8x32(bit).Masked(m.And(each).Equal(each))
}

// joinTopBytes256 joins 5-bit exponents and three planes of bits, the lowest two bits and the sign, into 32 bytes.
// These are the bytes of e5m2 and the upper bytes of fp16.
func joinTopBytes256(v, low, next, sign unsafe.Pointer, i int, each archsimd.Uint8x32,
	of archsimd.Int8x32) archsimd.Uint8x32 {
	w := archsimd.LoadUint16x16(at[[16]uint16](v, i)).ShiftAllLeft(2).AsUint8x32()
	return w.Or(spread8(low, i, each, of, 1)).Or(spread8(next, i, each, of, 2)).Or(spread8(sign, i, each, of, 0x80))
}

func mergeFP16(o, v unsafe.Pointer, p *[maxPlanes]unsafe.Pointer, n int) {
	each, of := archsimd.LoadUint8x32(&bits8), archsimd.LoadInt8x32(&byteOfBit)
	for i := 0; i < n; i += 32 {
		hi := joinTopBytes256(v, p[1], p[2], p[3], i, each, of)
		hi.GetLo().ExtendToUint16().ShiftAllLeft(8).Or(loadWide(p[0], i)).Store(at[[16]uint16](o, 2*i))
		hi.GetHi().ExtendToUint16().ShiftAllLeft(8).Or(loadWide(p[0], i+16)).Store(at[[16]uint16](o, 2*i+32))
	}
}

func mergeE5M2(o, v unsafe.Pointer, p *[maxPlanes]unsafe.Pointer, n int) {
	each, of := archsimd.LoadUint8x32(&bits8), archsimd.LoadInt8x32(&byteOfBit)
	for i := 0; i < n; i += 32 {
		joinTopBytes256(v, p[0], p[1], p[2], i, each, of).Store(at[[32]uint8](o, i))
	}
}

// loadNibbles returns 32 nibbles of a plane as bytes.
func loadNibbles(p unsafe.Pointer, i int, low archsimd.Uint16x16) archsimd.Uint16x16 {
	w := loadWide(p, i/2)
	return w.Or(w.ShiftAllLeft(4)).And(low)
}

func mergeE4M3(o, v, p unsafe.Pointer, n int) {
	low, low3 := archsimd.BroadcastUint16x16(0x0f0f), archsimd.BroadcastUint16x16(0x0707)
	top := archsimd.BroadcastUint16x16(0x8080)
	for i := 0; i < n; i += 32 {
		m := loadNibbles(p, i, low)
		w := archsimd.LoadUint16x16(at[[16]uint16](v, i)).ShiftAllLeft(3).Or(m.And(low3))
		w.Or(m.ShiftAllLeft(4).And(top)).Store(at[[16]uint16](o, i))
	}
}

func mergeInt8(o, v, p unsafe.Pointer, n int) {
	low := archsimd.BroadcastUint16x16(0x0f0f)
	for i := 0; i < n; i += 32 {
		w := archsimd.LoadUint16x16(at[[16]uint16](v, i)).ShiftAllLeft(4)
		w.Or(loadNibbles(p, i, low)).Store(at[[16]uint16](o, i))
	}
}

// pairWeights makes VPMADDUBSW join two nibbles. evenBytes packs the low bytes of words.
var pairWeights, evenBytes = func() (w, e [32]int8) {
	for i := range w {
		w[i] = int8(1 + i%2*15)
		e[i] = int8(uint8(i%16*2 | i&8<<4))
	}
	return
}()

func mergeNibbles(o, v unsafe.Pointer, n int) {
	weights, even := archsimd.LoadInt8x32(&pairWeights), archsimd.LoadInt8x32(&evenBytes)
	order := archsimd.LoadUint32x8(&order256)
	for i := 0; i < n; i += 64 {
		a := archsimd.LoadUint8x32(at[[32]uint8](v, i)).DotProductPairsSaturated(weights)
		b := archsimd.LoadUint8x32(at[[32]uint8](v, i+32)).DotProductPairsSaturated(weights)
		a8 := a.AsUint16x16().AsUint8x32().PermuteOrZeroGrouped(even).AsUint64x4()
		b8 := b.AsUint16x16().AsUint8x32().PermuteOrZeroGrouped(even).AsUint64x4()
		a8.InterleaveLoGrouped(b8).AsUint32x8().Permute(order).AsUint8x32().Store(at[[32]uint8](o, i/2))
	}
}
