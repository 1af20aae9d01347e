// Package gguf reads the headers of GGUF files, so that their tensors can be listed. It does not read the tensors'
// data, because overwire does not store their quantized blocks.
//
// This is the layout of versions 2 and 3, from ggml's docs/gguf.md:
//
//	"GGUF"  version u32  number of tensors u64  number of entries u64
//	entry:  key string, type u32, value
//	string: length u64, bytes
//	array:  element type u32, number of elements u64, elements
//	tensor: name string, rank u32, dims u64 (fastest first), type u32, offset u64
//	data, at the next multiple of the entry general.alignment (default 32)
//
// Integers are little-endian, or all big-endian (version 3). Headers are untrusted: each number is checked before it
// is used, and no count from a file determines the size of an allocation.
package gguf

import (
	"cmp"
	"context"
	"encoding/binary"
	"fmt"
	"math"
	"math/bits"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/sizes"
	"github.com/overwire/overwire/gosrc/source"
)

const (
	magic       = "GGUF"
	maxHeader   = 100_000_000 // bytes before the data; a vocabulary of 300,000 words takes 10 MB
	maxName     = 64 << 10    // bytes of a key or a tensor's name
	maxRank     = 4
	maxAlign    = 1 << 20
	maxEntries  = 1 << 16
	maxTensors  = 1 << 20
	window      = 256 << 10 // bytes of the first read
	maxWindow   = 4 << 20
	alignmentAt = "general.alignment"
)

// A File is the contents of a header.
type File struct {
	Version  uint32
	Header   int64 // bytes before the data
	Metadata map[string]string
	Tensors  []Tensor // in the file's order
}

// A Tensor describes a tensor. Its shape has the slowest dimension first, as in torch. Its bytes start at offset Off
// of the file.
type Tensor struct {
	Name  string
	Type  string // "type 42, not known" if this reader does not know it
	Shape []int64
	Off   int64
	Bytes int64 // Unsized if the type is unknown
}

const (
	// Unsized is the size of a tensor of unknown type.
	Unsized = -1
	// NotKnown ends the names of unknown types.
	NotKnown = ", not known"
)

// hasBytes reports whether a tensor takes up bytes in the file.
func (t *Tensor) hasBytes() bool {
	return t.Bytes > 0 || t.Bytes == Unsized && !slices.Contains(t.Shape, 0)
}

// Is reports whether a file starts with the GGUF magic.
func Is(head []byte) bool { return strings.HasPrefix(string(head), magic) }

// ReadHeader reads and checks the header of a file. It also checks that tensors are aligned, lie inside the file, and
// do not overlap. For a tensor of unknown type it only checks the start. Errors name the file and, if known, the tensor
// and offset. They are errs.ErrFormat for other formats, errs.ErrCorrupt for a truncated file, and errs.ErrNotSupported
// for an unsupported version.
func ReadHeader(ctx context.Context, src source.Source) (File, error) {
	r := &reader{ctx: ctx, src: src, order: binary.LittleEndian, window: window}
	f, err := r.readFile()
	return f, errs.Place("index", src.URI(), r.tensor, r.offset(), err)
}

// readFile reads and checks the header.
func (r *reader) readFile() (f File, err error) {
	counts, err := r.readStart(&f)
	if err != nil {
		return f, err
	}
	align := int64(32)
	f.Metadata = map[string]string{}
	for range counts[1] {
		key, err := r.readName("key")
		if err != nil {
			return f, err
		}
		if _, twice := f.Metadata[key]; twice {
			return f, errs.New(errs.ErrFormat, "two entries have the name %q", key)
		}
		v, err := r.readEntry(key)
		if err != nil {
			return f, err
		}
		f.Metadata[key] = v.text
		if key == alignmentAt {
			if v.kind != kindU32 || v.number == 0 || v.number > maxAlign || v.number&(v.number-1) != 0 {
				return f, errs.New(errs.ErrFormat, "%s is %s: expected a power of two as a uint32", alignmentAt, v.text)
			}
			align = int64(v.number)
		}
	}
	for range counts[0] {
		t, err := r.readTensor(align)
		if err != nil {
			return f, err
		}
		f.Tensors = append(f.Tensors, t)
	}
	r.tensor = ""
	f.Header = sizes.RoundUp(r.offset(), align)
	return f, r.placeTensors(&f)
}

