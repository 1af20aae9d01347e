package delta

// This file lays out, parses, reads and writes delta files:
//
//	u64 N | N bytes of JSON | overwire.index | overwire.table | overwire.chunks
//
//	table: "OWDT" | u32 version 1 | u32 tensors | u32 chunks | u32 dims | u32 bytes of names | u32 chunk bytes | u32 0
//	       | dims u64 each | tensors 64 each | chunks 8 each | names | u32 CRC32C | zeros to a multiple of 64
//	tensor: u8 dtype | u8 rank | u16 bytes of the name | u32 chunks | u64 bytes | u8[16] base |
//	        u8[16] new | u32 same | u8[12] 0
//	chunk: u32 stored | u32 CRC32C
//
// The stored chunks are contiguous. The specification is docs/format.md 7.1. Only this package writes this format.

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"math"
	"runtime"
	"slices"
	"sync"
	"unicode/utf8"

	"github.com/overwire/overwire/gosrc/codec/delta"
	"github.com/overwire/overwire/gosrc/codec/digest"
	"github.com/overwire/overwire/gosrc/convert"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/format"
	"github.com/overwire/overwire/gosrc/format/overwire"
	"github.com/overwire/overwire/gosrc/format/safetensors"
	"github.com/overwire/overwire/gosrc/internal/crc32c"
	"github.com/overwire/overwire/gosrc/internal/hostmem"
	"github.com/overwire/overwire/gosrc/internal/sizes"
	"github.com/overwire/overwire/gosrc/internal/spawn"
	"github.com/overwire/overwire/gosrc/job"
	"github.com/overwire/overwire/gosrc/save"
	"github.com/overwire/overwire/gosrc/save/publish"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/source/memory"
	"github.com/overwire/overwire/gosrc/source/open"
	"github.com/overwire/overwire/gosrc/tensor"
)

const (
	tableName  = "overwire.table"
	chunksName = "overwire.chunks"

	magic      = "OWDT"
	version    = 1
	headSize   = 32
	recordSize = 64
	entrySize  = 8
	noSame     = math.MaxUint32
)

var le = binary.LittleEndian

func encodeTable(f *File) ([]byte, error) {
	dims, chunks, names := 0, 0, 0
	for i := range f.Tensors {
		t := &f.Tensors[i]
		dims, names = dims+len(t.Shape), names+len(t.Name)
		if t.Same < 0 {
			chunks += len(t.Chunks)
		}
		if len(t.Name) > math.MaxUint16 || len(t.Shape) > tensor.MaxRank {
			return nil, errs.New(errs.ErrArgument, "tensor %q cannot be stored: its name has %d bytes, and its "+
				"shape %d dimensions", t.Name, len(t.Name),
				len(t.Shape))
		}
	}
	b := append(make([]byte, 0, headSize+8*dims+recordSize*len(f.Tensors)+entrySize*chunks+names+2*tensor.BlobAlign),
		magic...)
	for _, v := range []int{version, len(f.Tensors), chunks, dims, names, int(f.ChunkLen), 0} {
		if v > math.MaxUint32-1 {
			return nil, errs.New(errs.ErrArgument, "the delta is too large for one file: %d tensors, %d chunks",
				len(f.Tensors), chunks)
		}
		b = le.AppendUint32(b, uint32(v))
	}
	for i := range f.Tensors {
		for _, d := range f.Tensors[i].Shape {
			b = le.AppendUint64(b, uint64(d))
		}
	}
	for i := range f.Tensors {
		t := &f.Tensors[i]
		count, same := len(t.Chunks), uint32(noSame)
		if t.Same >= 0 {
			count, same = 0, uint32(t.Same)
		}
		b = append(b, byte(t.DType), byte(len(t.Shape)))
		b = le.AppendUint16(b, uint16(len(t.Name)))
		b = le.AppendUint32(b, uint32(count))
		b = le.AppendUint64(b, uint64(t.Bytes))
		for _, v := range []uint64{t.Base.High, t.Base.Low, t.New.High, t.New.Low} {
			b = le.AppendUint64(b, v)
		}
		b = le.AppendUint32(b, same)
		b = append(b, make([]byte, 12)...)
	}
	b = appendEntries(b, f, chunks)
	for i := range f.Tensors {
		b = append(b, f.Tensors[i].Name...)
	}
	b = le.AppendUint32(b, crc32c.Sum(b))
	return append(b, make([]byte, sizes.RoundUp(len(b), tensor.BlobAlign)-len(b))...), nil
}

