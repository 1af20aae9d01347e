// Package planes is codec 6, for level "smaller". It divides the bytes of elements into planes. Each plane is stored
// in its shortest form: unchanged, as rANS over all 256 values with 12-bit probabilities, or as a Zstandard frame. It
// is only decoded on the CPU.
//
// A chunk is its logical size followed by its planes, starting with the plane of the lowest bytes:
//
//	u32 logical bytes
//	u8 form | raw: the bytes
//	        | Zstandard: u32 length, a frame
//	        | blocks: u8 kind of each, a table if blocks share one, the blocks
//
// docs/format.md section 3.6 specifies every bit. Only this package writes this layout. Sources: J. Duda,
// "Asymmetric numeral systems" (2013), the public-domain ryg_rans, RFC 8878.
package planes

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"sync"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/tensor"
)

const (
	// A block has this size. The last block of a plane may be shorter.
	blockBytes = 64 << 10
	maxPlanes  = 8

	// A plane is stored in one of these forms.
	formBlocks = 0
	formZstd   = 1
	formRaw    = 2

	// A block is stored as one of these kinds.
	kindRaw      = 0
	kindConstant = 1
	kindOwn      = 2 // encoded with a separate table
	kindShared   = 3 // encoded with a table that at least two blocks of the plane share
)

// transforms lists the transforms: the element size in bytes, and whether elements are rotated left by one bit. The
// rotation moves the exponent of a bf16 or fp32 into one plane.
var transforms = [...]struct {
	name   string
	width  int
	rotate bool
}{
	1: {"bytes", 1, false},
	2: {"words", 2, false},
	3: {"dwords", 4, false},
	4: {"qwords", 8, false},
	5: {"float16", 2, true},
	6: {"float32", 4, true},
	7: {"float64", 8, true},
}

// Bytes is the transform for elements of one byte. It is allowed for every type.
const Bytes = 1

func isKnown(t uint8) bool { return t >= 1 && int(t) < len(transforms) }

// Name returns a transform's name for display ("float16").
func Name(transform uint8) string {
	if !isKnown(transform) {
		return fmt.Sprintf("transform %d", transform)
	}
	return transforms[transform].name
}

// TransformFor returns the transform for a type's elements.
func TransformFor(d tensor.DType) uint8 {
	if t := transformOf[d]; t != 0 {
		return t
	}
	return Bytes
}

var transformOf = map[tensor.DType]uint8{
	tensor.I16: 2, tensor.U16: 2, tensor.I32: 3, tensor.U32: 3, tensor.I64: 4, tensor.U64: 4,
	tensor.F16: 5, tensor.BF16: 5, tensor.F32: 6, tensor.C64: 6, tensor.F64: 7,
}

// Integers reports whether a transform is for integers of more than one byte.
func Integers(transform uint8) bool { return transform >= 2 && transform <= 4 }

// Allowed reports whether the format allows a transform for a type.
func Allowed(transform uint8, d tensor.DType) bool {
	return transform == Bytes || transform == TransformFor(d)
}

func corruptError(format string, args ...any) error {
	return errs.New(errs.ErrCorrupt, format, args...)
}

// A decoder holds the state and buffers for decoding a chunk.
type decoder struct {
	src         []byte // remaining bytes of the chunk
	own, shared slots
	planes      [maxPlanes][]byte // decoded planes: slices of memory, dst or src
	memory      [maxPlanes][]byte
}

var decoders = sync.Pool{New: func() any { return new(decoder) }}

// Decode fills dst with the logical bytes of the chunk src.
//
// Any error is errs.ErrCorrupt, and the contents of dst are then undefined. Decode never reads outside src or writes
// outside dst. It allocates up to len(dst) bytes for the planes. It is safe for concurrent use.
func Decode(dst, src []byte, transform uint8) error {
	if !isKnown(transform) {
		return corruptError("unknown transform %d of codec 6", transform)
	}
	f := &transforms[transform]
	if len(dst) == 0 || len(dst)%f.width != 0 {
		return corruptError("invalid size: %d bytes with elements of %d bytes", len(dst), f.width)
	}
	d := decoders.Get().(*decoder)
	defer func() {
		d.src, d.planes = nil, [maxPlanes][]byte{}
		decoders.Put(d)
	}()
	d.src = src
	size, err := d.takeBytes(4)
	if err != nil {
		return err
	}
	if s := binary.LittleEndian.Uint32(size); uint64(s) != uint64(len(dst)) {
		return corruptError("the chunk states %d bytes, expected %d", s, len(dst))
	}
	n := len(dst) / f.width
	for i := range f.width {
		to := dst
		if f.width > 1 {
			if cap(d.memory[i]) < n {
				d.memory[i] = make([]byte, n)
			}
			to = d.memory[i][:n]
		}
		plane, err := d.plane(to)
		if err != nil {
			return errs.New(errs.ErrCorrupt, "plane %d: %v", i, err)
		}
		d.planes[i] = plane
	}
	if len(d.src) != 0 {
		return corruptError("%d bytes follow the last plane", len(d.src))
	}
	if f.width == 1 {
		if &d.planes[0][0] != &dst[0] {
			copy(dst, d.planes[0])
		}
		return nil
	}
	mergePlanes(dst, &d.planes, f.width, f.rotate)
	return nil
}

