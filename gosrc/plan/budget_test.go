package plan

import (
	"math"
	"math/big"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/overwire/overwire/gosrc/tensor"
)

// Floating-point types are cast, packed types and scales are not, and F4 is unpacked only if the caller asks for it. A
// cast during the load is counted once.
func TestCost(t *testing.T) {
	narrow := func(d tensor.DType) bool { return d != tensor.F64 }
	for _, c := range []struct {
		d    tensor.DType
		n    int64
		then Conversion
		want Cost
	}{
		{tensor.F32, 40, Conversion{}, Cost{40, 40, false}}, {tensor.F32, 40, Conversion{Item: 2}, Cost{40, 20, true}},
		{tensor.F32, 40, Conversion{Item: 16}, Cost{40, 160, true}},
		{tensor.F8E4M3FNUZ, 7, Conversion{Item: 4}, Cost{7, 28, true}},
		{tensor.F8E8M0, 7, Conversion{Item: 4}, Cost{7, 7, false}},
		{tensor.BF16, 0, Conversion{Item: 8}, Cost{0, 0, true}},
		{tensor.I64, 80, Conversion{Item: 2}, Cost{80, 80, false}},
		{tensor.Bool, 3, Conversion{Item: 2}, Cost{3, 3, false}},
		{tensor.C64, 16, Conversion{Item: 2}, Cost{16, 16, false}},
		{tensor.F16, 4, Conversion{To: tensor.F32, Item: 4, OnTheWay: narrow}, Cost{8, 8, false}},
		{tensor.F64, 8, Conversion{To: tensor.F32, Item: 4, OnTheWay: narrow}, Cost{8, 4, true}},
		{tensor.F4, 5, Conversion{Item: 4}, Cost{5, 5, false}},
		{tensor.F4, 5, Conversion{Item: 4, Unpack: true}, Cost{5, 10, true}},
		{tensor.F6E2M3, 3, Conversion{Item: 4, Unpack: true}, Cost{3, 3, false}},
		{tensor.F16, 4, Conversion{To: tensor.F16, Item: 2}, Cost{4, 4, false}},
		{tensor.BF16, 4, Conversion{To: tensor.F16, Item: 2}, Cost{4, 4, true}},
		{tensor.F8E5M2, math.MaxInt64 / 2, Conversion{Item: 8}, Cost{math.MaxInt64 / 2, math.MaxInt64, true}},
		{tensor.F4, math.MaxInt64 - 1, Conversion{Unpack: true}, Cost{math.MaxInt64 - 1, math.MaxInt64, true}},
	} {
		if got := costOf(c.d, c.n, c.then); got != c.want {
			t.Errorf("%v %d %+v: %+v, want %+v", c.d, c.n, c.then, got, c.want)
		}
	}
}

// Peak equals the result of the same sums with big integers. Windows contain each tensor once, in order. No two
// neighbouring windows fit into one, and none exceeds its share of the budget.
func TestBudgets(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	for range 3000 {
		costs := make([]Cost, r.IntN(12))
		most := []int64{3, 1000, math.MaxInt64 - 1}[r.IntN(3)]
		for i := range costs {
			costs[i] = Cost{r.Int64N(most), r.Int64N(most), true}
			if r.IntN(2) == 0 {
				costs[i] = Cost{costs[i].Lands, costs[i].Lands, false}
			}
		}
		now, peak := new(big.Int), new(big.Int)
		see := func(n *big.Int) {
			if n.Cmp(peak) > 0 {
				peak.Set(n)
			}
		}
		for _, c := range costs {
			now.Add(now, big.NewInt(c.Lands))
		}
		see(now)
		for _, c := range costs {
			if c.Twice {
				see(now.Add(now, big.NewInt(c.Stays)))
				now.Sub(now, big.NewInt(c.Lands))
			}
		}
		got := Peak(costs)
		if peak.IsInt64() && got != peak.Int64() || !peak.IsInt64() && got != math.MaxInt64 {
			t.Fatalf("%v: peak %d, want %v", costs, got, peak)
		}
		budget := r.Int64N(most) + 1
		ws, over := Windows(costs, budget)
		if over >= 0 {
			if ws != nil || Peak(costs[over:over+1]) <= budget {
				t.Fatalf("%v by %d: over %d", costs, budget, over)
			}
			continue
		}
		at, before := 0, int64(math.MaxInt64)
		for _, w := range ws {
			var n int64
			for _, c := range costs[at : at+w.Tensors] {
				n = addSaturating(n, Peak([]Cost{c}))
			}
			first := Peak(costs[at : at+1])
			if n != w.Bytes || w.Tensors > 1 && n > budget/2 || addSaturating(before, first) <= budget/2 {
				t.Fatalf("%v by %d: %v", costs, budget, ws)
			}
			at, before = at+w.Tensors, n
		}
		if at != len(costs) {
			t.Fatalf("%v by %d: %v", costs, budget, ws)
		}
	}
}