// appendEntries appends the table entries of n chunks and computes their checksums on all cores.
func appendEntries(b []byte, f *File, n int) []byte {
	all := make([][]byte, 0, n)
	for i := range f.Tensors {
		if t := &f.Tensors[i]; t.Same < 0 {
			all = append(all, t.Chunks...)
		}
	}
	at := len(b)
	b = append(b, make([]byte, entrySize*n)...)
	const step = 64
	_ = spawn.Each(context.Background(), "delta sums", runtime.GOMAXPROCS(0), sizes.CeilDiv(n, step),
		func(k int) error {
			for i := k * step; i < min(n, (k+1)*step); i++ {
				le.PutUint32(b[at+entrySize*i:], uint32(len(all[i])))
				le.PutUint32(b[at+entrySize*i+4:], crc32c.Sum(all[i]))
			}
			return nil
		})
	return b
}

// layOut returns the file's bytes in pieces. The first piece is everything before the chunks. It sets Size.
func layOut(f *File, table []byte) ([][]byte, error) {
	pieces, storedBytes := [][]byte{nil}, int64(0)
	for i := range f.Tensors {
		if t := &f.Tensors[i]; t.Same < 0 {
			for _, c := range t.Chunks {
				if len(c) > 0 {
					pieces, storedBytes = append(pieces, c), storedBytes+int64(len(c))
				}
			}
		}
	}
	metadata := map[string]string{}
	for k, v := range f.Metadata {
		if k == overwire.MetadataKey || k == shardKey {
			return nil, errs.New(errs.ErrArgument, "metadata entry %q is reserved", k)
		}
		metadata[k] = v
	}
	if f.mark.of > 0 {
		metadata[shardKey] = f.mark.String()
	}
	metadata[overwire.MetadataKey] = overwire.DeltaMark()
	entries := []safetensors.Entry{
		{Name: overwire.IndexName, DType: tensor.U8, Shape: []int64{int64(overwire.DeltaIndexSize())}},
		{Name: tableName, DType: tensor.U8, Shape: []int64{int64(len(table))}},
		{Name: chunksName, DType: tensor.U8, Shape: []int64{storedBytes}},
	}
	end, err := safetensors.Place(entries)
	if err != nil {
		return nil, err
	}
	head, err := safetensors.AppendHeader(nil, metadata,
		slices.Insert(entries, 0, safetensors.NoticeEntry(overwire.DeltaNotice)), overwire.DataAlign)
	if err != nil {
		return nil, err
	}
	f.Size = int64(len(head)) + end
	pieces[0] = append(overwire.AppendDelta(head, head), table...)
	return pieces, nil
}

// Parse parses the bytes of a file, which the File retains. It checks the header, the table, each chunk's checksum, and
// that each chunk can be applied. Changed bytes give errs.ErrCorrupt, a file of a different format gives
// errs.ErrFormat, and a shard without the other shards gives errs.ErrNotFound.
func Parse(ctx context.Context, uri string, b []byte) (*File, error) {
	f, err := parseFile(ctx, uri, b)
	if err != nil {
		return nil, errs.Locate("delta", uri, "", -1, err)
	}
	return joinFiles(uri, []*File{f}, nil)
}

func parseFile(ctx context.Context, uri string, b []byte) (*File, error) {
	h, err := safetensors.Read(ctx, memory.New(uri, b, func() {}), safetensors.Options{})
	if err != nil {
		return nil, err
	}
	isOurs, err := overwire.Is(&h)
	if err == nil && !isOurs {
		err = errs.New(errs.ErrFormat, "this is not a delta file; save_delta writes delta files")
	}
	if err != nil {
		return nil, err
	}
	at := func(i int) []byte { return b[h.Tensors[i].Off:][:h.Tensors[i].Bytes] }
	if err := overwire.IsDelta(at(0), &h); err != nil {
		return nil, err
	}
	if len(h.Tensors) != 3 || h.Tensors[1].Name != tableName || h.Tensors[2].Name != chunksName {
		return nil, errs.New(errs.ErrFormat, "a delta file must have exactly the tensors %s, %s and %s",
			overwire.IndexName, tableName, chunksName)
	}
	f := &File{URI: uri, Metadata: h.Metadata, Size: int64(len(b))}
	delete(f.Metadata, overwire.MetadataKey)
	if err := readMark(f); err != nil {
		return nil, err
	}
	f.mark.table = digest.Of(at(1))
	p := parser{f: f, b: at(1), data: at(2)}
	if err := p.table(); err != nil {
		return nil, err
	}
	return f, p.checkChunks(ctx)
}

