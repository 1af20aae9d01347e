package tensorizer

// This file parses heads, indexes and records into a File.

import (
	"context"
	"errors"
	"math"

	"github.com/overwire/overwire/gosrc/fault"
	"github.com/overwire/overwire/gosrc/internal/spawn"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/tensor"
)

// An Entry is a tensor as the index of a file says it.
type Entry struct {
	Name   string
	Type   uint8
	Wide   bool   // dims are u64, in its record too
	Text   string // the dtype as it is written
	Dims   []int64
	Record int64 // where its record begins
	Data   int64 // where its data begin
	Bytes  int64 // of the data; 0 with dims that are not: zeros ("meta")

	dtype tensor.DType
	shape []int64
	full  int64 // bytes that dtype and shape take
	other error // no dtype of ours: dtype and shape are those of its bytes
}

// A Record is what stands before a tensor's data.
type Record struct {
	Module uint16
	// CRC32 and SHA256 are the sums, nil where the file has none.
	CRC32, SHA256 []byte
	// Prefix is what is summed up before the data.
	Prefix []byte
	Crypt  *Crypt // nil: the data lie in plain
}

// A File is what a .tensors file says of itself.
type File struct {
	URI       string
	Version   uint32
	Encrypted bool
	tagged    bool  // index entries begin with their version
	Total     int64 // bytes of data, by its word
	Size      int64
	Entries   []Entry
	Records   []Record // by entry; nil before ReadRecords

	head []byte // the first headSize bytes
	rest []byte // of the index, behind the entries
}

// maxTogether is how many records are read at once: each may cost a round trip.
const maxTogether = 16

