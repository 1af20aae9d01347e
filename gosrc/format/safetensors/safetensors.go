// Package safetensors reads and writes the header of safetensors files.
//
//	u64 N, little-endian | N bytes of JSON | data section
//
// The JSON is one object: "__metadata__", an object of strings, and for every
// tensor its name with {"dtype", "shape", "data_offsets"}.
//
// Specification: the README and safetensors/src/tensor.rs of
// huggingface/safetensors, release 0.8. Compatible implementations: that one;
// our tests hold both to the same verdicts. Where this reader refuses more, it
// does so for one of these reasons:
//
//   - a duplicate key, which the README forbids and serde keeps the last of;
//   - a tensor entry as a JSON array, or a dtype as an object, which serde
//     takes for a struct and an enum;
//   - rank over 64, a dimension or offset of 2^63 or more, over 65,536 entries
//     of metadata: no model has them.
//
// Unknown fields of a tensor entry are ignored, as the original does.
package safetensors

import (
	"context"
	"encoding/binary"
	"errors"
	"hash/crc32"

	"github.com/overwire/overwire/gosrc/fault"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/tensor"
)

const (
	// MetadataKey is the one name that is no tensor.
	MetadataKey = "__metadata__"

	firstRead   = 256 << 10
	minEntry    = len(`"":{"dtype":"U8","shape":[],"data_offsets":[0,0]}`)
	maxMetadata = 1 << 16
	// maxDepth is how deep values may nest, the two levels of the header
	// included: serde_json's limit.
	maxDepth = 127
)

// Options of Read and Parse. The zero value is strict.
type Options struct {
	// Lenient accepts what other readers let through: bytes after the last
	// tensor, duplicate keys (the last one wins), metadata that is not strings
	// (kept as its JSON text).
	Lenient bool
}

// A Header is everything that a file's header says, checked against the rules
// of the format and the size of the file.
type Header struct {
	// Tensors in the order of their bytes, those without bytes by name. Off is
	// from the start of the file; Source is 0, Alias -1.
	Tensors  []tensor.Tensor
	Metadata map[string]string // nil when the file has none
	Data     int64             // offset of the data section, 8 + N
	Sum      uint32            // CRC32C of everything before the data section
	// Ahead is what Read got beside the header: the first bytes of the data
	// section, perhaps none.
	Ahead []byte
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Read reads and checks the header of a file, in one read when it fits into
// 256 KiB and in two when not. Nothing is allocated on the word of the file
// alone: the length is checked against the file's size first.
//
// Bad bytes are fault.ErrFormat, a file cut short fault.ErrCorrupt; the error
// is a fault.At and has the original's word for it ("HeaderTooLarge").
func Read(ctx context.Context, src source.Source, opt Options) (Header, error) {
	buf, err := Head(ctx, src)
	if err != nil {
		return Header{}, err
	}
	return ReadOn(ctx, src, buf, opt)
}

// Head reads what Read looks at first.
func Head(ctx context.Context, src source.Source) ([]byte, error) {
	buf := make([]byte, max(0, min(src.Size(), firstRead)))
	if err := src.ReadAt(ctx, buf, 0); err != nil {
		return nil, located(src.URI(), "", 0, err)
	}
	return buf, nil
}

// ReadOn is Read for who has what Head gives.
func ReadOn(ctx context.Context, src source.Source, buf []byte, opt Options) (Header, error) {
	size := src.Size()
	n, err := Length(buf, size)
	if err != nil {
		return Header{}, located(src.URI(), "", 0, err)
	}
	if need := 8 + n; need > int64(len(buf)) {
		whole := make([]byte, need)
		had := copy(whole, buf)
		if err := src.ReadAt(ctx, whole[had:], int64(had)); err != nil {
			return Header{}, located(src.URI(), "", int64(had), err)
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

// Length returns N of a file of the given size that starts with head; head is
// at least the first 9 bytes, or the whole file.
func Length(head []byte, size int64) (int64, error) {
	if size < 8 || len(head) < 8 {
		return 0, fault.New(fault.ErrFormat, "HeaderTooSmall: a file of %d bytes", size)
	}
	n := binary.LittleEndian.Uint64(head)
	if n > tensor.MaxHeader {
		return 0, fault.New(fault.ErrFormat, "HeaderTooLarge: %d bytes%s", n, looksLike(head))
	}
	if int64(n) > size-8 {
		class := fault.ErrFormat
		if len(head) > 8 && (head[8] == '{' || isSpace(head[8])) {
			class = fault.ErrCorrupt // it began well
		}
		return 0, fault.New(class, "InvalidHeaderLength: truncated, the header takes %d bytes and the file has %d", 8+n, size)
	}
	return int64(n), nil
}

// looksLike names the kinds of file that people open by mistake.
func looksLike(head []byte) string {
	for _, m := range []struct{ magic, what string }{
		{"PK\x03\x04", "a zip file, as torch.save writes"},
		{"\x80\x02", "a pickle"}, {"\x80\x04", "a pickle"}, {"\x80\x05", "a pickle"},
		{"GGUF", "a GGUF file"}, {"\x93NUMPY", "a .npy file"}, {"\x89HDF", "an HDF5 file"},
		{"version ", "a Git LFS pointer"}, {"<!DOCTYP", "a web page"}, {"<html", "a web page"}, {"{", "JSON"},
	} {
		if len(head) >= len(m.magic) && string(head[:len(m.magic)]) == m.magic {
			return " (this looks like " + m.what + ", not a safetensors file)"
		}
	}
	return ""
}

// Parse checks the header of a file of the given size; head is its first
// 8 + N bytes, as Length gave N. Nothing of the result points into head.
func Parse(uri string, head []byte, size int64, opt Options) (Header, error) {
	n, err := Length(head, size)
	if err == nil && int64(len(head)) != 8+n {
		err = fault.New(fault.ErrArgument, "%d bytes of a header of %d", len(head), 8+n)
	}
	if err != nil {
		return Header{}, located(uri, "", 0, err)
	}
	p := parser{scanner: scanner{b: head, p: 8, lenient: opt.Lenient}, data: 8 + n}
	if err := p.header(); err != nil {
		return Header{}, located(uri, p.tensor, int64(p.bad), err)
	}
	h := Header{Tensors: p.tensors, Metadata: p.metadata, Data: p.data, Sum: crc32.Checksum(head, castagnoli)}
	return h, h.check(uri, size, opt)
}

// located says where, as far as it is known and err does not say itself.
func located(uri, name string, off int64, err error) error {
	var at *fault.At
	if errors.As(err, &at) {
		return err
	}
	return &fault.At{Verb: "index", Source: uri, Tensor: name, Chunk: -1, Offset: off, Err: err}
}