// readStart reads everything before the entries, and returns the numbers of tensors and entries.
func (r *reader) readStart(f *File) (counts [2]uint64, err error) {
	head, err := r.takeBytes(4)
	if err == nil && !Is(head) {
		err = errs.New(errs.ErrFormat, "this is not a GGUF file")
	}
	if err != nil {
		return counts, err
	}
	if f.Version, err = r.readU32(); err == nil && f.Version > 0xffff {
		r.order, f.Version = binary.BigEndian, bits.ReverseBytes32(f.Version)
	}
	if err == nil && f.Version != 2 && f.Version != 3 {
		err = errs.New(errs.ErrNotSupported, "unsupported GGUF version %d: expected 2 or 3", f.Version)
	}
	for k := range counts {
		if err == nil {
			counts[k], err = r.readU64()
		}
	}
	if err == nil && (counts[0] > maxTensors || counts[1] > maxEntries) {
		err = errs.New(errs.ErrFormat, "the header has %d tensors and %d entries: expected at most %d and %d",
			counts[0], counts[1], maxTensors, maxEntries)
	}
	return counts, err
}

// readTensor reads one tensor's entry. Off is still relative to the data section.
func (r *reader) readTensor(align int64) (t Tensor, err error) {
	r.tensor = ""
	if t.Name, err = r.readName("tensor's name"); err != nil {
		return t, err
	}
	r.tensor = t.Name
	rank, err := r.readU32()
	if err != nil {
		return t, err
	}
	if rank > maxRank {
		return t, errs.New(errs.ErrFormat, "its rank is %d: expected at most %d", rank, maxRank)
	}
	n, fits := uint64(1), true
	for range rank {
		dim, err := r.readU64()
		if err != nil {
			return t, err
		}
		if n, fits = product(n, dim, fits && dim <= 1<<62); !fits {
			return t, errs.New(errs.ErrFormat, "its shape is too large")
		}
		t.Shape = append(t.Shape, int64(dim))
	}
	id, err := r.readU32()
	if err != nil {
		return t, err
	}
	if err := t.setType(id, n); err != nil {
		return t, err
	}
	slices.Reverse(t.Shape)
	off, err := r.readU64()
	if err == nil && (off%uint64(align) != 0 || off > 1<<62) {
		err = errs.New(errs.ErrFormat, "its offset %d is not a multiple of %d", off, align)
	}
	t.Off = int64(off)
	return t, err
}

// setType sets a tensor's type and size, given the type's number and the number of values. The shape still has the
// fastest dimension first.
func (t *Tensor) setType(id uint32, n uint64) error {
	kind, isKnown := types[id]
	if !isKnown {
		t.Type, t.Bytes = fmt.Sprintf("type %d%s", id, NotKnown), Unsized
		return nil
	}
	row := uint64(1)
	if len(t.Shape) > 0 {
		row = uint64(t.Shape[0])
	}
	size, fits := product(n/kind.values, kind.bytes, row%kind.values == 0)
	if !fits {
		return errs.New(errs.ErrFormat, "its rows have %d values: expected a multiple of %d, the block size of %s", row,
			kind.values, kind.name)
	}
	t.Type, t.Bytes = kind.name, int64(size)
	return nil
}

// product returns a * b, and whether it and the previous result fit in 62 bits.
func product(a, b uint64, fits bool) (uint64, bool) {
	n, ok := sizes.Mul(a, b)
	return n, fits && ok && n <= 1<<62
}