// Read reads the head and the index of a file, of which head is the beginning,
// and the records too when it is encrypted. Nothing is allocated on the word of
// the file alone. The error is a fault.At of class fault.ErrFormat,
// fault.ErrCorrupt where the file was cut short, or fault.ErrNotSupported for
// versions, flags, layouts and dtypes that this build does not know.
func Read(ctx context.Context, src source.Source, head []byte) (*File, error) {
	f := &File{URI: src.URI(), Size: src.Size()}
	r := reader{b: head}
	if !Is(head) || f.Size < headSize || len(head) < headSize {
		return nil, f.at("", 0, fault.New(fault.ErrCorrupt, "truncated: a .tensors file of %d bytes", f.Size))
	}
	r.p = len(Magic)
	f.Version = uint32(r.u(4))
	flags := r.take(32)
	f.Total = int64(r.u(8))
	r.take(8)
	count, length := r.u(8), r.u(8)
	switch {
	case f.Version == 0 || f.Version > maxVersion:
		return nil, f.at("", 5, fault.New(fault.ErrNotSupported, "version %d of .tensors files, this overwire reads 1 to %d", f.Version, maxVersion))
	case f.Version >= 4:
		f.Encrypted, f.tagged = flags[0]&encrypted != 0, flags[0]&tagged != 0
		for i, b := range flags {
			if i == 0 {
				b &^= encrypted | tagged
			}
			if b != 0 {
				return nil, f.at("", 9, fault.New(fault.ErrNotSupported, "feature flags %x, of which this overwire knows bits 0 and 1", flags))
			}
		}
		switch {
		case f.tagged && f.Version < 5:
			return nil, f.at("", 9, fault.New(fault.ErrFormat, "feature flag 1 in version %d", f.Version))
		case !f.tagged && f.Version == 5:
			return nil, f.at("", 9, errDev)
		}
	default:
		f.Encrypted = f.Version == 3
	}
	switch {
	case f.Total < 0:
		return nil, f.at("", 41, fault.New(fault.ErrFormat, "%d bytes of data", f.Total))
	case length > tensor.MaxIndex:
		return nil, f.at("", 65, fault.New(fault.ErrFormat, "an index of %d bytes is over %d", length, tensor.MaxIndex))
	case int64(length) > f.Size-headSize:
		return nil, f.at("", 65, fault.New(fault.ErrCorrupt, "truncated: an index of %d bytes in a file of %d", length, f.Size))
	case count > length/25: // the least that an entry takes
		return nil, f.at("", 57, fault.New(fault.ErrFormat, "%d tensors in an index of %d bytes", count, length))
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
	if err := f.index(&r, int(count)); err != nil {
		return nil, err
	}
	f.head, f.rest = head[:headSize:headSize], r.b[r.p:]
	if f.Encrypted {
		return f, f.ReadRecords(ctx, src)
	}
	return f, nil
}

var errDev = fault.New(fault.ErrNotSupported, "the layout of an unreleased tensorizer (3.0-dev); write the file with a released one")

// index reads the entries.
func (f *File) index(r *reader, count int) error {
	f.Entries = make([]Entry, 0, count)
	end, zeros := int64(len(r.b)), int64(0)
	for range count {
		at := int64(r.p)
		var e Entry
		if f.tagged {
			switch tag := r.u(4); tag {
			case 1, 5:
				e.Wide = tag == 5
			default:
				if !r.short {
					return f.at("", at, fault.New(fault.ErrNotSupported, "version %d of an index entry", tag))
				}
			}
		}
		var rank int
		e.Name = string(r.take(int(r.u(2))))
		e.Type = uint8(r.u(1))
		e.Text = string(r.take(int(r.u(1))))
		rank = int(r.u(1))
		e.Dims = r.dims(rank, e.Wide)
		record, data, bytes := r.u(8), r.u(8), r.u(8)
		if r.short {
			return f.at("", at, fault.New(fault.ErrFormat, "the index ends inside an entry"))
		}
		bad := func(class error, format string, args ...any) error {
			return f.at(e.Name, at, fault.New(class, format, args...))
		}
		if err := checkName(e.Name, e.Type); err != nil {
			return f.at("", at, err)
		}
		var err error
		switch {
		case e.Type > StateDict:
			return bad(fault.ErrNotSupported, "type %d", e.Type)
		case rank > tensor.MaxRank:
			return bad(fault.ErrFormat, "rank %d is over %d", rank, tensor.MaxRank)
		case record > math.MaxInt64 || data > math.MaxInt64 || bytes > math.MaxInt64:
			return bad(fault.ErrFormat, "record at %d, %d bytes of data at %d", record, bytes, data)
		}
		for _, d := range e.Dims {
			if d < 0 {
				return bad(fault.ErrFormat, "shape %v", e.Dims)
			}
		}
		if e.dtype, e.shape, err = dtypeOf(e.Text, e.Dims); err != nil {
			size, ok := itemSize(e.Text)
			if !ok || !errors.Is(err, fault.ErrNotSupported) {
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
			return bad(fault.ErrFormat, "record at %d, data at %d, after %d", e.Record, e.Data, end)
		case e.Data > f.Size || e.Bytes > f.Size-e.Data:
			return bad(fault.ErrCorrupt, "truncated: data at %d + %d in a file of %d", e.Data, e.Bytes, f.Size)
		case e.Bytes != e.full && e.Bytes != 0:
			return bad(fault.ErrFormat, "%d bytes for shape %v of %q, which take %d", e.Bytes, e.Dims, e.Text, e.full)
		}
		if e.Bytes == 0 {
			if zeros += e.full; e.full > maxMeta || zeros > maxMeta {
				return bad(fault.ErrNotSupported, "tensors without data of more than %d bytes", int64(maxMeta))
			}
		}
		end = e.Data + e.Bytes
		f.Entries = append(f.Entries, e)
	}
	return nil
}

// ReadRecords reads what stands before each tensor's data and holds it to the
// index.
func (f *File) ReadRecords(ctx context.Context, src source.Source) error {
	if f.Records != nil {
		return nil
	}
	records := make([]Record, len(f.Entries))
	err := spawn.Each(ctx, "index", maxTogether, len(f.Entries), func(i int) error {
		e := &f.Entries[i]
		n := e.Data - e.Record
		if n > tensor.MaxHeader {
			return f.at(e.Name, e.Record, fault.New(fault.ErrFormat, "a record of %d bytes before the data", n))
		}
		b := make([]byte, n)
		if err := src.ReadAt(ctx, b, e.Record); err != nil {
			return err
		}
		return f.record(b, e, &records[i])
	})
	if err == nil {
		f.Records = records
	}
	return err
}

// record reads one.
func (f *File) record(b []byte, e *Entry, out *Record) error {
	bad := func(format string, args ...any) error {
		return f.at(e.Name, e.Record, fault.New(fault.ErrFormat, format, args...))
	}
	if n := le.Uint64(b); n != uint64(len(b)) {
		return bad("a record of %d bytes where the index leaves %d", n, len(b))
	}
	r := reader{b: b[:len(b)-8], p: 8}
	if len(b) < 16 {
		return bad("the record ends early")
	}
	out.Module = uint16(r.u(2))
	kind := uint8(r.u(1))
	name := string(r.take(int(r.u(2))))
	text := string(r.take(int(r.u(1))))
	dims := r.dims(int(r.u(1)), e.Wide)
	if r.short || kind != e.Type || name != e.Name || text != e.Text || !equal(dims, e.Dims) {
		return bad("the record says other things than the index")
	}
	if n := int64(le.Uint64(b[len(b)-8:])); n != e.Bytes {
		return bad("%d bytes of data by the record, %d by the index", n, e.Bytes)
	}
	sums := int(r.u(2))
	from := r.p
	block := reader{b: r.take(sums)}
	prefix := append([]byte(nil), b...)
	for range block.u(1) {
		kind, n := block.u(1), int(block.u(1))
		sum := block.take(n)
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
			return f.at(e.Name, e.Record, fault.New(fault.ErrNotSupported, "a sum of kind %d and %d bytes", kind, n))
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
	length := r.u(8)
	if length > uint64(len(r.b)) {
		r.short = true
	}
	body := r.take(int(min(length, uint64(len(r.b)))))
	if r.short {
		return bad("the record ends early")
	}
	out.Prefix = append(prefix[:start:start], prefix[r.p:]...)
	c, err := parseCrypt(body, e.Bytes)
	if err != nil {
		return f.at(e.Name, e.Record, err)
	}
	if c == nil && e.Bytes > 0 {
		return bad("data that are not encrypted in an encrypted file")
	}
	out.Crypt = c
	return nil
}

func equal(a, b []int64) bool {
	if len(a) != len(b) {
		return false
	}
	for i := range a {
		if a[i] != b[i] {
			return false
		}
	}
	return true
}

// at says where.
func (f *File) at(name string, off int64, err error) error {
	var at *fault.At
	if errors.As(err, &at) {
		return err
	}
	return &fault.At{Verb: "index", Source: f.URI, Tensor: name, Chunk: -1, Offset: off, Err: err}
}

// A reader takes numbers and bytes off a buffer; short says that there were
// not enough, and everything after that is zero.
type reader struct {
	b     []byte
	p     int
	short bool
}

func (r *reader) take(n int) []byte {
	if r.short || n < 0 || n > len(r.b)-r.p {
		r.short = true
		return nil
	}
	r.p += n
	return r.b[r.p-n : r.p]
}

func (r *reader) u(n int) uint64 {
	var v uint64
	for i, b := range r.take(n) {
		v |= uint64(b) << (8 * i)
	}
	return v
}

func (r *reader) dims(rank int, wide bool) []int64 {
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
		d[i] = int64(r.u(size))
	}
	return d
}
