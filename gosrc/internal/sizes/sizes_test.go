package sizes

import (
	"math"
	"math/big"
	"testing"
)

// edges are numbers at which sums and products overflow.
var edges = []uint64{0, 1, 2, 3, 7, 8, 63, 64, 65, 1023, 1 << 31, 1<<31 - 1, 1 << 32, 1<<32 - 1, 1<<63 - 64, 1<<63 - 1,
	1 << 63, 1<<64 - 64, 1<<64 - 1}

// Every result equals that of arbitrary-precision arithmetic, or is reported as too large.
func TestAgainstBig(t *testing.T) {
	for _, a := range edges {
		for _, b := range edges {
			x, y := new(big.Int).SetUint64(a), new(big.Int).SetUint64(b)
			got, ok := Mul(a, b)
			want := new(big.Int).Mul(x, y)
			if ok != want.IsUint64() || ok && got != want.Uint64() {
				t.Errorf("%d * %d: %d %v", a, b, got, ok)
			}
			if b == 0 {
				continue
			}
			q, m := new(big.Int).DivMod(x, y, new(big.Int))
			if m.Sign() > 0 {
				q.Add(q, big.NewInt(1))
			}
			if n := CeilDiv(a, b); n != q.Uint64() {
				t.Errorf("%d / %d: %d, want %d", a, b, n, q)
			}
			up := new(big.Int).Mul(q, y)
			if n := RoundUp(a, b); up.IsUint64() && n != up.Uint64() {
				t.Errorf("%d rounded up to a multiple of %d: %d, want %d", a, b, n, up)
			}
			if a <= math.MaxInt64 && b <= math.MaxInt64 {
				if n := CeilDiv(int64(a), int64(b)); uint64(n) != q.Uint64() {
					t.Errorf("%d / %d: %d, want %d", a, b, n, q)
				}
				if n := RoundUp(int64(a), int64(b)); up.IsInt64() && n != up.Int64() {
					t.Errorf("%d rounded up to a multiple of %d: %d, want %d", a, b, n, up)
				}
			}
		}
	}
}
