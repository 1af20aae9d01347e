package weights

// This file makes tensors that stress codecs: extreme values, sizes, shapes and names.

import (
	"encoding/binary"
	"fmt"
	"math"
	"slices"

	"github.com/overwire/overwire/gosrc/tensor"
)

// hostileTensors returns tensors that stress codecs: extreme values of every float dtype, sizes around block
// boundaries, shapes without elements or dimensions, and names that need escapes.
func hostileTensors(seed uint64) []Tensor {
	r := seedWith(seed, 0x6057)
	var out []Tensor
	add := func(name string, d tensor.DType, shape []int64, data []byte) {
		out = append(out, Tensor{"hostile." + name, d, shape, data})
	}
	random := func(n int64) []byte { b := make([]byte, n); fillNoise(&r, b); return b }
	// 8 elements take whole bytes in every dtype, including those of 4 and 6 bits.
	for d := tensor.DType(1); int(d) <= tensor.NumDTypes; d++ {
		bytes := func(n int64) int64 { return n * int64(d.Bits()) / 8 }
		any := func(n int64) []byte {
			b := random(bytes(n))
			if d == tensor.Bool {
				for i := range b {
					b[i] &= 1
				}
			}
			return b
		}
		add(d.String()+".random", d, []int64{1001, 8}, any(8008))
		add(d.String()+".equal", d, []int64{40000}, slices.Repeat(any(8)[:max(1, d.Bits()/8)], 40000)[:bytes(40000)])
		add(d.String()+".empty", d, []int64{0}, nil)
		add(d.String()+".empty2", d, []int64{3, 0, 5}, nil)
		if d.Bits() >= 8 {
			add(d.String()+".scalar", d, []int64{}, any(1))
			add(d.String()+".one", d, []int64{1, 1, 1}, any(1))
			for _, n := range []int64{2, 3, 7, 127, 128, 129, 255, 256, 257, 511, 513, 4095, 4097, 65535, 65537} {
				add(fmt.Sprintf("%s.odd%d", d, n), d, []int64{n}, any(n))
			}
		}
	}
	addFloats(&r, add)
	add("rank 64", tensor.U8, append(slices.Repeat([]int64{1}, 63), 2), []byte{1, 2})
	add("name with \"quotes\", \\ and \u00e9\u4e2d\U0001F600", tensor.F32, []int64{2}, random(8))
	add(fmt.Sprintf("%0512d", 7), tensor.BF16, []int64{4}, random(8))
	return out
}

// addFloats adds patterns of values that stress the exponent coder.
func addFloats(r *rng, add func(string, tensor.DType, []int64, []byte)) {
	const n = 70001
	for _, f := range []struct {
		d        tensor.DType
		exp, man uint // bits
	}{{tensor.BF16, 8, 7}, {tensor.F16, 5, 10}, {tensor.F32, 8, 23}, {tensor.F64, 11, 52},
		{tensor.F8E4M3, 4, 3}, {tensor.F8E5M2, 5, 2}} {
		width := 1 + int(f.exp+f.man)
		code := func(exp uint64) uint64 { // random sign and mantissa with an exponent
			return exp<<f.man | r.next()&(1<<f.man-1) | r.next()&1<<(f.exp+f.man)
		}
		top := uint64(1)<<f.exp - 1
		for _, v := range []struct {
			name string
			of   func(i int) uint64
		}{
			{"nan payloads", func(int) uint64 { return code(top) | 1 }},
			{"subnormals", func(int) uint64 { return code(0) }},
			{"infinities", func(i int) uint64 { return top<<f.man | uint64(i&1)<<(f.exp+f.man) }},
			{"signed zeros", func(int) uint64 { return r.next() & 1 << (f.exp + f.man) }},
			// These are one exponent more than the coder's alphabet has. All of them are equally common.
			{"17 exponents", func(int) uint64 { return code(top/4 + r.next()%min(17, top+1)) }},
			{"16 exponents", func(int) uint64 { return code(r.next() % 16) }},
			{"every exponent", func(int) uint64 { return code(r.next() & top) }},
			{"two regimes", func(i int) uint64 { // the halves have different values
				if i < n/2 {
					return code(top / 2)
				}
				return code(top/2 + 1 + r.next()%4)
			}},
			{"rare outliers", func(i int) uint64 {
				if i%9973 == 17 {
					return code(top - 1)
				}
				return code(top/2 - r.next()%3)
			}},
		} {
			b := make([]byte, 0, n*width/8)
			for i := range n {
				var e [8]byte
				binary.LittleEndian.PutUint64(e[:], v.of(i)&(math.MaxUint64>>(64-width)))
				b = append(b, e[:width/8]...)
			}
			add(f.d.String()+"."+v.name, f.d, []int64{n}, b)
		}
	}
}