// takeBytes returns the next n bytes of the chunk.
func (d *decoder) takeBytes(n int) ([]byte, error) {
	if n > len(d.src) {
		return nil, corruptError("a plane needs %d bytes, but only %d are left", n, len(d.src))
	}
	p := d.src[:n:n]
	d.src = d.src[n:]
	return p, nil
}

// plane decodes the next plane into dst and returns dst, or returns a part of the chunk if the plane is raw.
func (d *decoder) plane(dst []byte) ([]byte, error) {
	form, err := d.takeBytes(1)
	if err != nil {
		return nil, err
	}
	switch form[0] {
	case formRaw:
		return d.takeBytes(len(dst))
	case formZstd:
		size, err := d.takeBytes(4)
		if err != nil {
			return nil, err
		}
		n := binary.LittleEndian.Uint32(size)
		if uint64(n) > uint64(len(d.src)) {
			return nil, corruptError("a frame has %d bytes, but only %d are left", n, len(d.src))
		}
		frame, err := d.takeBytes(int(n))
		if err != nil {
			return nil, err
		}
		return dst, decodeFrame(dst, frame)
	case formBlocks:
		return dst, d.decodeBlocks(dst)
	}
	return nil, corruptError("a plane has the unknown form %d", form[0])
}

func (d *decoder) decodeBlocks(dst []byte) error {
	kinds, err := d.takeBytes((len(dst) + blockBytes - 1) / blockBytes)
	if err != nil {
		return err
	}
	switch bytes.Count(kinds, []byte{kindShared}) {
	case 0:
	case 1:
		return corruptError("a shared table is used by only one block")
	default:
		if err := d.table(&d.shared); err != nil {
			return err
		}
	}
	for i, k := range kinds {
		b := dst[i*blockBytes : min(len(dst), (i+1)*blockBytes)]
		switch k {
		case kindRaw, kindConstant:
			n := len(b)
			if k == kindConstant {
				n = 1
			}
			p, err := d.takeBytes(n)
			if err != nil {
				return err
			}
			if k == kindRaw {
				copy(b, p)
				continue
			}
			for j := range b {
				b[j] = p[0]
			}
		case kindOwn:
			if err := d.table(&d.own); err != nil {
				return err
			}
			if err := d.decodeCoded(b, &d.own); err != nil {
				return errs.New(errs.ErrCorrupt, "block %d: %v", i, err)
			}
		case kindShared:
			if err := d.decodeCoded(b, &d.shared); err != nil {
				return errs.New(errs.ErrCorrupt, "block %d: %v", i, err)
			}
		default:
			return corruptError("block %d has unknown kind %d", i, k)
		}
	}
	return nil
}

// table reads a table and expands it.
func (d *decoder) table(s *slots) error {
	var t table
	n, err := t.readTable(d.src)
	if err != nil {
		return err
	}
	d.src = d.src[n:]
	t.expandSlots(s)
	return nil
}

func (d *decoder) decodeCoded(dst []byte, s *slots) error {
	head, err := d.takeBytes(4*lanes + 2)
	if err != nil {
		return err
	}
	var x [lanes]uint32
	for l := range x {
		if x[l] = binary.LittleEndian.Uint32(head[4*l:]); x[l] < start {
			return corruptError("invalid state %d: %#x", l, x[l])
		}
	}
	words, err := d.takeBytes(2 * int(binary.LittleEndian.Uint16(head[4*lanes:])))
	if err != nil {
		return err
	}
	return decodeValues(dst, words, x, s)
}