// A parser parses a table. sums holds the checksum of each chunk.
type parser struct {
	f                           *File
	b, data                     []byte
	tensors, chunks, dims, text int
	sums                        []uint32
	of                          []int32 // the tensor of each chunk
	first                       []int   // the first chunk of each tensor
}

func formatError(format string, args ...any) error { return errs.New(errs.ErrFormat, format, args...) }

func (p *parser) table() error {
	b := p.b
	if len(b) < headSize+4 || string(b[:4]) != magic {
		return errs.New(errs.ErrCorrupt, "the table is missing or damaged: it has only %d bytes", len(b))
	}
	p.tensors, p.chunks, p.dims, p.text = int(le.Uint32(b[8:])), int(le.Uint32(b[12:])), int(le.Uint32(b[16:])),
		int(le.Uint32(b[20:]))
	end := headSize + 8*p.dims + recordSize*p.tensors + entrySize*p.chunks + p.text
	if sizes.RoundUp(end+4, tensor.BlobAlign) != len(b) {
		return errs.New(errs.ErrCorrupt, "the table has %d bytes, but its header says %d", len(b), end)
	}
	if sum := crc32c.Sum(b[:end]); sum != le.Uint32(b[end:]) {
		return errs.New(errs.ErrCorrupt, "checksum mismatch of the table: expected %08x, got %08x",
			le.Uint32(b[end:]), sum)
	}
	if len(bytes.Trim(b[end+4:], "\x00")) > 0 {
		return errs.New(errs.ErrCorrupt, "the padding of the table is not zero")
	}
	if v := le.Uint32(b[4:]); v != version {
		return errs.New(errs.ErrNotSupported,
			"this delta has version %d, but this overwire reads only 1: upgrade overwire", v)
	}
	p.f.ChunkLen = int64(le.Uint32(b[24:]))
	if n := p.f.ChunkLen; n < 4096 || n > delta.MaxBytes || n%4096 != 0 || le.Uint32(b[28:]) != 0 {
		return formatError("invalid chunk size %d: expected a multiple of 4096 up to %d", n, delta.MaxBytes)
	}
	p.f.Tensors, p.first = make([]Tensor, p.tensors), make([]int, p.tensors)
	dims, names, first := b[headSize:], b[end-p.text:end], 0
	for i := range p.f.Tensors {
		var err error
		if dims, names, err = p.tensor(i, dims, names, first); err != nil {
			return err
		}
		p.first[i] = first
		if p.f.Tensors[i].Same < 0 {
			first += len(p.f.Tensors[i].Chunks)
		}
	}
	if first != p.chunks || len(names) != 0 || len(b)-len(dims) != headSize+8*p.dims {
		return formatError("the table has %d chunks, %d bytes of names and %d dimensions that belong to no tensor",
			p.chunks-first, len(names), p.dims)
	}
	return p.cutChunks(b[end-p.text-entrySize*p.chunks:])
}

