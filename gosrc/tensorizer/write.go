package tensorizer

// This file encodes heads, indexes and records.

import (
	"crypto/sha256"
	"hash"
	"hash/crc32"
	"math"
	"slices"
	"strings"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/avx"
	"github.com/overwire/overwire/gosrc/tensor"
)

// Align is the alignment of data in files that are written with padding. Direct reads to disks and GPUs must start at
// a page boundary.
const Align = 4096

// An Item describes a tensor to write, including its offset in the file.
type Item struct {
	Module uint16  `json:"module"`
	Type   uint8   `json:"type"`
	Name   string  `json:"name"`
	Text   string  `json:"dtype"`  // see dtypeText
	Dims   []int64 `json:"dims"`   // as stored in the file
	Bytes  int64   `json:"bytes"`  // bytes of data; 0 with nonzero dims means a tensor without data
	Crypt  *Crypt  `json:"-"`      // nil if not encrypted
	Record int64   `json:"record"` // offset of the record
	Pad    int64   `json:"-"`      // bytes of padding before the record's last field, the data size

	// Sealed means that the file is encrypted, so every record has a field for the encryption.
	Sealed bool `json:"sealed"`
}

// NewItem returns the Item for a tensor of a state dict.
func NewItem(name string, d tensor.DType, shape []int64, bytes int64) (Item, error) {
	text, dims, err := dtypeText(d, shape)
	if err != nil {
		return Item{}, err
	}
	it := Item{Type: StateDict, Name: name, Text: text, Dims: dims, Bytes: bytes}
	return it, it.Check()
}

// Check checks that the format can hold the item.
func (it *Item) Check() error {
	if err := checkName(it.Name, it.Type); err != nil {
		return errs.New(errs.ErrArgument, "%v", err)
	}
	switch {
	case it.Type > StateDict:
		return errs.New(errs.ErrArgument, "unknown tensor type %d: expected 0 to %d", it.Type, StateDict)
	case len(it.Name) > math.MaxUint16:
		return errs.New(errs.ErrArgument, "the name has %d bytes: expected at most %d", len(it.Name), math.MaxUint16)
	case len(it.Text) > math.MaxUint8 || len(it.Dims) > math.MaxUint8:
		return errs.New(errs.ErrArgument, "dtype %q or rank %d is too large", it.Text, len(it.Dims))
	case it.Bytes < 0:
		return errs.New(errs.ErrArgument, "invalid size %d: expected 0 or more bytes", it.Bytes)
	}
	if hasNegative(it.Dims) {
		return errs.New(errs.ErrArgument, "a dimension is negative: shape %v", it.Dims)
	}
	return nil
}

func hasNegative(dims []int64) bool {
	return slices.ContainsFunc(dims, func(d int64) bool { return d < 0 })
}

// Version returns the lowest version of a file with this item.
func (it *Item) Version() uint32 {
	switch {
	case it.hasWideDims():
		return 5
	case it.Bytes == 0 && !slices.Contains(it.Dims, 0):
		return 4
	case it.Sealed:
		return 3
	case strings.Contains(it.Text, "\x00"):
		return 2
	}
	return 1
}

func (it *Item) hasWideDims() bool {
	return slices.ContainsFunc(it.Dims, func(d int64) bool { return d > math.MaxUint32 })
}

// Data returns the offset of the data.
func (it *Item) Data() int64 {
	b, _, _ := it.recordFront()
	return it.Record + int64(len(b)) + it.Pad
}

// PadTo pads the record so that the data is aligned to align. All other fields of the item must be set.
func (it *Item) PadTo(align int64) {
	it.Pad = 0
	it.Pad = (align - it.Data()%align) % align
}

// appendShape appends the fields dtype, rank and dims, which records and index entries have in common.
func (it *Item) appendShape(dst []byte) []byte {
	dst = append(dst, byte(len(it.Text)))
	dst = append(dst, it.Text...)
	dst = append(dst, byte(len(it.Dims)))
	for _, d := range it.Dims {
		if it.hasWideDims() {
			dst = le.AppendUint64(dst, uint64(d))
		} else {
			dst = le.AppendUint32(dst, uint32(d))
		}
	}
	return dst
}

func (it *Item) appendWords(dst []byte) []byte {
	dst = le.AppendUint16(dst, uint16(len(it.Name)))
	dst = append(dst, it.Name...)
	return it.appendShape(append(dst, it.Type))
}

