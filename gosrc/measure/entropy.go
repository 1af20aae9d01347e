package measure

// This file computes the field entropy: what X16 could reach with tables that cost nothing.

import (
	"math"

	"github.com/overwire/overwire/gosrc/tensor"
)

// FieldEntropy is the fewest bytes that a coder of the kind of X16 could store data
// in: the order-0 entropy of the field that it codes, with tables of its own
// for every tensor and no cost for them, plus the other bits raw. Byte planes
// that are constant cost nothing. For integers it is the least of the ways
// that docs/format.md allows. It is no bound of other coders: one that codes the
// other bits, too, can be below it.
func FieldEntropy(d tensor.DType, data []byte) float64 {
	n := float64(len(data))
	switch d {
	case tensor.BF16:
		return field(data, 2, 7, 8) + n/2*planes(data, 2, 0x807f)
	case tensor.F16:
		return field(data, 2, 10, 5) + n/2*planes(data, 2, 0x83ff)
	case tensor.F32, tensor.C64:
		return field(data, 4, 23, 8) + n/4*planes(data, 4, 0x807fffff)
	case tensor.F8E4M3, tensor.F8E4M3FNUZ:
		return field(data, 1, 3, 4) + n*planes(data, 1, 0x87)
	case tensor.F8E5M2, tensor.F8E5M2FNUZ:
		return field(data, 1, 2, 5) + n*planes(data, 1, 0x83)
	case tensor.I8, tensor.U8:
		low := field(data, 1, 0, 4)
		high := field(data, 1, 4, 4)
		return min(high+n*planes(data, 1, 0x0f), nibbles(data), field(data, 1, 0, 8), low+high)
	case tensor.F4:
		return nibbles(data)
	case tensor.F8E8M0, tensor.Bool:
		return field(data, 1, 0, 8)
	}
	return n
}

// field is the entropy, in bytes, of bits lo..lo+n-1 of every element.
func field(data []byte, width int, lo, n uint) float64 {
	counts := make([]int64, 1<<n)
	mask := uint32(1<<n - 1)
	for i := 0; i+width <= len(data); i += width {
		counts[element(data[i:], width)>>lo&mask]++
	}
	return entropy(counts)
}

func nibbles(data []byte) float64 {
	counts := make([]int64, 16)
	for _, b := range data {
		counts[b&15]++
		counts[b>>4]++
	}
	return entropy(counts)
}

// planes is how many bytes of an element the bits of mask take: those that
// never change are free, as far as whole byte planes of the sample go.
func planes(data []byte, width int, mask uint32) float64 {
	var or, and uint32 = 0, math.MaxUint32
	for i := 0; i+width <= len(data); i += width {
		v := element(data[i:], width)
		or |= v
		and &= v
	}
	changing := (or &^ and) & mask
	bits := 0.0
	for b := uint(0); b < uint(width*8); b += 8 {
		if changing>>b&0xff != 0 || width == 1 {
			bits += float64(ones(mask >> b & 0xff))
		}
	}
	return bits / 8
}

func ones(v uint32) (n int) {
	for ; v != 0; v &= v - 1 {
		n++
	}
	return n
}

func element(p []byte, width int) uint32 {
	switch width {
	case 1:
		return uint32(p[0])
	case 2:
		return uint32(p[0]) | uint32(p[1])<<8
	}
	return uint32(p[0]) | uint32(p[1])<<8 | uint32(p[2])<<16 | uint32(p[3])<<24
}

// entropy is in bytes for the whole sample.
func entropy(counts []int64) float64 {
	var sum int64
	for _, c := range counts {
		sum += c
	}
	bits := 0.0
	for _, c := range counts {
		if c > 0 {
			bits -= float64(c) * math.Log2(float64(c)/float64(sum))
		}
	}
	return bits / 8
}
