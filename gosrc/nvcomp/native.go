package nvcomp

// Reads and writes the native stream, nvCOMP's container of chunks.

import (
	"context"
	"encoding/binary"
	"hash/crc32"
	"sort"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/blocks"
	"github.com/overwire/overwire/gosrc/internal/crc32c"
	"github.com/overwire/overwire/gosrc/internal/sizes"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/tensor"
)

// The Native container consists of a header of 64 bytes, the u64 offset of each chunk in the payload, the u64 stored
// size of each chunk, the checksums, and the payload. Every chunk in it starts at a multiple of 8 (X16: 16). All
// integers are little-endian:
//
//	 0  u32     magic: "OWBS"
//	 4  u8      1, the version of this layout
//	 5  u8      0
//	 6  u8      format: Algorithm
//	 8  u64     payload bytes
//	16  u64     content bytes
//	24  u64     chunks
//	32  u8      1: the offsets of chunks are present
//	40  u32     checksum of everything before the payload, if the stream has checksums
//	44  u8, u8  whether the checksums of stored chunks, and of contents, are present
//	48  u64     content bytes of a chunk
//	56  u32     offset of the payload
//
// Checksums are CRC-32 (IEEE). One covers the header and tables, with zeros for the checksum itself. After the table
// of sizes, there is a u32 for each stored chunk and then a u32 for the content of each chunk.
//
// The fields match nvCOMP's last open release, 2.2 (BSD-3: CommonHeader of hlif_shared_types.hpp, BatchManager.hpp,
// github.com/NVIDIA/nvcomp branch-2.2). Streams of that release can also be read. They have 0 as magic, the writer's
// version at 4, and the algorithm's own header after the common one. The tables start at the next multiple of 8,
// followed by space for two checksums per chunk, even if they were not computed. Chunks are in any order without
// gaps. nvCOMP's checksum algorithm and the format of its later releases are not public; only nvCOMP can read them.
const (
	headBytes = 64
	magic     = 'O' | 'W'<<8 | 'B'<<16 | 'S'<<24
	layoutOne = 1
	headSumAt = 40
)

// header is the common header of a stream.
type header struct {
	format                Algorithm
	payload, size, chunks uint64
	chunk                 uint64
	offset                uint32
	starts, stored, plain bool
	open                  bool // whether nvCOMP's open release wrote the stream
}

func parseHeader(src []byte) (h header, err error) {
	if len(src) < headBytes {
		return h, errs.New(errs.ErrFormat, "the stream has %d bytes, which is too short for a native stream", len(src))
	}
	le := binary.LittleEndian
	h = header{
		format: Algorithm(src[6]), payload: le.Uint64(src[8:]), size: le.Uint64(src[16:]), chunks: le.Uint64(src[24:]),
		chunk: le.Uint64(src[48:]), offset: le.Uint32(src[56:]), starts: src[32] != 0, stored: src[44] != 0,
		plain: src[45] != 0,
	}
	switch first := le.Uint32(src); {
	case first == magic && src[4] == layoutOne:
	case first == magic:
		return h, errs.New(errs.ErrFormat, "the native stream has layout %d: upgrade overwire to read it", src[4])
	case first == 0 && src[4] >= 2 && src[4] <= 4:
		h.open = true
	default:
		return h, errs.New(errs.ErrFormat,
			"not a native stream of overwire or nvCOMP 2.2, because it begins with %x; only nvCOMP reads streams "+
				"of later versions: overwire.compat.nvcomp uses nvCOMP if nvidia-nvcomp-cu13 or -cu12 is installed",
			src[:5])
	}
	return h, nil
}

// tablesPlace returns the offset of a stream's tables and their size in bytes for each chunk.
func (h *header) tablesPlace() (at, row uint64) {
	if !h.open {
		row = 16
		if h.stored {
			row += 4
		}
		if h.plain {
			row += 4
		}
		return headBytes, row
	}
	own := uint64(4) // LZ4, Snappy and GDeflate; see nvcomp/*.hpp of branch-2.2
	if h.format == Cascaded {
		own = 24
	}
	return (headBytes + own + 7) &^ 7, 16
}

