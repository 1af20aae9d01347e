//go:build goexperiment.simd && amd64 && !scalar

package digest

// Sums words with AVX-512, which has 64-bit multiplication.

import (
	"simd/archsimd"
	"unsafe"

	"github.com/overwire/overwire/gosrc/internal/avx"
)

var wide = archsimd.X86.AVX512()

const lanes = 8

// sumFast sums the words of p up to a multiple of its stride, and returns their number.
func sumFast(s *State, i uint64, p []byte) int {
	n := len(p) / WordBytes &^ (2*lanes - 1)
	if !wide || n == 0 {
		return 0
	}
	var keys [2][lanes]uint64
	for k := range 2 * lanes {
		keys[k/lanes][k%lanes] = (i + uint64(k) + 1) * stepA
	}
	x, y := archsimd.LoadUint64x8(&keys[0]), archsimd.LoadUint64x8(&keys[1])
	step := archsimd.BroadcastUint64x8((2 * lanes * stepA) & (1<<64 - 1))
	m1, m2, one := archsimd.BroadcastUint64x8(mulM1), archsimd.BroadcastUint64x8(mulM2), archsimd.BroadcastUint64x8(1)
	var a, b, c, d archsimd.Uint64x8
	first := unsafe.Pointer(unsafe.SliceData(p))
	for offset := 0; offset < n*WordBytes; offset += 2 * lanes * WordBytes { // pointers never go past the last word
		t := archsimd.LoadUint64x8((*[lanes]uint64)(unsafe.Add(first, offset))).Add(x)
		u := archsimd.LoadUint64x8((*[lanes]uint64)(unsafe.Add(first, offset+lanes*WordBytes))).Add(y)
		t, u = t.Xor(t.ShiftAllRight(32)).Mul(m1), u.Xor(u.ShiftAllRight(32)).Mul(m1)
		t, u = t.Xor(t.ShiftAllRight(32)).Mul(m2), u.Xor(u.ShiftAllRight(32)).Mul(m2)
		th, uh := t.ShiftAllRight(32), u.ShiftAllRight(32)
		t, u = t.Xor(th), u.Xor(uh)
		a, c = a.Add(t), c.Add(u)
		b, d = b.Add(t.Mul(th.Or(one))), d.Add(u.Mul(uh.Or(one)))
		x, y = x.Add(step), y.Add(step)
	}
	var sums [2][lanes]uint64
	a.Add(c).Store(&sums[0])
	b.Add(d).Store(&sums[1])
	avx.Clear()
	for k := range lanes {
		s.A += sums[0][k]
		s.B += sums[1][k]
	}
	return n
}