// placeTensors converts offsets in the data section to offsets in the file. It checks that tensors lie inside the
// file, do not overlap, and have different names.
func (r *reader) placeTensors(f *File) error {
	names := make(map[string]bool, len(f.Tensors))
	byOffset := make([]*Tensor, len(f.Tensors))
	for i := range f.Tensors {
		t := &f.Tensors[i]
		r.tensor = t.Name
		if names[t.Name] {
			return errs.New(errs.ErrFormat, "two tensors have this name")
		}
		names[t.Name] = true
		least := t.Bytes
		if t.Bytes == Unsized {
			least = map[bool]int64{true: 1}[t.hasBytes()]
		}
		if t.Off > r.src.Size()-f.Header || least > r.src.Size()-f.Header-t.Off {
			return errs.New(errs.ErrCorrupt, "its %d bytes at %d end after the end of the file at %d: copy or "+
				"fetch it again",
				least, f.Header+t.Off, r.src.Size())
		}
		t.Off += f.Header
		byOffset[i] = t
	}
	slices.SortStableFunc(byOffset, func(a, b *Tensor) int { return cmp.Compare(a.Off, b.Off) })
	end := f.Header
	for _, t := range byOffset {
		r.tensor = t.Name
		if t.hasBytes() && t.Off < end {
			return errs.New(errs.ErrFormat, "its bytes at %d overlap those of the previous tensor", t.Off)
		}
		if t.hasBytes() {
			end = t.Off + max(1, t.Bytes)
		}
	}
	r.tensor = ""
	return nil
}

// readName reads a key or a tensor's name.
func (r *reader) readName(what string) (string, error) {
	n, err := r.readU64()
	if err != nil {
		return "", err
	}
	if n > maxName {
		return "", errs.New(errs.ErrFormat, "a %s has %d bytes: expected at most %d", what, n, maxName)
	}
	text, err := r.takeBytes(int64(n))
	if err == nil && !utf8.Valid(text) {
		err = errs.New(errs.ErrFormat, "a %s is not valid UTF-8", what)
	}
	return string(text), err
}

// A blockType is a tensor type: its name, and the number of values and bytes per block.
type blockType struct {
	name   string
	values uint64
	bytes  uint64
}

// types is ggml's enum ggml_type, by number. A test compares it with the Python package gguf.
var types = map[uint32]blockType{
	0: {"F32", 1, 4}, 1: {"F16", 1, 2}, 30: {"BF16", 1, 2}, 28: {"F64", 1, 8},
	24: {"I8", 1, 1}, 25: {"I16", 1, 2}, 26: {"I32", 1, 4}, 27: {"I64", 1, 8},
	2: {"Q4_0", 32, 18}, 3: {"Q4_1", 32, 20}, 6: {"Q5_0", 32, 22}, 7: {"Q5_1", 32, 24},
	8: {"Q8_0", 32, 34}, 9: {"Q8_1", 32, 40},
	10: {"Q2_K", 256, 84}, 11: {"Q3_K", 256, 110}, 12: {"Q4_K", 256, 144}, 13: {"Q5_K", 256, 176},
	14: {"Q6_K", 256, 210}, 15: {"Q8_K", 256, 292},
	16: {"IQ2_XXS", 256, 66}, 17: {"IQ2_XS", 256, 74}, 18: {"IQ3_XXS", 256, 98}, 19: {"IQ1_S", 256, 50},
	20: {"IQ4_NL", 32, 18}, 21: {"IQ3_S", 256, 110}, 22: {"IQ2_S", 256, 82}, 23: {"IQ4_XS", 256, 136},
	29: {"IQ1_M", 256, 56}, 34: {"TQ1_0", 256, 54}, 35: {"TQ2_0", 256, 66},
	39: {"MXFP4", 32, 17}, 40: {"NVFP4", 64, 36}, 41: {"Q1_0", 128, 18},
}

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
