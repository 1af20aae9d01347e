package weights

// This file fills tensors with realistic values, or with extreme ones that stress codecs.

import (
	"encoding/binary"
	"fmt"
	"math"
	"math/bits"
	"slices"
	"sync"

	"github.com/overwire/overwire/gosrc/tensor"
)

// spread is the standard deviation of log2 of the rows' scales. Without it, normally distributed values have 2.545 bits
// of exponent entropy. With it, they have 2.60.
const spread = 0.32

// An rng is the random generator wyrand.
type rng uint64

func (r *rng) next() uint64 {
	*r += 0xa0761d6478bd642f
	hi, lo := bits.Mul64(uint64(*r), uint64(*r)^0xe7037ed1a0b428db)
	return hi ^ lo
}

// seedWith makes a generator from several numbers. Generators of neighbouring blocks are independent.
func seedWith(words ...uint64) rng {
	r := rng(0x9e3779b97f4a7c15)
	for _, w := range words {
		r = rng(r.next() ^ w)
		r = rng(r.next())
	}
	return r
}

// cells is the number of cells in normal. normal divides the positive half of the normal distribution into cells of
// equal probability, and holds each cell's start and width. A sample is the start of a random cell plus a uniformly
// random part of its width, so its low bits are random. The last cell ends at 5.
const cells = 2048

var normal [cells][2]float32

var fillNormal = sync.OnceFunc(func() {
	at := func(i int) float64 {
		if i == cells {
			return 5
		}
		return math.Sqrt2 * math.Erfinv(float64(i)/cells)
	}
	for i := range normal {
		normal[i] = [2]float32{float32(at(i)), float32(at(i+1) - at(i))}
	}
})

// gaussOf makes a normally distributed value from 32 random bits: a sign, a cell, and 20 bits for the position in it.
func gaussOf(u uint32) float32 {
	c := &normal[u>>20&(cells-1)]
	v := c[0] + c[1]*(float32(u&(1<<20-1))*(1.0/(1<<20)))
	return math.Float32frombits(math.Float32bits(v) | u&(1<<31))
}

// fillBlock generates one block of a part. It writes values into scratch, and then converts them to the dtype in dst,
// which is the whole tensor.
func fillBlock(k Kind, p part, seed uint64, b block, dst []byte, scratch []float32) {
	fillNormal()
	r := seedWith(seed, uint64(b.part), uint64(b.first))
	width := int64(p.dtype.Bits()) / 8
	dst = dst[b.first*width : (b.first+b.n)*width]
	switch {
	case k.Name == "uniform" && p.role == matrix:
		fillNoise(&r, dst)
		return
	case p.role == norm:
		for i := range scratch {
			scratch[i] = 0.45 + 0.06*gaussOf(uint32(r.next()))
		}
	case p.role == scale:
		for i := range scratch {
			scratch[i] = p.sigma / 28 * rowScale(seed, b.part-1, b.first+int64(i))
		}
	default:
		fillRows(p, seed, b, &r, scratch)
	}
	if k.change != nil {
		for i := range scratch {
			k.change(&scratch[i])
		}
	}
	if k.Name == "pruned" && p.role == matrix {
		for i, v := range scratch {
			if absOf(v) < 0.674*p.sigma {
				scratch[i] = 0
			}
		}
	}
	putValues(p, &r, dst, scratch)
}

// fillRows fills scratch with normally distributed values times the scale of their row. For quantised dtypes, the
// values are scaled to the dtype's range.
func fillRows(p part, seed uint64, b block, r *rng, scratch []float32) {
	cols := p.rowLength()
	for i := int64(0); i < b.n; {
		row := (b.first + i) / cols
		n := min(b.n-i, (row+1)*cols-(b.first+i))
		s := p.sigma * rowScale(seed, b.part, row)
		switch p.dtype {
		case tensor.F8E4M3, tensor.F8E5M2:
			s *= 90 / p.sigma // one scale for the tensor; the largest weights are near 448
		case tensor.I8:
			s = 28 // one scale per row; 127 is 4.5 sigma
		case tensor.U8:
			s = 2.2
		}
		part := scratch[i : i+n]
		for len(part) >= 2 {
			u := r.next()
			part[0], part[1] = s*gaussOf(uint32(u)), s*gaussOf(uint32(u>>32))
			part = part[2:]
		}
		if len(part) > 0 {
			part[0] = s * gaussOf(uint32(r.next()))
		}
		i += n
	}
}

