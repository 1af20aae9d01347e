// Package safetensors reads and writes the header of safetensors files.
//
//	u64 N, little-endian | N bytes of JSON | data section
//
// The JSON is one object with "__metadata__", an object of strings, and for every
// tensor its name with {"dtype", "shape", "data_offsets"}.
//
// Specification: the README and safetensors/src/tensor.rs of huggingface/safetensors,
// release 0.8. Tests compare the verdicts of that implementation with ours. This reader
// also refuses:
//
//   - a duplicate key, which the README forbids and serde keeps the last of;
//   - a tensor entry as a JSON array, or a dtype as an object, which serde accepts
//     as a struct and an enum;
//   - rank over 64, a dimension or offset of 2^63 or more, over 65,536 entries
//     of metadata: no model has them.
//
// Unknown fields of a tensor entry are ignored, as in that library.
package safetensors

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"unicode"
	"unicode/utf8"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/modelfiles"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/tensor"
)

const (
	// MetadataKey is the only name that is not a tensor.
	MetadataKey = "__metadata__"

	minEntry    = len(`"":{"dtype":"U8","shape":[],"data_offsets":[0,0]}`)
	maxMetadata = 1 << 16
	// maxDepth is the most levels of nested values, including the two of the header:
	// serde_json's limit.
	maxDepth = 127
)

// Options of Read and Parse. The zero value is strict.
type Options struct {
	// Lenient accepts what other readers accept: bytes after the last tensor, duplicate
	// keys (the last one wins), metadata values that are not strings (kept as their
	// JSON text).
	Lenient bool
}

// A Header is a decoded header, checked against the rules of the format and the size
// of the file.
type Header struct {
	// Tensors in the order of their bytes, those without bytes by name. Off is
	// from the start of the file; Source is 0, Alias -1.
	Tensors  []tensor.Tensor
	Metadata map[string]string // nil if the file has none
	Data     int64             // offset of the data section, 8 + N
	Sum      uint32            // CRC32C of everything before the data section
	// Ahead has the first bytes of the data section, which Read has read with the
	// header. It may be empty.
	Ahead []byte
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Read reads and checks the header of a file, in one read if it fits into 256 KiB,
// otherwise in two. It checks the header's length against the file's size before it
// allocates.
//
// Bad bytes are errs.ErrFormat, a truncated file is errs.ErrCorrupt. The error is an
// errs.At, and its rule is the name that the safetensors library gives it
// ("HeaderTooLarge").
func Read(ctx context.Context, src source.Source, opt Options) (Header, error) {
	buf, err := source.Head(ctx, src)
	if err != nil {
		return Header{}, locateError(src.URI(), "", 0, err)
	}
	return ReadOn(ctx, src, buf, opt)
}

// ReadOn is Read for callers of source.Head: buf is its result.
func ReadOn(ctx context.Context, src source.Source, buf []byte, opt Options) (Header, error) {
	size := src.Size()
	n, err := Length(src.URI(), buf, size)
	if err != nil {
		return Header{}, locateError(src.URI(), "", 0, err)
	}
	if need := 8 + n; need > int64(len(buf)) {
		whole := make([]byte, need)
		count := copy(whole, buf)
		if err := src.ReadAt(ctx, whole[count:], int64(count)); err != nil {
			return Header{}, locateError(src.URI(), "", int64(count), err)
		}
		buf = whole
	}
	h, err := Parse(src.URI(), buf[:8+n], size, opt)
	if err != nil {
		return Header{}, err
	}
	h.Ahead = buf[8+n:]
	return h, nil
}

// Length returns N for a file of the given URI and size that starts with head, which is at
// least the first 9 bytes, or the whole file.
func Length(uri string, head []byte, size int64) (int64, error) {
	switch {
	case size == 0:
		return 0, errs.OfRule("HeaderTooSmall", errs.ErrFormat, "the file is empty")
	case size < 8 || len(head) < 8:
		return 0, errs.OfRule("HeaderTooSmall", errs.ErrFormat, "%s (it has %d bytes)", notOurs(uri, head), size)
	}
	n := binary.LittleEndian.Uint64(head)
	if n > tensor.MaxHeader {
		return 0, errs.OfRule("HeaderTooLarge", errs.ErrFormat, "%s", notOurs(uri, head))
	}
	if int64(n) > size-8 {
		class := errs.ErrFormat
		if len(head) > 8 && (head[8] == '{' || isSpace(head[8])) {
			class = errs.ErrCorrupt // it begins like a header
		}
		return 0, errs.OfRule("InvalidHeaderLength", class,
			"truncated, the header takes %d bytes and the file has %d: copy or fetch it again", 8+n, size)
	}
	return int64(n), nil
}

// notOurs says which format a file without a safetensors header has, and what to do
// with it.
func notOurs(uri string, head []byte) string {
	if kind := modelfiles.KindOf(uri, head); kind != nil {
		return fmt.Sprintf("this is %s, not a safetensors file: %s", kind.What, kind.Do)
	}
	if text := len(head) > 0 && utf8.Valid(head[:min(len(head), 8)]) &&
		!bytes.ContainsFunc(head[:min(len(head), 8)], unicode.IsControl); text {
		return "this is text, not a safetensors file: check the path, or the URL of the download"
	}
	return "this is not a safetensors file: " + modelfiles.Unknown
}

// Parse parses and checks the header of a file of the given size. head is its first 8 +
// N bytes, with N from Length. The result does not refer to head.
func Parse(uri string, head []byte, size int64, opt Options) (Header, error) {
	n, err := Length(uri, head, size)
	if err == nil && int64(len(head)) != 8+n {
		err = errs.New(errs.ErrArgument, "got %d bytes of a header of %d", len(head), 8+n)
	}
	if err != nil {
		return Header{}, locateError(uri, "", 0, err)
	}
	p := parser{scanner: scanner{b: head, p: 8, lenient: opt.Lenient}, data: 8 + n}
	if err := p.parseHeader(); err != nil {
		return Header{}, locateError(uri, p.tensor, int64(p.bad), err)
	}
	h := Header{Tensors: p.tensors, Metadata: p.metadata, Data: p.data, Sum: crc32.Checksum(head, castagnoli)}
	return h, h.checkTensors(uri, size, opt)
}

// locateError adds the place to an error that has none.
func locateError(uri, name string, off int64, err error) error {
	return errs.Place("index", uri, name, off, err)
}