func parseNative(src []byte, s *Spec, want *algorithm) (layout, error) {
	bad := func(format string, args ...any) (layout, error) {
		return layout{}, errs.New(errs.ErrCorrupt, "native stream: "+format, args...)
	}
	h, err := parseHeader(src)
	if err != nil {
		return layout{}, err
	}
	algo, err := byID(h.format)
	if err != nil {
		return layout{}, err
	}
	if want != nil && want != algo {
		return layout{}, errs.New(errs.ErrArgument, "the stream is %s, expected %s", algo.name, want.name)
	}
	n := uint64(len(src))
	switch {
	case h.size > 1<<62 || h.chunk > 1<<40:
		return bad("invalid header: %d bytes in chunks of %d", h.size, h.chunk)
	case uint64(h.offset) > n || h.payload > n-uint64(h.offset):
		return bad("invalid payload: %d bytes at %d of %d", h.payload, h.offset, n)
	case h.size > 0 && (h.chunk == 0 || sizes.CeilDiv(h.size, h.chunk) != h.chunks):
		return bad("invalid header: %d chunks of %d bytes for %d bytes", h.chunks, h.chunk, h.size)
	case h.size == 0 && h.chunks > 0:
		return bad("invalid header: %d chunks of an empty content", h.chunks)
	case h.size > 0 && !h.starts:
		return layout{}, errs.New(errs.ErrNotSupported, "the native stream does not have the offsets of its chunks")
	}
	tables, row := h.tablesPlace()
	if h.chunks > n/row || tables+h.chunks*row > uint64(h.offset) {
		return bad("%d chunks do not fit before the payload at %d", h.chunks, h.offset)
	}
	out := layout{algo: algo, size: int64(h.size), summed: s.Verify != VerifyNever && h.stored && h.plain}
	switch {
	case s.Verify == VerifyNever:
	case h.open && (h.stored || h.plain):
		return layout{}, errs.New(errs.ErrNotSupported,
			"the stream has nvCOMP's checksums, which are not documented publicly: decode without verifying them")
	case out.summed:
		out.damaged = headSum(src[:h.offset]) != binary.LittleEndian.Uint32(src[headSumAt:])
	case s.Verify == VerifyAlways:
		return layout{}, errs.WithRule("NoChecksums", errs.New(errs.ErrArgument,
			"the stream has no checksums to verify"))
	}
	le := binary.LittleEndian
	count := int(h.chunks)
	offsets := src[tables:]
	sizes := offsets[8*count:]
	sums, payload := sizes[8*count:], src[h.offset:uint64(h.offset)+h.payload]
	out.blocks = make([]block, count)
	var storedBytes uint64
	for i := range out.blocks {
		off, size := le.Uint64(offsets[8*i:]), le.Uint64(sizes[8*i:])
		if off > h.payload || size > h.payload-off {
			return bad("invalid chunk %d, with %d bytes at %d of %d", i, size, off, h.payload)
		}
		if storedBytes += size; storedBytes > h.payload {
			return bad("its chunks overlap")
		}
		p := block{src: payload[off : off+size], at: int64(uint64(i) * h.chunk)}
		p.n = min(int64(h.chunk), out.size-p.at)
		if out.summed {
			p.stored, p.contents = le.Uint32(sums[4*i:]), le.Uint32(sums[4*(count+i):])
		}
		if err := algo.checkLength(p.src, p.n); err != nil {
			return layout{}, &errs.At{Verb: "decode", Chunk: int64(i), Offset: int64(uint64(h.offset) + off), Err: err}
		}
		out.blocks[i] = p
	}
	return out, nil
}

// headSum returns the checksum of everything before the payload.
func headSum(p []byte) uint32 {
	sum := crc32.ChecksumIEEE(p[:headSumAt])
	sum = crc32.Update(sum, crc32.IEEETable, make([]byte, 4))
	return crc32.Update(sum, crc32.IEEETable, p[headSumAt+4:])
}

// nativeTables returns the offset of the payload for n chunks. GPUs need the bytes after the head of an X16 block
// aligned to 16, so the payload and its chunks start 8 bytes before a multiple of 16.
func nativeTables(algo *algorithm, chunks int64, sums bool) int64 {
	row := int64(16)
	if sums {
		row += 8
	}
	n := headBytes + chunks*row
	if algo.id == X16 && n%16 == 0 {
		n += 8
	}
	return n
}