// rowScale returns the scale of one row, which is around 1.
func rowScale(seed uint64, part int, row int64) float32 {
	r := seedWith(seed, 0x5ca1e, uint64(part), uint64(row))
	return float32(math.Exp2(spread * float64(gaussOf(uint32(r.next())))))
}

// putValues writes values in the dtype of p. A U8 holds two 4-bit integers; putValues generates the second one.
func putValues(p part, r *rng, dst []byte, vals []float32) {
	switch p.dtype {
	case tensor.BF16:
		for i, v := range vals {
			binary.LittleEndian.PutUint16(dst[2*i:], toBF16(v))
		}
	case tensor.F16:
		for i, v := range vals {
			binary.LittleEndian.PutUint16(dst[2*i:], toF16(v))
		}
	case tensor.F32:
		for i, v := range vals {
			binary.LittleEndian.PutUint32(dst[4*i:], math.Float32bits(v))
		}
	case tensor.F8E4M3:
		for i, v := range vals {
			dst[i] = toFloat8(v, 4, 3)
		}
	case tensor.F8E5M2:
		for i, v := range vals {
			dst[i] = toFloat8(v, 5, 2)
		}
	case tensor.I8:
		for i, v := range vals {
			dst[i] = byte(int8(roundTo(v, 127)))
		}
	case tensor.U8:
		for i, v := range vals {
			w := 2.2 * gaussOf(uint32(r.next()))
			dst[i] = byte(roundTo(v, 7)&15 | roundTo(w, 7)&15<<4)
		}
	}
}

func roundTo(v float32, most int) int {
	return min(most, max(-most, int(math.RoundToEven(float64(v)))))
}

func fillNoise(r *rng, dst []byte) {
	for len(dst) >= 8 {
		binary.LittleEndian.PutUint64(dst, r.next())
		dst = dst[8:]
	}
	for u := r.next(); len(dst) > 0; u >>= 8 {
		dst[0] = byte(u)
		dst = dst[1:]
	}
}

func throughBF16(v *float32) { *v = math.Float32frombits(uint32(toBF16(*v)) << 16) }

// toBF16 rounds to the nearest BF16.
func toBF16(v float32) uint16 {
	u := math.Float32bits(v)
	return uint16((u + 0x7fff + u>>16&1) >> 16)
}

func absOf(v float32) float32 { return math.Float32frombits(math.Float32bits(v) &^ (1 << 31)) }

// toF16 rounds to the nearest F16. Values that are too large become infinite.
func toF16(v float32) uint16 {
	u := math.Float32bits(v)
	sign := uint16(u >> 16 & 0x8000)
	e := int(u>>23&255) - 127
	switch {
	case e > 15:
		return sign | 0x7c00
	case e >= -14:
		u -= 112 << 23
		return sign | uint16((u&0x7fffffff+0xfff+u>>13&1)>>13)
	}
	return sign | uint16(math.RoundToEven(float64(absOf(v))*(1<<24)))
}

// toFloat8 rounds to an 8-bit float with the given bits of exponent and mantissa,
// and saturates at the largest finite value of E4M3FN and E5M2.
func toFloat8(v float32, ebits, mbits int) byte {
	u := math.Float32bits(v)
	sign := byte(u >> 24 & 0x80)
	bias := 1<<(ebits-1) - 1
	most := byte(0x7e) // E4M3FN: 448
	if ebits == 5 {
		most = 0x7b // 57344
	}
	e := int(u>>23&255) - 127 + bias
	if e <= 0 { // subnormal: multiples of 2^(1-bias-mbits)
		return sign | byte(min(float64(most), math.RoundToEven(math.Ldexp(float64(absOf(v)), bias-1+mbits))))
	}
	m := u & 0x7fffff
	shift := 23 - mbits
	code := uint32(e)<<mbits | m>>shift
	rest, halfway := m&(1<<shift-1), uint32(1)<<(shift-1)
	if rest > halfway || rest == halfway && code&1 == 1 {
		code++
	}
	return sign | byte(min(code, uint32(most)))
}

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
