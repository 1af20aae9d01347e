package tensorizer

// This file parses heads, indexes and records into a File.

import (
	"context"
	"encoding/hex"
	"errors"
	"math"
	"slices"
	"strings"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/spawn"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/tensor"
)

// An Entry is a tensor as described by the file's index.
type Entry struct {
	Name   string  `json:"name"`
	Type   uint8   `json:"type"`
	Wide   bool    `json:"-"`     // whether dims are u64, here and in the record
	Text   string  `json:"dtype"` // as stored in the file
	Dims   []int64 `json:"dims"`
	Record int64   `json:"record"` // offset of its record
	Data   int64   `json:"data"`   // offset of its data
	Bytes  int64   `json:"bytes"`  // bytes of data; 0 with nonzero dims means zeros ("meta")

	dtype tensor.DType
	shape []int64
	full  int64 // bytes according to dtype and shape
	other error // the error for an unknown dtype; dtype and shape then describe bytes
}

// A Record is the record that precedes a tensor's data.
type Record struct {
	Module uint16
	// CRC32 and SHA256 are the stored hashes, or nil.
	CRC32, SHA256 []byte
	// Prefix is the part of the record that is hashed before the data.
	Prefix []byte
	Crypt  *Crypt // nil if the data is not encrypted
}

// A File is the metadata of a .tensors file.
type File struct {
	URI       string
	Version   uint32
	Encrypted bool
	tagged    bool  // whether index entries begin with their version
	Total     int64 // bytes of data, according to the file
	Size      int64
	Entries   []Entry
	Records   []Record // one for each entry; nil before ReadRecords

	head []byte // the first headSize bytes
	rest []byte // the unused rest of the index
}

// maxTogether is how many records are read concurrently. Each may cost a round trip.
const maxTogether = 16

// Read reads the head and the index of a file that starts with head, and the records if the file is encrypted. It
// does not allocate memory based on unchecked sizes in the file. The error is an errs.At with class errs.ErrFormat,
// errs.ErrCorrupt if the file was truncated, or errs.ErrNotSupported for versions, flags, layouts and dtypes that
// this version does not know.
func Read(ctx context.Context, src source.Source, head []byte) (*File, error) {
	f := &File{URI: src.URI(), Size: src.Size()}
	r := reader{b: head}
	if !Is(head) || f.Size < headSize || len(head) < headSize {
		return nil, f.at("", 0, errs.WithRule(ruleKind, errs.New(errs.ErrCorrupt,
			"truncated: the .tensors file has only %d bytes", f.Size)))
	}
	r.p = len(Magic)
	f.Version = uint32(r.readUint(4))
	flags := r.takeBytes(32)
	f.Total = int64(r.readUint(8))
	r.takeBytes(8)
	count, length := r.readUint(8), r.readUint(8)
	switch {
	case f.Version == 0 || f.Version > maxVersion:
		return nil, f.at("", 5, errs.New(errs.ErrNotSupported,
			"unsupported version %d of .tensors files: this overwire reads 1 to %d", f.Version, maxVersion))
	case f.Version >= 4:
		f.Encrypted, f.tagged = flags[0]&encrypted != 0, flags[0]&tagged != 0
		for i, b := range flags {
			if i == 0 {
				b &^= encrypted | tagged
			}
			if b != 0 {
				return nil, f.at("", 9, errs.New(errs.ErrNotSupported,
					"unknown feature flags %x: this overwire knows bits 0 and 1", flags))
			}
		}
		switch {
		case f.tagged && f.Version < 5:
			return nil, f.at("", 9, errs.New(errs.ErrFormat, "feature flag 1 is not allowed in version %d", f.Version))
		case !f.tagged && f.Version == 5:
			return nil, f.at("", 9, errDev)
		}
	default:
		f.Encrypted = f.Version == 3
	}
	switch {
	case f.Total < 0:
		return nil, f.at("", 41, errs.New(errs.ErrFormat, "invalid size of the data: %d bytes", f.Total))
	case length > tensor.MaxIndex:
		return nil, f.at("", 65, errs.New(errs.ErrFormat, "the index has %d bytes: expected at most "+
			"%d", length, tensor.MaxIndex))
	case int64(length) > f.Size-headSize:
		return nil, f.at("", 65, errs.New(errs.ErrCorrupt,
			"truncated: the index has %d bytes, but the file has only %d", length, f.Size))
	case count > length/25: // an entry takes at least 25 bytes
		return nil, f.at("", 57, errs.New(errs.ErrFormat, "%d tensors do not fit into an index of %d "+
			"bytes", count, length))
	}
	end := headSize + int64(length)
	if int64(len(head)) < end {
		whole := make([]byte, end)
		had := copy(whole, head)
		if err := src.ReadAt(ctx, whole[had:], int64(had)); err != nil {
			return nil, err
		}
		head = whole
	}
	r.b = head[:end]
	if err := f.readEntries(&r, int(count)); err != nil {
		return nil, err
	}
	f.head, f.rest = head[:headSize:headSize], r.b[r.p:]
	if f.Encrypted {
		return f, f.ReadRecords(ctx, src)
	}
	return f, nil
}