// putNative writes the header and tables for stored blocks with these lengths and checksums into dst, which must be
// nativeTables bytes of zeros. It returns the offset of each block.
func putNative(dst []byte, s *Spec, algo *algorithm, size int64, stored []int64, sums [][2]uint32) (at []int64) {
	le := binary.LittleEndian
	head, count := int64(len(dst)), len(stored)
	tables := dst[headBytes:]
	at = make([]int64, count)
	var off int64
	for i, n := range stored {
		at[i] = head + off
		le.PutUint64(tables[8*i:], uint64(off))
		le.PutUint64(tables[8*(count+i):], uint64(n))
		if sums != nil {
			row := tables[16*count:]
			le.PutUint32(row[4*i:], sums[i][0])
			le.PutUint32(row[4*(count+i):], sums[i][1])
		}
		off += algo.paddedBytes(n)
	}
	le.PutUint32(dst, magic)
	dst[4], dst[6], dst[32] = layoutOne, byte(algo.id), 1
	le.PutUint64(dst[8:], uint64(off))
	le.PutUint64(dst[16:], uint64(size))
	le.PutUint64(dst[24:], uint64(count))
	le.PutUint64(dst[48:], uint64(s.Chunk))
	le.PutUint32(dst[56:], uint32(head))
	if sums != nil {
		dst[44], dst[45] = 1, 1
		le.PutUint32(dst[headSumAt:], headSum(dst))
	}
	return at
}

const (
	// beyond is the offset at which streams appear in their source. It is so far after the source's end that no read
	// can span stored bytes and streams.
	beyond = 1 << 61
	// mostStored is the maximum number of stored bytes in one read from a source with round trips.
	mostStored = 8 << 20
	// cutChunks is the size of the cache for chunks that are requested in parts.
	cutChunks = 64 << 20
)

// ViewStreams returns an index of a model's compressed tensors, in which each is a plain tensor of dtype U8: a Native
// stream of X16 with the tensor's stored chunks, unchanged. The returned sources read these streams from srcs and
// compare the chunks' checksums. contents has the content bytes of each stream's chunks.
//
// Streams cannot have chunks of codec 6, or column parts. Such tensors, empty tensors, and those of plain files are
// left out.
func ViewStreams(ix *tensor.Index, srcs []source.Source) (out *tensor.Index, streams []source.Source,
	contents []int64) {
	cache := blocks.New[int32](cutChunks)
	by := make([]*streamSource, len(srcs))
	for i, src := range srcs {
		by[i] = &streamSource{Source: src, ix: ix, cache: cache}
		streams = append(streams, by[i])
	}
	out = &tensor.Index{Sources: ix.Sources}
	views := map[int32]tensor.Tensor{} // by the tensor that has the bytes
	for i := range ix.Tensors {
		holder := int32(i)
		if a := ix.Tensors[i].Alias; a >= 0 {
			holder = a
		}
		t := &ix.Tensors[holder]
		if !canStream(ix, t) {
			continue
		}
		view, ok := views[holder]
		if !ok {
			off, n, cuts := by[t.Source].addStream(t)
			view = tensor.Tensor{Shape: []int64{n}, Bytes: n, Stored: n, Off: off, Source: t.Source, Alias: -1,
				DType: tensor.U8, Plain: true, Cuts: cuts}
			views[holder] = view
		}
		view.Name = ix.Tensors[i].Name
		out.Tensors = append(out.Tensors, view)
		contents = append(contents, int64(t.ChunkBytes))
	}
	return out, streams, contents
}

func canStream(ix *tensor.Index, t *tensor.Tensor) bool {
	for _, c := range ix.Chunks[t.First : t.First+t.Count] {
		if c.Codec != tensor.CodecRaw && c.Codec != tensor.CodecX16 {
			return false
		}
	}
	return t.Count > 0 && t.Parts == 1
}

// A streamSource is a source with streams beyond its end.
type streamSource struct {
	source.Source
	ix      *tensor.Index
	streams []storedStream // in the order of their offsets
	cache   *blocks.Cache[int32]
}

// storedStream is the stream of a tensor.
type storedStream struct {
	t    *tensor.Tensor
	off  int64   // the stream's offset in the source
	head []byte  // the bytes before the payload
	at   []int64 // the offset of each block in the stream, and the end of the stream
}

// addStream adds the stream of a tensor, and returns its offset, its size, and where its blocks end.
func (s *streamSource) addStream(t *tensor.Tensor) (off, n int64, cuts []int64) {
	x := storedStream{t: t, off: beyond}
	if k := len(s.streams) - 1; k >= 0 {
		last := &s.streams[k]
		x.off = sizes.RoundUp(last.off+last.at[last.t.Count], tensor.ChunkAlign)
	}
	algo, _ := byID(X16)
	lengths := make([]int64, t.Count)
	for k, c := range s.ix.Chunks[t.First : t.First+t.Count] {
		lengths[k] = x16Head + int64(c.Stored)
	}
	x.head = make([]byte, nativeTables(algo, int64(t.Count), false))
	x.at = putNative(x.head, &Spec{Chunk: int64(t.ChunkBytes)}, algo, t.Bytes, lengths, nil)
	n = x.at[t.Count-1] + algo.paddedBytes(lengths[t.Count-1])
	x.at = append(x.at, n)
	s.streams = append(s.streams, x)
	return x.off, n, x.at[1:]
}

