package plan

// This file computes the memory that tensors take, and divides loads into windows.

import (
	"math"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/sizes"
	"github.com/overwire/overwire/gosrc/tensor"
)

// A Conversion describes how the caller converts loaded tensors, one after another. A tensor is in memory twice while
// it is converted.
type Conversion struct {
	// To is the dtype that floating-point tensors are converted to, or Invalid if the engine does not know it. Item
	// is the size of its elements in bytes. 0 means no conversion.
	To   tensor.DType
	Item int64
	// Unpack means that each F4 is unpacked to a byte.
	Unpack bool
	// OnTheWay reports whether a dtype is converted to To during the load. nil means that no dtype is.
	OnTheWay func(from tensor.DType) bool
}

// A Part is a number of elements of a tensor. Whole means all of them.
type Part struct{ Tensor, Elements int64 }

// A Cost is how many bytes a tensor takes when it lands, and how many remain after its conversion. Twice means that the
// conversion makes a second copy.
type Cost struct {
	Lands, Stays int64
	Twice        bool
}

// Costs returns the cost of each part.
func Costs(ix *tensor.Index, parts []Part, then Conversion) ([]Cost, error) {
	costs := make([]Cost, len(parts))
	for i, p := range parts {
		if p.Tensor < 0 || p.Tensor >= int64(len(ix.Tensors)) {
			return nil, errs.New(errs.ErrArgument, "part %d: invalid tensor number %d: the model has %d tensors",
				i, p.Tensor, len(ix.Tensors))
		}
		t := &ix.Tensors[p.Tensor]
		n := t.Bytes
		if p.Elements != Whole {
			bits := int64(t.DType.Bits())
			if p.Elements < 0 || p.Elements > n/bits*8+n%bits*8/bits {
				return nil, errs.New(errs.ErrArgument,
					"part %d: invalid number of elements %d for %q, a tensor of %d bytes", i, p.Elements, t.Name, n)
			}
			n = p.Elements/8*bits + (p.Elements%8*bits+7)/8
		}
		costs[i] = costOf(t.DType, n, then)
	}
	return costs, nil
}

// costOf returns the cost of n bytes, which must be whole elements of dtype d.
func costOf(d tensor.DType, n int64, then Conversion) Cost {
	switch {
	case d == tensor.F4 && then.Unpack:
		return Cost{n, mulSaturating(n, 2), true}
	case !d.Floating() || then.Item <= 0 || d == then.To:
		return Cost{n, n, false}
	}
	cast := mulSaturating(n/int64(d.Bits()/8), then.Item)
	if then.OnTheWay != nil && then.OnTheWay(d) {
		return Cost{cast, cast, false}
	}
	return Cost{n, cast, true}
}

// Peak returns the maximum bytes that tensors take at any moment if all are loaded before the first is converted.
func Peak(costs []Cost) int64 {
	var now int64
	for _, c := range costs {
		now = addSaturating(now, c.Lands)
	}
	peak := now
	for _, c := range costs {
		if c.Twice {
			peak = max(peak, addSaturating(now, c.Stays))
			now = addSaturating(now-min(now, c.Lands), c.Stays)
		}
	}
	return peak
}

// A Window is a run of consecutive tensors that load together, and the maximum bytes that they take.
type Window struct {
	Tensors int   `json:"tensors"`
	Bytes   int64 `json:"bytes"`
}

// Windows divides tensors into windows of at most half the budget, so that one loads while another is in use. A
// larger tensor gets a window for itself. No tensor may exceed the budget: over is the first tensor that does, or
// -1.
func Windows(costs []Cost, budget int64) (ws []Window, over int) {
	for i := range costs {
		n := Peak(costs[i : i+1])
		if n > budget {
			return nil, i
		}
		if k := len(ws) - 1; k >= 0 && addSaturating(ws[k].Bytes, n) <= budget/2 {
			ws[k] = Window{ws[k].Tensors + 1, ws[k].Bytes + n}
		} else {
			ws = append(ws, Window{1, n})
		}
	}
	return ws, -1
}

// addSaturating and mulSaturating return at most math.MaxInt64, because a file's header may claim larger sizes.
func addSaturating(a, b int64) int64 {
	if a > math.MaxInt64-b {
		return math.MaxInt64
	}
	return a + b
}

func mulSaturating(a, b int64) int64 {
	if n, ok := sizes.Mul(uint64(a), uint64(b)); ok && n <= math.MaxInt64 {
		return int64(n)
	}
	return math.MaxInt64
}