// tensor reads record i and returns the remaining dims and names. first is the number of its first chunk.
func (p *parser) tensor(i int, dims, names []byte, first int) ([]byte, []byte, error) {
	r := p.b[headSize+8*p.dims+recordSize*i:][:recordSize]
	rank, text, count := int(r[1]), int(le.Uint16(r[2:])), int(le.Uint32(r[4:]))
	if len(dims) < 8*rank || len(names) < text || count > p.chunks-first || rank > tensor.MaxRank {
		return nil, nil, formatError("tensor %d is invalid: rank %d, a name of %d bytes, %d chunks",
			i, rank, text, count)
	}
	t := &p.f.Tensors[i]
	*t = Tensor{Name: string(names[:text]), DType: tensor.DType(r[0]), Shape: make([]int64, rank), Same: -1,
		Base: digest.Sum{High: le.Uint64(r[16:]), Low: le.Uint64(r[24:])},
		New:  digest.Sum{High: le.Uint64(r[32:]), Low: le.Uint64(r[40:])}}
	for k := range t.Shape {
		t.Shape[k] = int64(le.Uint64(dims[8*k:]))
	}
	bytes, err := tensor.Size(t.DType, t.Shape)
	if err != nil || uint64(bytes) != le.Uint64(r[8:]) {
		return nil, nil, formatError("tensor %q: %v %v does not have %d bytes",
			t.Name, t.DType, t.Shape, le.Uint64(r[8:]))
	}
	if !utf8.ValidString(t.Name) {
		return nil, nil, formatError("the name %q is not valid UTF-8", t.Name)
	}
	if i > 0 && t.Name <= p.f.Tensors[i-1].Name {
		return nil, nil, formatError("tensor %q follows %q: expected unique names in order",
			t.Name, p.f.Tensors[i-1].Name)
	}
	t.Bytes = bytes
	whole := sizes.CeilDiv(bytes, p.f.ChunkLen)
	if count != 0 && int64(count) != whole || (count == 0) != (t.Base == t.New) && le.Uint32(r[48:]) == noSame ||
		string(r[52:]) != string(make([]byte, 12)) {
		return nil, nil, formatError("tensor %q: invalid record with %d of %d chunks", t.Name, count, whole)
	}
	if same := le.Uint32(r[48:]); same != noSame {
		if int64(same) >= int64(i) || count != 0 {
			return nil, nil, formatError("tensor %q refers to the chunks of tensor %d, which is not an earlier "+
				"one with chunks", t.Name, same)
		}
		o := &p.f.Tensors[same]
		if o.Same >= 0 || o.Base != t.Base || o.New != t.New || o.Bytes != t.Bytes ||
			widthOf(o.DType) != widthOf(t.DType) || o.Base == o.New {
			return nil, nil, formatError("tensor %q refers to the chunks of %q, but their digests or sizes differ",
				t.Name, o.Name)
		}
		t.Same, t.Chunks = int(same), o.Chunks
	} else {
		t.Chunks = make([][]byte, count)
	}
	return dims[8*rank:], names[text:], nil
}

// cutChunks assigns stored bytes to each chunk.
func (p *parser) cutChunks(entries []byte) error {
	p.sums, p.of = make([]uint32, p.chunks), make([]int32, p.chunks)
	rest, n := p.data, 0
	for i := range p.f.Tensors {
		t := &p.f.Tensors[i]
		if t.Same >= 0 {
			continue
		}
		some := false
		for k := range t.Chunks {
			storedBytes := int(le.Uint32(entries[entrySize*n:]))
			p.sums[n], p.of[n] = le.Uint32(entries[entrySize*n+4:]), int32(i)
			if storedBytes > len(rest) || storedBytes == 0 && p.sums[n] != 0 {
				return formatError("tensor %q: chunk %d has the invalid size %d, or a checksum without bytes",
					t.Name, k, storedBytes)
			}
			if storedBytes > 0 {
				t.Chunks[k], rest, some = rest[:storedBytes:storedBytes], rest[storedBytes:], true
			}
			n++
		}
		if len(t.Chunks) > 0 && !some {
			return formatError("tensor %q has chunks, but all of them are empty", t.Name)
		}
	}
	if len(rest) != 0 {
		return formatError("%d bytes belong to no chunk", len(rest))
	}
	return nil
}

// checkChunks verifies the checksum of every chunk and that it can be decoded.
func (p *parser) checkChunks(ctx context.Context) error {
	const step = 64
	return spawn.Each(ctx, "delta check", runtime.GOMAXPROCS(0), sizes.CeilDiv(p.chunks, step), func(i int) error {
		for n := i * step; n < min(p.chunks, (i+1)*step); n++ {
			t := &p.f.Tensors[p.of[n]]
			k := n - p.first[p.of[n]]
			c := t.Chunks[k]
			if len(c) == 0 {
				continue
			}
			err := delta.Check(c, p.f.chunkLength(t, k), widthOf(t.DType))
			if sum := crc32c.Sum(c); sum != p.sums[n] {
				err = errs.NewMismatch(p.sums[n], sum)
			}
			if err != nil {
				return errs.Locate("delta", p.f.URI, t.Name, int64(k), err)
			}
		}
		return nil
	})
}

// stem is the base name of a delta's files in a folder.
const stem = "delta"