// Facts returns the facts of the source, without a view, because a view has no streams.
func (s *streamSource) Facts() source.Facts {
	f := s.Source.Facts()
	file := f.File
	f = f.ReadAtOnly()
	f.File, f.Prefetch = file, nil // loads use the file's size and read mode
	return f
}

// ReadAt implements source.Source. Bytes between streams are zero.
func (s *streamSource) ReadAt(ctx context.Context, p []byte, off int64) error {
	for len(p) > 0 {
		k := sort.Search(len(s.streams), func(k int) bool { return s.streams[k].off > off }) - 1
		if k < 0 {
			return errs.New(errs.ErrEngine, "no stream has offset %d", off)
		}
		x := &s.streams[k]
		from := off - x.off
		n := min(int64(len(p)), x.at[x.t.Count]-from)
		if n > 0 {
			if err := s.fillStream(ctx, p[:n], x, from); err != nil {
				return err
			}
		} else {
			n = int64(len(p))
			if k+1 < len(s.streams) {
				n = min(n, s.streams[k+1].off-off)
			}
			clear(p[:n])
		}
		p, off = p[n:], off+n
	}
	return nil
}

// fillStream fills p with the bytes of a stream, starting at off.
func (s *streamSource) fillStream(ctx context.Context, p []byte, x *storedStream, off int64) error {
	if off < int64(len(x.head)) {
		n := copy(p, x.head[off:])
		p, off = p[n:], off+int64(n)
	}
	most := int64(0)
	if s.Source.Facts().Concurrency > 0 {
		most = mostStored
	}
	k := sort.Search(len(x.at), func(k int) bool { return x.at[k] > off }) - 1
	for len(p) > 0 {
		end := k + 1
		for off == x.at[k] && end < int(x.t.Count) && x.at[end+1]-off <= min(most, int64(len(p))) {
			end++
		}
		n := x.at[end] - off
		if off == x.at[k] && n <= int64(len(p)) {
			if err := s.readBlocks(ctx, p[:n], x, k, end); err != nil {
				return err
			}
		} else {
			b, err := s.cache.Get(ctx, x.t.First+int32(k), func() ([]byte, error) {
				whole := make([]byte, x.at[k+1]-x.at[k])
				return whole, s.readBlocks(ctx, whole, x, k, k+1)
			})
			if err != nil {
				return err
			}
			n = int64(copy(p, b.Data[off-x.at[k]:]))
			s.cache.Put(b)
		}
		p, off, k = p[n:], off+n, end
	}
	return nil
}

// readBlocks reads blocks [k, end) of a stream, and compares the checksums of their chunks. It first reads all chunks
// to the end of p, and then moves each forward to its offset.
func (s *streamSource) readBlocks(ctx context.Context, p []byte, x *storedStream, k, end int) error {
	chunks := s.ix.Chunks[x.t.First : x.t.First+x.t.Count]
	first, last := &chunks[k], &chunks[end-1]
	n := last.Off + int64(last.Stored) - first.Off
	for j := k; end > k+1 && j < end; j++ {
		to, from := x.at[j]-x.at[k]+x16Head, int64(len(p))-n+chunks[j].Off-first.Off
		if to <= from && from+int64(chunks[j].Stored) <= int64(len(p)) {
			continue
		}
		for ; k < end; k++ { // the file has these chunks in another order, or with larger gaps
			m := x.at[k+1] - x.at[k]
			if err := s.readBlocks(ctx, p[:m], x, k, k+1); err != nil {
				return err
			}
			p = p[m:]
		}
		return nil
	}
	bytes, moves := p[int64(len(p))-n:], end > k+1
	if !moves {
		bytes = p[x16Head:][:n]
	}
	if err := s.Source.ReadAt(ctx, bytes, first.Off); err != nil {
		return errs.Locate("read", s.URI(), x.t.Name, int64(k), err)
	}
	for base := x.at[k]; k < end; k++ {
		c := &chunks[k]
		block := p[x.at[k]-base : x.at[k+1]-base]
		data := block[x16Head:][:c.Stored]
		if moves {
			copy(data, bytes[c.Off-first.Off:])
		}
		if sum := crc32c.Sum(data); sum != c.Sum {
			return &errs.At{Verb: "check", Source: s.URI(), Tensor: x.t.Name, Chunk: int64(k), Offset: c.Off,
				Err: errs.NewMismatch(c.Sum, sum)}
		}
		putX16Head(block, c)
		clear(block[x16Head+len(data):])
	}
	return nil
}
