package gguf

// This file reads a header's values in file order.

import (
	"context"
	"encoding/binary"
	"fmt"
	"math"
	"strconv"
	"strings"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/sizes"
	"github.com/overwire/overwire/gosrc/source"
)

// Types of values, by number.
const (
	kindU8 = iota
	kindI8
	kindU16
	kindI16
	kindU32
	kindI32
	kindF32
	kindBool
	kindText
	kindArray
	kindU64
	kindI64
	kindF64
)

// width is the size in bytes of each kind of value; 0 means that the value contains its length.
var width = [...]int64{1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8}

var kindNames = [...]string{
	"uint8", "int8", "uint16", "int16", "uint32", "int32", "float32", "bool", "string", "array", "uint64", "int64",
	"float64",
}

const (
	maxDepth = 4    // levels of nested arrays
	maxShown = 16   // arrays up to this many elements are written out
	maxText  = 1024 // bytes of each string that is written out in an array
)

// A value is the value of an entry, as text and, for a number, as bits.
type value struct {
	kind   uint32
	text   string
	number uint64
}

// A reader reads a source sequentially, one window at a time.
type reader struct {
	ctx    context.Context
	src    source.Source
	order  binary.ByteOrder
	tensor string // name of the tensor being read, or ""
	b      []byte // the window
	window int64  // bytes to read next
	at     int64  // offset of the window
	p      int64  // next byte, as an index into the window
}

func (r *reader) offset() int64 { return r.at + r.p }

// takeBytes reads the next n bytes, which are valid until the next call.
func (r *reader) takeBytes(n int64) ([]byte, error) {
	if n > maxHeader-r.offset() {
		return nil, errs.New(errs.ErrFormat, "the header is too large: over %d bytes", maxHeader)
	}
	rest := r.src.Size() - r.offset()
	if n > rest {
		return nil, errs.New(errs.ErrCorrupt, "truncated: the file ends inside its header: copy or fetch it again")
	}
	if n > int64(len(r.b))-r.p {
		b := make([]byte, min(rest, max(n, r.window)))
		r.window = min(2*r.window, maxWindow) // vocabularies take several MB
		r.at, r.p, r.b = r.offset(), 0, nil
		if err := r.src.ReadAt(r.ctx, b, r.at); err != nil {
			return nil, err
		}
		r.b = b
	}
	r.p += n
	return r.b[r.p-n : r.p], nil
}

// skipBytes skips n bytes without reading those after the window.
func (r *reader) skipBytes(n int64) error {
	if in := int64(len(r.b)) - r.p; n > in {
		if n > maxHeader-r.offset() || n > r.src.Size()-r.offset() {
			_, err := r.takeBytes(n) // returns the error
			return err
		}
		r.at, r.p, r.b = r.offset()+n, 0, nil
		return nil
	}
	r.p += n
	return nil
}

func (r *reader) readU32() (uint32, error) {
	b, err := r.takeBytes(4)
	if err != nil {
		return 0, err
	}
	return r.order.Uint32(b), nil
}

func (r *reader) readU64() (uint64, error) {
	b, err := r.takeBytes(8)
	if err != nil {
		return 0, err
	}
	return r.order.Uint64(b), nil
}

// readEntry reads an entry's type and value.
func (r *reader) readEntry(key string) (value, error) {
	kind, err := r.readU32()
	if err != nil {
		return value{}, err
	}
	v, err := r.readValue(kind, maxDepth, true)
	if err != nil {
		return v, fmt.Errorf("entry %q: %w", key, err)
	}
	return v, nil
}

// readValue reads a value. If show is false, its text may stay "".
func (r *reader) readValue(kind uint32, depth int, show bool) (v value, err error) {
	v.kind = kind
	switch {
	case kind == kindText:
		v.text, err = r.readText(show)
		return v, err
	case kind == kindArray:
		v.text, err = r.readArray(depth, show)
		return v, err
	case kind >= uint32(len(width)):
		return v, errs.New(errs.ErrFormat, "its type has the unknown number %d", kind)
	}
	b, err := r.takeBytes(width[kind])
	if err != nil {
		return v, err
	}
	switch len(b) {
	case 1:
		v.number = uint64(b[0])
	case 2:
		v.number = uint64(r.order.Uint16(b))
	case 4:
		v.number = uint64(r.order.Uint32(b))
	default:
		v.number = r.order.Uint64(b)
	}
	v.text = numberText(kind, v.number)
	return v, nil
}

func numberText(kind uint32, n uint64) string {
	switch kind {
	case kindI8:
		return strconv.FormatInt(int64(int8(n)), 10)
	case kindI16:
		return strconv.FormatInt(int64(int16(n)), 10)
	case kindI32:
		return strconv.FormatInt(int64(int32(n)), 10)
	case kindI64:
		return strconv.FormatInt(int64(n), 10)
	case kindF32:
		return strconv.FormatFloat(float64(math.Float32frombits(uint32(n))), 'g', -1, 32)
	case kindF64:
		return strconv.FormatFloat(math.Float64frombits(n), 'g', -1, 64)
	case kindBool:
		return strconv.FormatBool(n != 0)
	}
	return strconv.FormatUint(n, 10)
}

// readText reads a string. It replaces bytes that are not UTF-8, because the string is only shown.
func (r *reader) readText(show bool) (string, error) {
	n, err := r.readU64()
	if err != nil {
		return "", err
	}
	if n > maxHeader {
		return "", errs.New(errs.ErrFormat, "a string is too long: %d bytes", n)
	}
	if !show {
		return "", r.skipBytes(int64(n))
	}
	b, err := r.takeBytes(int64(n))
	return strings.ToValidUTF8(string(b), "\uFFFD"), err
}

// readArray reads an array. A short array is written out; a long one is described by length and element type.
func (r *reader) readArray(depth int, show bool) (string, error) {
	kind, err := r.readU32()
	if err != nil {
		return "", err
	}
	n, err := r.readU64()
	if err != nil {
		return "", err
	}
	switch {
	case kind >= uint32(len(width)):
		return "", errs.New(errs.ErrFormat, "the type of its elements has the unknown number %d", kind)
	case kind == kindArray && depth == 0:
		return "", errs.New(errs.ErrFormat, "arrays are nested more than %d deep", maxDepth)
	}
	show = show && n <= maxShown && kind != kindArray
	if width[kind] > 0 && !show {
		size, ok := sizes.Mul(n, uint64(width[kind]))
		if !ok || size > maxHeader {
			return "", errs.New(errs.ErrFormat, "an array is too long: %d elements", n)
		}
		return fmt.Sprintf("%d of %s", n, kindNames[kind]), r.skipBytes(int64(size))
	}
	var texts []string
	for range n { // bounded, because each element takes at least 8 bytes of the header
		v, err := r.readValue(kind, depth-1, show)
		if err != nil {
			return "", err
		}
		if show {
			texts = append(texts, v.text[:min(len(v.text), maxText)])
		}
	}
	if !show {
		return fmt.Sprintf("%d of %s", n, kindNames[kind]), nil
	}
	return "[" + strings.ToValidUTF8(strings.Join(texts, ", "), "") + "]", nil
}
