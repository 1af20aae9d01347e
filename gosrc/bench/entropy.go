package bench

// This file computes the field entropy, which is the size that X16 could reach without storing tables.

import (
	"math"
	"math/bits"

	"github.com/overwire/overwire/gosrc/tensor"
)

// fieldEntropy returns the minimum size of data with a coder like X16: the order-0 entropy of the coded field, with
// separate, free tables for every tensor, plus the other bits raw. Constant byte planes are free. For integers it is
// the minimum over the modes that docs/format.md allows. It is not a bound for other coders: a coder that also codes
// the other bits can need fewer bytes.
func fieldEntropy(d tensor.DType, data []byte) float64 {
	switch d {
	case tensor.BF16:
		return codedBytes(data, 2, 7, 8)
	case tensor.F16:
		return codedBytes(data, 2, 10, 5)
	case tensor.F32, tensor.C64:
		return codedBytes(data, 4, 23, 8)
	case tensor.F8E4M3, tensor.F8E4M3FNUZ:
		return codedBytes(data, 1, 3, 4)
	case tensor.F8E5M2, tensor.F8E5M2FNUZ:
		return codedBytes(data, 1, 2, 5)
	case tensor.I8, tensor.U8:
		return min(codedBytes(data, 1, 4, 4), nibbleBytes(data), fieldBytes(data, 1, 0, 8),
			fieldBytes(data, 1, 0, 4)+fieldBytes(data, 1, 4, 4))
	case tensor.F4:
		return nibbleBytes(data)
	case tensor.F8E8M0, tensor.Bool:
		return fieldBytes(data, 1, 0, 8)
	}
	return float64(len(data))
}

// codedBytes returns the size of elements of width bytes if bits lo..lo+n-1 are coded.
func codedBytes(data []byte, width int, lo, n uint) float64 {
	return fieldBytes(data, width, lo, n) + float64(len(data)/width)*planeBytes(data, width, ^(uint32(1<<n-1)<<lo))
}

// fieldBytes returns the entropy in bytes of bits lo..lo+n-1 over all elements.
func fieldBytes(data []byte, width int, lo, n uint) float64 {
	counts := make([]int64, 1<<n)
	mask := uint32(1<<n - 1)
	for i := 0; i+width <= len(data); i += width {
		counts[readElement(data[i:], width)>>lo&mask]++
	}
	return entropyBytes(counts)
}

func nibbleBytes(data []byte) float64 {
	counts := make([]int64, 16)
	for _, b := range data {
		counts[b&15]++
		counts[b>>4]++
	}
	return entropyBytes(counts)
}

// planeBytes returns the size in bytes of the bits in mask, per element. Byte planes that are constant in all
// elements are free, except in elements of one byte.
func planeBytes(data []byte, width int, mask uint32) float64 {
	var or, and uint32 = 0, math.MaxUint32
	for i := 0; i+width <= len(data); i += width {
		v := readElement(data[i:], width)
		or |= v
		and &= v
	}
	changing := (or &^ and) & mask
	n := 0
	for b := 0; b < width*8; b += 8 {
		if changing>>b&0xff != 0 || width == 1 {
			n += bits.OnesCount32(mask >> b & 0xff)
		}
	}
	return float64(n) / 8
}

func readElement(p []byte, width int) uint32 {
	switch width {
	case 1:
		return uint32(p[0])
	case 2:
		return uint32(p[0]) | uint32(p[1])<<8
	}
	return uint32(p[0]) | uint32(p[1])<<8 | uint32(p[2])<<16 | uint32(p[3])<<24
}

// entropyBytes returns the total entropy of the counted values in bytes.
func entropyBytes(counts []int64) float64 {
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
