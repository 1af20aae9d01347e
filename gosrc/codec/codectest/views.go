package codectest

// Creates tensor views for the digest tests.

import (
	"math/rand/v2"
	"slices"
	"unsafe"

	"github.com/overwire/overwire/gosrc/codec/digest"
)

// AnyView returns a random view of data, and a contiguous copy of the view. data must be at least 64 KiB long. Some
// views are contiguous, some overlap themselves, some are empty, and some have unaligned elements.
func AnyView(r *rand.Rand, data []byte) (v digest.View, copied []byte) {
	for {
		v = anyShape(r)
		low, high, elements := int64(0), v.Item, int64(1)
		for i, n := range v.Shape {
			elements *= n
			if n > 0 {
				low += min(0, (n-1)*v.Strides[i])
				high += max(0, (n-1)*v.Strides[i])
			}
		}
		if high-low > int64(len(data))-64 || elements > 1<<15 {
			continue
		}
		at := -low + r.Int64N(int64(len(data))-(high-low)-32)
		if r.IntN(2) == 0 {
			at = (at + 15) &^ 15
		}
		v.Address = uint64(uintptr(unsafe.Pointer(&data[0]))) + uint64(at)
		return v, copyContiguous(v, data, at)
	}
}

// anyShape returns a random view without an address.
func anyShape(r *rand.Rand) (v digest.View) {
	v.Item = 1 << r.IntN(5)
	rank := r.IntN(5)
	v.Shape, v.Strides = make([]int64, rank), make([]int64, rank)
	order := r.Perm(rank)
	if r.IntN(2) == 0 { // row-major
		slices.Sort(order)
		slices.Reverse(order)
	}
	unit := v.Item
	if r.IntN(8) == 0 {
		unit++
	}
	for _, i := range order {
		v.Shape[i] = 1 + r.Int64N(50)
		v.Strides[i] = unit
		unit *= v.Shape[i]
		switch r.IntN(12) {
		case 0, 1:
			unit += v.Item * r.Int64N(5)
		case 2:
			v.Strides[i] = -v.Strides[i]
		case 3:
			v.Strides[i] = 0
		case 4:
			v.Shape[i] = r.Int64N(2)
		}
	}
	return v
}

// copyContiguous returns the contiguous copy of the view at offset `at` of data.
func copyContiguous(v digest.View, data []byte, at int64) (out []byte) {
	if len(v.Shape) == 0 {
		return append(out, data[at:at+v.Item]...)
	}
	inner := digest.View{Item: v.Item, Shape: v.Shape[1:], Strides: v.Strides[1:]}
	for k := range v.Shape[0] {
		out = append(out, copyContiguous(inner, data, at+k*v.Strides[0])...)
	}
	return out
}