var errDev = errs.New(errs.ErrNotSupported,
	"the file has the layout of an unreleased tensorizer (3.0-dev): write it again with a release")

func (f *File) readEntries(r *reader, count int) error {
	f.Entries = make([]Entry, 0, count)
	end, zeros := int64(len(r.b)), int64(0)
	for range count {
		at := int64(r.p)
		var e Entry
		if f.tagged {
			switch tag := r.readUint(4); tag {
			case 1, 5:
				e.Wide = tag == 5
			default:
				if !r.short {
					return f.at("", at, errs.New(errs.ErrNotSupported, "unsupported version %d of an index entry", tag))
				}
			}
		}
		var rank int
		e.Name = string(r.takeBytes(int(r.readUint(2))))
		e.Type = uint8(r.readUint(1))
		e.Text = string(r.takeBytes(int(r.readUint(1))))
		rank = int(r.readUint(1))
		e.Dims = r.readDims(rank, e.Wide)
		record, data, bytes := r.readUint(8), r.readUint(8), r.readUint(8)
		if r.short {
			return f.at("", at, errs.New(errs.ErrFormat, "the index ends inside an entry"))
		}
		bad := func(class error, format string, args ...any) error {
			return f.at(e.Name, at, errs.New(class, format, args...))
		}
		if err := checkName(e.Name, e.Type); err != nil {
			return f.at("", at, err)
		}
		var err error
		switch {
		case e.Type > StateDict:
			return bad(errs.ErrNotSupported, "unknown tensor type %d: expected 0 to 2", e.Type)
		case rank > tensor.MaxRank:
			return bad(errs.ErrFormat, "rank %d exceeds the maximum %d", rank, tensor.MaxRank)
		case record > math.MaxInt64 || data > math.MaxInt64 || bytes > math.MaxInt64:
			return bad(errs.ErrFormat, "invalid offsets: record at %d, %d bytes of data at %d", record, bytes, data)
		}
		if hasNegative(e.Dims) {
			return bad(errs.ErrFormat, "a dimension is too large: shape %v", e.Dims)
		}
		if e.dtype, e.shape, err = dtypeOf(e.Text, e.Dims); err != nil {
			size, ok := itemSize(e.Text)
			if !ok || !errors.Is(err, errs.ErrNotSupported) {
				return f.at(e.Name, at, err)
			}
			e.other = f.at(e.Name, at, err)
			e.dtype, e.shape = tensor.U8, append(e.Dims[:rank:rank], size)
		}
		if e.full, err = tensor.Size(e.dtype, e.shape); err != nil {
			return f.at(e.Name, at, err)
		}
		e.Record, e.Data, e.Bytes = int64(record), int64(data), int64(bytes)
		switch {
		case e.Record < end && len(f.Entries) > 0 && e.Record >= headSize:
			return f.at(e.Name, at, errDev)
		case e.Record < end || e.Data-e.Record < 8 || e.Data < e.Record:
			return bad(errs.ErrFormat, "offsets out of order: record at %d, data at %d, after "+
				"%d", e.Record, e.Data, end)
		case e.Data > f.Size || e.Bytes > f.Size-e.Data:
			return bad(errs.ErrCorrupt, "truncated: data at %d + %d, but the file has %d "+
				"bytes", e.Data, e.Bytes, f.Size)
		case e.Bytes != e.full && e.Bytes != 0:
			return bad(errs.ErrFormat, "the index says %d bytes, but shape %v of %q takes "+
				"%d", e.Bytes, e.Dims, e.Text, e.full)
		}
		if e.Bytes == 0 {
			if zeros += e.full; e.full > maxMeta || zeros > maxMeta {
				return bad(errs.ErrNotSupported, "tensors without data take more than %d bytes in "+
					"total", int64(maxMeta))
			}
		}
		end = e.Data + e.Bytes
		f.Entries = append(f.Entries, e)
	}
	return nil
}

