// Package dlpack exports tensors. It converts element types to DLPack's types and creates C structures that live as
// long as the tensors.
//
// The structures are in C memory, because any thread of the Python process may release the last reference at any time.
// See managed.c.
package dlpack

import (
	"github.com/overwire/overwire/gosrc/tensor"
)

// A Type is DLPack's DLDataType.
type Type struct {
	Code  uint8
	Bits  uint8
	Lanes uint16
}

// Type codes of DLPack 1.1, in the order of its header.
const (
	codeInt        = 0
	codeUInt       = 1
	codeFloat      = 2
	codeBFloat     = 4
	codeComplex    = 5
	codeBool       = 6
	codeF8E4M3FN   = 10
	codeF8E4M3FNUZ = 11
	codeF8E5M2     = 12
	codeF8E5M2FNUZ = 13
	codeF8E8M0FNU  = 14
	codeF4E2M1FN   = 17
)

var types = map[tensor.DType]Type{
	tensor.Bool: {codeBool, 8, 1}, tensor.U8: {codeUInt, 8, 1}, tensor.U16: {codeUInt, 16, 1},
	tensor.U32: {codeUInt, 32, 1}, tensor.U64: {codeUInt, 64, 1},
	tensor.I8: {codeInt, 8, 1}, tensor.I16: {codeInt, 16, 1},
	tensor.I32: {codeInt, 32, 1}, tensor.I64: {codeInt, 64, 1},
	tensor.F16: {codeFloat, 16, 1}, tensor.F32: {codeFloat, 32, 1}, tensor.F64: {codeFloat, 64, 1},
	tensor.BF16: {codeBFloat, 16, 1}, tensor.C64: {codeComplex, 64, 1},
	tensor.F8E4M3: {codeF8E4M3FN, 8, 1}, tensor.F8E4M3FNUZ: {codeF8E4M3FNUZ, 8, 1},
	tensor.F8E5M2: {codeF8E5M2, 8, 1}, tensor.F8E5M2FNUZ: {codeF8E5M2FNUZ, 8, 1}, tensor.F8E8M0: {codeF8E8M0FNU, 8, 1},
}

// Describe returns the type and shape with which n bytes of a dense tensor are exported.
//
// Sub-byte types have no layout that all consumers support. F4 with an even last dimension is exported as pairs (two
// lanes of four bits, like torch's float4_e2m1fn_x2, with the last dimension halved). Other F4 and all F6 tensors are
// exported as flat bytes. With raw, every type is exported as the unsigned integer of its width, for consumers that
// support fewer types. Pairs of F4 then become U8.
func Describe(d tensor.DType, shape []int64, n int64, raw bool) (Type, []int64) {
	if t, ok := types[d]; ok {
		if raw {
			t = Type{codeUInt, t.Bits, 1}
		}
		return t, shape
	}
	if d == tensor.F4 && len(shape) > 0 && shape[len(shape)-1]%2 == 0 {
		byteShape := append([]int64(nil), shape...)
		byteShape[len(byteShape)-1] /= 2
		if raw {
			return Type{codeUInt, 8, 1}, byteShape
		}
		return Type{codeF4E2M1FN, 4, 2}, byteShape
	}
	return Type{codeUInt, 8, 1}, []int64{n}
}
