// Package x16 is codec 1, the codec for weights. It encodes 16 symbols with static rANS: the most frequent exponents
// of floats and an escape, or nibbles. There are 32 interleaved lanes, and 8-bit probabilities in an alias layout.
// The other bits of each element are stored raw in separate planes.
//
// A chunk is
//
//	header 96 bytes | segment directory | segments | planes | tail
//
// docs/format.md section 3 specifies every bit. Only this package writes this layout. Sources: J. Duda,
// "Asymmetric numeral systems" (2013); F. Giesen, "Interleaved entropy coders" (2014) and the public-domain ryg_rans.
//
// There are four decoders: scalar, NEON, AVX2 and AVX-512. They accept and reject exactly the same input and give the
// same bytes. The code that they share is in this file and in parse.go; a kernel only handles states, words and
// symbols.
package x16

import (
	"fmt"

	"github.com/overwire/overwire/gosrc/tensor"
)

const (
	tileSyms    = 256
	lanes       = 32
	start       = 1 << 16 // encoders start with this state and decoders end with it
	headerBytes = 96
	stateBytes  = 4 * lanes
	maxSegTiles = 256
	maxPlanes   = 4
)

// Transforms; see docs/format.md 3.1.
const (
	BF16    = 1
	FP16    = 2
	FP32    = 3
	E4M3    = 4
	E5M2    = 5
	Int8    = 6
	Nibbles = 7
	Bytes   = 8
)

// A form is one row of the table of transforms.
type form struct {
	name     string
	bits     int   // bits of one element
	values   int   // number of possible symbol values
	identity bool  // whether the palette is 0..15 and there are no escapes
	planes   []int // bits per element of each plane: 8, 4 or 1
}

var forms = [9]form{
	BF16:    {"bf16", 16, 256, false, []int{8}},
	FP16:    {"fp16", 16, 32, false, []int{8, 1, 1, 1}},
	FP32:    {"fp32", 32, 256, false, []int{8, 8, 8}},
	E4M3:    {"e4m3", 8, 16, true, []int{4}},
	E5M2:    {"e5m2", 8, 32, false, []int{1, 1, 1}},
	Int8:    {"int8", 8, 16, true, []int{4}},
	Nibbles: {"nibbles", 4, 16, true, nil},
	Bytes:   {"bytes", 8, 256, false, nil},
}

func isTransform(t uint8) bool { return t >= BF16 && t <= Bytes }

// Name returns a transform's name for display ("bf16").
func Name(transform uint8) string {
	if !isTransform(transform) {
		return fmt.Sprintf("transform %d", transform)
	}
	return forms[transform].name
}

// TransformsFor returns the transforms that the format allows for a type, the most likely first. nil means that the
// type is stored raw. The caller must not change the result.
func TransformsFor(d tensor.DType) []uint8 {
	if !d.Valid() {
		return nil
	}
	return transforms[d]
}

var transforms = [tensor.NumDTypes + 1][]uint8{
	tensor.BF16: {BF16}, tensor.F16: {FP16}, tensor.F32: {FP32}, tensor.C64: {FP32},
	tensor.F8E4M3: {E4M3}, tensor.F8E4M3FNUZ: {E4M3}, tensor.F8E5M2: {E5M2}, tensor.F8E5M2FNUZ: {E5M2},
	tensor.I8: {Int8, Nibbles, Bytes}, tensor.U8: {Int8, Nibbles, Bytes},
	tensor.F4: {Nibbles}, tensor.F8E8M0: {Bytes}, tensor.Bool: {Bytes},
	tensor.I16: integers, tensor.U16: integers, tensor.I32: integers, tensor.U32: integers, tensor.I64: integers,
	tensor.U64: integers,
}

// integers are the transforms for integers of more than one byte, encoded as bytes: packed nibbles (GPTQ, AWQ),
// packed bytes, and small numbers with zero high bytes.
var integers = []uint8{Nibbles, Int8, Bytes}

// unitStart returns the position in a tile of the first of the 8 symbols of lane l.
func unitStart(l int) int {
	h, g, q := l/16, l%16/4, l%4
	return 128*h + 8*(4*q+g)
}

// units is unitStart as a table, by lane.
var units = func() (u [lanes]uint8) {
	for l := range u {
		u[l] = uint8(unitStart(l))
	}
	return
}()

// up16 rounds up to a multiple of 16.
func up16(n int) int { return (n + 15) &^ 15 }