// ReadRecords reads the record before each tensor's data and compares it with the index.
func (f *File) ReadRecords(ctx context.Context, src source.Source) error {
	if f.Records != nil {
		return nil
	}
	records, err := f.readRecords(ctx, src, func(*Entry) bool { return true })
	if err == nil {
		f.Records = records
	}
	return err
}

// compareRecords compares the index with those records that are cheap to read. For a local source it compares all
// records. Elsewhere each record may cost a round trip, so it only compares the records of tensors without data in
// the index, because these would read as zeros.
func (f *File) compareRecords(ctx context.Context, src source.Source) error {
	if facts := src.Facts(); !facts.Remote && (facts.File != nil || facts.View != nil) {
		return f.ReadRecords(ctx, src)
	}
	if f.Records != nil {
		return nil
	}
	_, err := f.readRecords(ctx, src, func(e *Entry) bool { return e.Bytes != e.full })
	return err
}

// readRecords reads the records of the entries for which wants returns true.
func (f *File) readRecords(ctx context.Context, src source.Source, wants func(e *Entry) bool) ([]Record, error) {
	all, most := int64(0), tensor.MaxIndex+Align*int64(len(f.Entries)) // allows the padding of known writers
	for i := range f.Entries {
		e := &f.Entries[i]
		if all += e.Data - e.Record; all > most {
			return nil, f.at(e.Name, e.Record, errs.New(errs.ErrFormat, "the records have more than %d bytes", most))
		}
	}
	records := make([]Record, len(f.Entries))
	err := spawn.Each(ctx, "index", maxTogether, len(f.Entries), func(i int) error {
		e := &f.Entries[i]
		if !wants(e) {
			return nil
		}
		n := e.Data - e.Record
		if n > tensor.MaxHeader {
			return f.at(e.Name, e.Record, errs.New(errs.ErrFormat, "invalid record: %d bytes before the data", n))
		}
		b := make([]byte, n)
		if err := src.ReadAt(ctx, b, e.Record); err != nil {
			return err
		}
		return f.readRecord(b, e, &records[i])
	})
	return records, err
}

func (f *File) readRecord(b []byte, e *Entry, out *Record) error {
	bad := func(format string, args ...any) error {
		return f.at(e.Name, e.Record, errs.New(errs.ErrFormat, format, args...))
	}
	if n := le.Uint64(b); n != uint64(len(b)) {
		return bad("the record has %d bytes, but the index leaves space for %d", n, len(b))
	}
	r := reader{b: b[:len(b)-8], p: 8}
	if len(b) < 16 {
		return bad("the record ends early")
	}
	out.Module = uint16(r.readUint(2))
	kind := uint8(r.readUint(1))
	name := string(r.takeBytes(int(r.readUint(2))))
	text := string(r.takeBytes(int(r.readUint(1))))
	dims := r.readDims(int(r.readUint(1)), e.Wide)
	if r.short || kind != e.Type || name != e.Name || text != e.Text || !slices.Equal(dims, e.Dims) {
		return bad("the record differs from the index")
	}
	if n := int64(le.Uint64(b[len(b)-8:])); n != e.Bytes {
		return bad("the record says %d bytes of data, but the index says %d", n, e.Bytes)
	}
	sums := int(r.readUint(2))
	from := r.p
	block := reader{b: r.takeBytes(sums)}
	prefix := append([]byte(nil), b...)
	for range block.readUint(1) {
		kind, n := block.readUint(1), int(block.readUint(1))
		sum := block.takeBytes(n)
		if block.short {
			break
		}
		clear(prefix[from+block.p-n : from+block.p])
		switch {
		case kind == 0 && n == 4:
			out.CRC32 = sum
		case kind == 1 && n == 32:
			out.SHA256 = sum
		default:
			return f.at(e.Name, e.Record, errs.New(errs.ErrNotSupported, "unsupported hash of kind %d with %d "+
				"bytes", kind, n))
		}
	}
	if r.short || block.short {
		return bad("the record ends early")
	}
	out.Prefix = prefix
	if !f.Encrypted {
		return nil
	}
	start := r.p
	length := r.readUint(8)
	if length > uint64(len(r.b)) {
		r.short = true
	}
	body := r.takeBytes(int(min(length, uint64(len(r.b)))))
	if r.short {
		return bad("the record ends early")
	}
	out.Prefix = append(prefix[:start:start], prefix[r.p:]...)
	c, err := parseCrypt(body, e.Bytes)
	if err != nil {
		return f.at(e.Name, e.Record, err)
	}
	if c == nil && e.Bytes > 0 {
		return bad("the data is not encrypted, but the file says that it is")
	}
	out.Crypt = c
	return nil
}

