package nvcomp

// Reads and writes the native stream, nvCOMP's container of chunks.

import (
	"encoding/binary"
	"hash/crc32"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/sizes"
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
