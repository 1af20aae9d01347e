// Package tensor defines the types that describe a model (DType, Tensor, Chunk, Index), their validator, and the
// limits of all readers. It does no I/O.
package tensor

// A DType is an element type of the safetensors format. Its values are the codes in docs/format.md section 5 and
// never change.
type DType uint8

// The 22 element types of safetensors 0.8.
const (
	Invalid DType = iota
	Bool
	F4
	F6E2M3
	F6E3M2
	U8
	I8
	F8E5M2
	F8E4M3
	F8E8M0
	F8E4M3FNUZ
	F8E5M2FNUZ
	I16
	U16
	F16
	BF16
	I32
	U32
	F32
	C64
	F64
	I64
	U64
	dtypeEnd
)

// NumDTypes is the number of valid types. Their codes are 1..NumDTypes.
const NumDTypes = int(dtypeEnd) - 1

var dtypes = [dtypeEnd]struct {
	name string
	bits uint8
}{
	Bool: {"BOOL", 8}, F4: {"F4", 4}, F6E2M3: {"F6_E2M3", 6}, F6E3M2: {"F6_E3M2", 6}, U8: {"U8", 8}, I8: {"I8", 8},
	F8E5M2: {"F8_E5M2", 8}, F8E4M3: {"F8_E4M3", 8}, F8E8M0: {"F8_E8M0", 8},
	F8E4M3FNUZ: {"F8_E4M3FNUZ", 8}, F8E5M2FNUZ: {"F8_E5M2FNUZ", 8},
	I16: {"I16", 16}, U16: {"U16", 16}, F16: {"F16", 16}, BF16: {"BF16", 16},
	I32: {"I32", 32}, U32: {"U32", 32}, F32: {"F32", 32},
	C64: {"C64", 64}, F64: {"F64", 64}, I64: {"I64", 64}, U64: {"U64", 64},
}

// Valid reports whether d is one of the 22 types.
func (d DType) Valid() bool { return d > Invalid && d < dtypeEnd }

// String returns the safetensors name ("BF16").
func (d DType) String() string {
	if !d.Valid() {
		return "invalid"
	}
	return dtypes[d].name
}

// Bits returns the size of one element in bits, or 0 for an invalid type.
func (d DType) Bits() int {
	if d >= dtypeEnd {
		return 0
	}
	return int(dtypes[d].bits)
}

// Floating reports whether elements are floats that a cast may convert to another float type. It excludes packed
// types and pure exponents, which belong to quantization schemes.
func (d DType) Floating() bool {
	switch d {
	case F8E5M2, F8E4M3, F8E4M3FNUZ, F8E5M2FNUZ, F16, BF16, F32, F64:
		return true
	}
	return false
}

// Wide reports whether elements are integers of more than one byte.
func (d DType) Wide() bool {
	switch d {
	case I16, U16, I32, U32, I64, U64:
		return true
	}
	return false
}

// Align returns the natural alignment in bytes: the element size, at least 1. C64 is aligned to 8 although it
// consists of two F32, because safetensors writers order it that way.
func (d DType) Align() int { return max(1, d.Bits()/8) }

// ParseDType returns the type with the given safetensors name.
func ParseDType(name string) (DType, bool) {
	d, ok := byName[name]
	return d, ok
}

var byName = func() map[string]DType {
	m := make(map[string]DType, NumDTypes)
	for d := Bool; d < dtypeEnd; d++ {
		m[dtypes[d].name] = d
	}
	return m
}()