// Read reads a delta and checks every byte. uri is a file or object, a folder of shards, or an index.json. The File
// holds the stored bytes, not the decoded ones. Read refuses a delta that does not fit into the host's available
// memory.
func Read(ctx context.Context, uri string, opt source.Options) (*File, error) {
	stores := open.With(opt)
	lists := format.Options{List: stores.List}
	folder := format.RemoteFolder(ctx, source.LocationOf(uri), stores.OpenLike, lists)
	set, err := format.Resolve(ctx, source.LocationOf(cmp.Or(folder, uri)), stores.OpenLike, lists)
	if err != nil {
		return nil, err
	}
	names := set.URIs
	srcs := make([]source.Source, len(names))
	defer func() {
		for _, s := range srcs {
			if s != nil {
				_ = s.Close()
			}
		}
	}()
	err = spawn.Each(ctx, "delta open", 8, len(names), func(i int) (err error) {
		srcs[i], err = stores.Open(ctx, names[i])
		return err
	})
	if err != nil {
		return nil, err
	}
	available := hostmem.Available()
	for need, i := int64(0), 0; i < len(srcs); i++ {
		size := srcs[i].Size()
		if need += min(size, available+1); size > available || need > available {
			return nil, errs.Locate("delta", uri, "", -1,
				&errs.Memory{Where: "host", Asked: max(need, size), Free: available, Total: available, For: "a delta",
					Err: "available"})
		}
	}
	files := make([]*File, len(srcs))
	for i, s := range srcs {
		if files[i], err = readOne(ctx, names[i], s); err != nil {
			return nil, err
		}
	}
	return joinFiles(uri, files, set.Shards)
}

func readOne(ctx context.Context, uri string, src source.Source) (*File, error) {
	const part = 8 << 20
	size := src.Size()
	b := make([]byte, size)
	err := spawn.Each(ctx, "delta read", 8, int((size+part-1)/part), func(i int) error {
		lo := int64(i) * part
		return src.ReadAt(ctx, b[lo:min(size, lo+part)], lo)
	})
	if err != nil {
		return nil, errs.Locate("read", uri, "", -1, err)
	}
	f, err := parseFile(ctx, uri, b)
	return f, errs.Locate("delta", uri, "", -1, err)
}

// Write writes the delta to spec.Path, in shards with at most spec.Shard bytes of chunks. All files appear together.
// If the path is a folder, the auxiliary files of the folder model are copied to it (convert.WritePrewritten), unless
// model is "".
func Write(ctx context.Context, j *job.Job, f *File, model string, spec save.Spec) (Report, error) {
	shards, tables, err := splitFile(f, spec.Shard)
	if err != nil {
		return Report{}, errs.Locate("save", spec.Path, "", -1, err)
	}
	files := make([]publish.Prewritten, len(shards))
	f.Size = 0
	for k, s := range shards {
		pieces, err := layOut(s, tables[k])
		if err != nil {
			return Report{}, errs.Locate("save", spec.Path, "", -1, err)
		}
		f.Size += s.Size
		files[k] = publish.Prewritten{Bytes: s.Size, Tensors: s.Report().Bytes}
		for i := range s.Tensors {
			files[k].Names = append(files[k].Names, s.Tensors[i].Name)
		}
		files[k].Fill = func(ctx context.Context, write func(p []byte, off int64) error) error {
			return writeAll(ctx, write, pieces)
		}
	}
	layout, err := convert.WritePrewritten(ctx, j, model, stem, files, spec)
	r := f.Report()
	r.Files = layout.Files
	return r, err
}

// writeAll writes the pieces contiguously. Each of several workers gathers many pieces and writes them with one call.
func writeAll(ctx context.Context, write func(p []byte, off int64) error, pieces [][]byte) error {
	const most, workers = 4 << 20, 8
	type part struct {
		lo, hi    int
		at, bytes int64
	}
	var parts []part
	at := int64(0)
	for i, p := range pieces {
		n := int64(len(p))
		if last := len(parts) - 1; last >= 0 && parts[last].bytes+n <= most {
			parts[last].hi++
			parts[last].bytes += n
		} else {
			parts = append(parts, part{i, i + 1, at, n})
		}
		at += n
	}
	buffers := sync.Pool{New: func() any { return new(bytes.Buffer) }}
	return spawn.Each(ctx, "delta write", workers, len(parts), func(i int) error {
		p := parts[i]
		b := pieces[p.lo]
		if p.hi-p.lo > 1 {
			buffer := buffers.Get().(*bytes.Buffer)
			defer buffers.Put(buffer)
			buffer.Reset()
			buffer.Grow(most)
			for _, piece := range pieces[p.lo:p.hi] {
				buffer.Write(piece)
			}
			b = buffer.Bytes()
		}
		return write(b, p.at)
	})
}
