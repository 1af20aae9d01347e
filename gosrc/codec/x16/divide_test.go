//go:build goexperiment.simd && amd64 && !scalar

package x16

import (
	"math/rand/v2"
	"simd/archsimd"
	"testing"
)

// The vector division is exact for every frequency over its whole range. The test uses multiples, adjacent numbers
// and random numbers.
func TestDivide(t *testing.T) {
	if best < AVX512 {
		t.Skip("no AVX-512")
	}
	const seed = 9
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	for f := uint32(1); f < 256; f++ {
		var c fastCoder
		e := Encoder{level: AVX512}
		e.prepareFast(&model{freq: [16]uint8{uint8(f)}})
		c = e.fast
		for range 500 {
			var x, q, rest [16]uint32
			for i := range x {
				x[i] = uint32(r.Uint64N(uint64(f) << 24))
				switch r.IntN(4) {
				case 0:
					x[i] = x[i] / f * f
				case 1:
					x[i] = x[i]/f*f + f - 1
				case 2:
					x[i] >>= r.IntN(24)
				}
			}
			a, b := divide512(archsimd.LoadUint32x16(&x), archsimd.BroadcastUint32x16(c.freq[0]),
				archsimd.BroadcastUint32x16(c.small[0]), archsimd.BroadcastFloat32x16(c.inverse[0]))
			a.Store(&q)
			b.Store(&rest)
			for i := range x {
				if q[i] != x[i]/f || rest[i] != x[i]%f {
					t.Fatalf("%d / %d gives %d, %d", x[i], f, q[i], rest[i])
				}
			}
		}
	}
}