// recordFront returns the record (see the package comment) without padding and with zeros for the hashes, and the
// offsets of the hashes. crc is 0 for an encrypted item, which has no CRC32.
func (it *Item) recordFront() (dst []byte, crc, sha int) {
	dst = le.AppendUint64(nil, 0) // recordBytes sets the length
	dst = le.AppendUint16(dst, it.Module)
	dst = append(dst, it.Type)
	dst = le.AppendUint16(dst, uint16(len(it.Name)))
	dst = append(dst, it.Name...)
	dst = it.appendShape(dst)
	// The hashes: their count, then for each its kind, its length and its sum: CRC32 and SHA-256, or only SHA-256.
	if it.Crypt == nil {
		dst = le.AppendUint16(dst, 1+2+4+2+32)
		dst = append(dst, 2, 0, 4)
		crc = len(dst)
		dst = append(dst, 0, 0, 0, 0)
	} else {
		dst = le.AppendUint16(dst, 1+2+32)
		dst = append(dst, 1)
	}
	dst = append(dst, 1, 32)
	sha = len(dst)
	dst = append(dst, make([]byte, 32)...)
	if it.Sealed {
		dst = it.Crypt.appendBox(dst)
	}
	return le.AppendUint64(dst, uint64(it.Bytes)), crc, sha
}

// recordBytes returns the record with padding and with zeros for the hashes, and the offsets of the hashes.
func (it *Item) recordBytes() (b []byte, crc, sha int) {
	b, crc, sha = it.recordFront()
	last := len(b) - 8
	b = append(b[:last], make([]byte, it.Pad+8)...)
	le.PutUint64(b[len(b)-8:], uint64(it.Bytes))
	le.PutUint64(b, uint64(len(b)))
	return b, crc, sha
}

// A Summer hashes a tensor: the prefix of its record, and then its data in order.
type Summer struct {
	crc uint32
	sha hash.Hash
}

// NewSummer returns a Summer that has hashed prefix.
func NewSummer(prefix []byte) *Summer {
	s := &Summer{sha: sha256.New()}
	s.Write(prefix)
	return s
}

// Write hashes the next bytes of the data before encryption.
func (s *Summer) Write(p []byte) {
	avx.Clear()
	s.crc = crc32.Update(s.crc, crc32.IEEETable, p)
	_, _ = s.sha.Write(p)
}

// Sums returns the hashes as they are stored.
func (s *Summer) Sums() (crc, sha []byte) {
	return le.AppendUint32(nil, s.crc), s.sha.Sum(nil)
}

// Summer returns a Summer that has hashed the item's record.
func (it *Item) Summer() *Summer {
	b, _, _ := it.recordBytes()
	if it.Sealed { // omit the encryption field
		n := len(it.Crypt.appendBox(nil))
		end := len(b) - 8 - int(it.Pad)
		b = append(b[:end-n], b[end:]...)
	}
	return NewSummer(b)
}

// Finish returns the complete record after s has hashed all data.
func (it *Item) Finish(s *Summer) []byte {
	b, crc, sha := it.recordBytes()
	sum, digest := s.Sums()
	if crc > 0 {
		copy(b[crc:], sum)
	}
	copy(b[sha:], digest)
	return b
}

// IndexBytes returns the maximum size of the index of items. Each entry has space for the tag of version 5, in case
// an item requires that version.
func IndexBytes(items []Item) int64 {
	n := int64(0)
	for i := range items {
		n += int64(4 + len(items[i].appendWords(nil)) + 24)
	}
	return n
}

// Front returns the head and the index of a file. length is the size of the index; tensorizer itself uses 262,144.
// version is the lowest version to write.
func Front(items []Item, version uint32, length int64) ([]byte, error) {
	version = max(version, 1)
	var total uint64
	flags := byte(0)
	for i := range items {
		version = max(version, items[i].Version())
		total += uint64(items[i].Bytes)
		if items[i].Sealed {
			flags = encrypted
		}
	}
	b := append([]byte(nil), Magic...)
	b = le.AppendUint32(b, version)
	switch {
	case version < 4:
		flags = 0
	case version == maxVersion:
		flags |= tagged
	}
	b = append(b, flags)
	b = append(b, make([]byte, 31)...)
	b = le.AppendUint64(b, total)
	b = append(b, make([]byte, 8)...)
	b = le.AppendUint64(b, uint64(len(items)))
	b = le.AppendUint64(b, uint64(length))
	for i := range items {
		it := &items[i]
		if version == maxVersion {
			tag := uint32(1)
			if it.hasWideDims() {
				tag = 5
			}
			b = le.AppendUint32(b, tag)
		}
		b = it.appendWords(b)
		b = le.AppendUint64(b, uint64(it.Record))
		b = le.AppendUint64(b, uint64(it.Data()))
		b = le.AppendUint64(b, uint64(it.Bytes))
	}
	if over := int64(len(b)) - headSize - length; over > 0 {
		return nil, errs.New(errs.ErrArgument, "the index needs %d bytes more than its %d", over, length)
	}
	return append(b, make([]byte, headSize+length-int64(len(b)))...), nil
}

// Start returns the offset of the first record.
func Start(length int64) int64 { return headSize + length }

// Tail is the number of zero bytes after the last tensor.
const Tail = 8
