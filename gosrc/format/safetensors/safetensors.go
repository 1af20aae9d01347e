// Package safetensors reads and writes the header of safetensors files.
//
//	u64 N, little-endian | N bytes of JSON | data section
//
// The JSON is one object. It has an entry "__metadata__", an object of strings, and one entry for each tensor: its
// name with {"dtype", "shape", "data_offsets"}.
//
// The specification is the README and safetensors/src/tensor.rs of huggingface/safetensors, release 0.8. Tests check
// that this package accepts and rejects the same files. In addition, this reader refuses:
//
//   - duplicate keys, which the README forbids (serde keeps the last one);
//   - a tensor entry as a JSON array, or a dtype as an object, which serde accepts
//     as a struct and an enum;
//   - a rank over 64, a dimension or offset of 2^63 or more, and more than 65,536 entries
//     of metadata, which no model has.
//
// It accepts one thing that the safetensors library refuses: the notice of a container (see Header.Notice).
//
// Unknown fields of a tensor entry are ignored, as in the safetensors library.
package safetensors

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"unicode"
	"unicode/utf8"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/crc32c"
	"github.com/overwire/overwire/gosrc/internal/modelfiles"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/tensor"
)

const (
	// MetadataKey is the only key of a header that is not a tensor's name.
	MetadataKey = "__metadata__"

	minEntry    = len(`"":{"dtype":"U8","shape":[],"data_offsets":[0,0]}`)
	maxMetadata = 1 << 16

	// ContainerKey is the metadata entry that marks a file as a container of package overwire.
	ContainerKey = "overwire"
	// maxDepth is the maximum number of nested levels, including the header's two. It is also serde_json's limit.
	maxDepth = 127
)

// Options are the options of Read and Parse. The zero value is strict.
type Options struct {
	// Lenient accepts files that other readers accept: with bytes after the last tensor, duplicate keys (the last one
	// counts), or metadata values that are not strings (returned as JSON text).
	Lenient bool
}

// A Header is a decoded header that conforms to the rules of the format and to the size of the file.
type Header struct {
	// Tensors are sorted by offset, and empty tensors at the same offset by name. Off is relative to the start of the
	// file, Source is 0, and Alias is -1.
	Tensors  []tensor.Tensor
	Metadata map[string]string // nil if the file has none
	// Notice is the name of the entry that makes other readers refuse a container, or "". It is not in Tensors. Only a
	// file with the metadata entry ContainerKey has one; package overwire checks whether it must.
	Notice string
	Data   int64  // offset of the data section, 8 + N
	Sum    uint32 // CRC32C of everything before the data section
	// Ahead contains the first bytes of the data section if they were read with the header. It may be empty.
	Ahead []byte
}

// Read reads and checks the header of a file. It takes one read if the header fits into 256 KiB, otherwise two. It
// checks the header's length against the file's size before it allocates memory.
//
// Invalid bytes give errs.ErrFormat, and a truncated file gives errs.ErrCorrupt. The error is an errs.At. Its rule is
// the safetensors library's name for the error, such as "HeaderTooLarge".
func Read(ctx context.Context, src source.Source, opt Options) (Header, error) {
	buf, err := source.Head(ctx, src)
	if err != nil {
		return Header{}, locateError(src.URI(), "", 0, err)
	}
	return ReadOn(ctx, src, buf, opt)
}

// ReadOn is Read for callers that have already called source.Head. buf is the result of that call.
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

// Length returns N for a file of the given URI and size. head is the start of the file: at least its first 9 bytes,
// or all of it if it is shorter.
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
			class = errs.ErrCorrupt // it looks like a header
		}
		return 0, errs.OfRule("InvalidHeaderLength", class,
			"truncated: the header takes %d bytes, but the file has %d; copy or fetch it again", 8+n, size)
	}
	return int64(n), nil
}

// notOurs describes the format of a file without a safetensors header, and what to do with it.
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

// Parse parses and checks the header of a file of the given size. head is the first 8 + N bytes of the file, with N
// from Length. The result does not refer to head.
func Parse(uri string, head []byte, size int64, opt Options) (Header, error) {
	n, err := Length(uri, head, size)
	if err == nil && int64(len(head)) != 8+n {
		err = errs.New(errs.ErrArgument, "the header has %[2]d bytes, but got %[1]d", len(head), 8+n)
	}
	if err != nil {
		return Header{}, locateError(uri, "", 0, err)
	}
	p := parser{scanner: scanner{b: head, p: 8, lenient: opt.Lenient}, data: 8 + n}
	if err := p.parseHeader(); err != nil {
		return Header{}, locateError(uri, p.tensor, int64(p.bad), err)
	}
	h := Header{Tensors: p.tensors, Metadata: p.metadata, Data: p.data, Sum: crc32c.Sum(head)}
	return h, h.checkTensors(uri, size, opt)
}

// locateError adds the location to an error that does not have one.
func locateError(uri, name string, off int64, err error) error {
	return errs.Place("index", uri, name, off, err)
}