// at adds the location to an error.
func (f *File) at(name string, off int64, err error) error {
	return errs.Place("index", f.URI, name, off, err)
}

// A reader reads numbers and bytes from a buffer. short means that the buffer was too short; everything read after
// that is zero.
type reader struct {
	b     []byte
	p     int
	short bool
}

func (r *reader) takeBytes(n int) []byte {
	if r.short || n < 0 || n > len(r.b)-r.p {
		r.short = true
		return nil
	}
	r.p += n
	return r.b[r.p-n : r.p]
}

func (r *reader) readUint(n int) uint64 {
	var v uint64
	for i, b := range r.takeBytes(n) {
		v |= uint64(b) << (8 * i)
	}
	return v
}

func (r *reader) readDims(rank int, wide bool) []int64 {
	size := 4
	if wide {
		size = 8
	}
	if rank*size > len(r.b)-r.p {
		r.short = true
		return nil
	}
	d := make([]int64, rank)
	for i := range d {
		d[i] = int64(r.readUint(size))
	}
	return d
}

// Describe describes the head, the index, and the records if they were read. It reads no data.
func (f *File) Describe() *Description {
	out := &Description{URI: errs.RedactURI(f.URI), Version: f.Version, Encrypted: f.Encrypted, Total: f.Total,
		Size: f.Size, Entries: make([]EntryDescription, len(f.Entries))}
	for i := range f.Entries {
		r := EntryDescription{Entry: f.Entries[i]}
		if f.Records != nil {
			rec := &f.Records[i]
			r.Module, r.Prefix = rec.Module, rec.Prefix
			r.CRC32, r.SHA256 = hex.EncodeToString(rec.CRC32), hex.EncodeToString(rec.SHA256)
			if rec.Crypt != nil {
				r.Sealed, r.Derive = true, rec.Crypt.Derive
			}
		}
		out.Entries[i] = r
	}
	return out
}

// Items returns descriptions for writing the tensors again, by the names that Index returns. The records must have
// been read.
func (f *File) Items() map[string]Item {
	items, names := make(map[string]Item, len(f.Entries)), f.stateNames()
	for i := range f.Entries {
		e := &f.Entries[i]
		items[names[e.Name]] = Item{Module: f.Records[i].Module, Type: e.Type, Name: e.Name, Text: e.Text, Dims: e.Dims,
			Bytes: e.Bytes}
	}
	return items
}

// stateNames maps the tensors' names in the file to those in state_dict(). A name in the file is the module's name, a
// dot, and the parameter's name. The name of the top module is empty, so its parameter "weight" is ".weight" in the
// file.
func (f *File) stateNames() map[string]string {
	names := make(map[string]string, len(f.Entries))
	for i := range f.Entries {
		names[f.Entries[i].Name] = f.Entries[i].Name
	}
	for i := range f.Entries {
		e := &f.Entries[i]
		if own, ok := strings.CutPrefix(e.Name, "."); ok && own != "" && e.Type != StateDict && names[own] == "" {
			names[e.Name] = own
		}
	}
	return names
}
