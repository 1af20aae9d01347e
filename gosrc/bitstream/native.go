package bitstream

import (
	"encoding/binary"

	"github.com/overwire/overwire/gosrc/fault"
	"github.com/overwire/overwire/gosrc/internal/sizes"
)

// The Native container: a common header, the algorithm's own header, padding
// to 8, u64 offset of each chunk in the payload, u64 stored size of each chunk,
// the payload with every chunk at a multiple of 8. What is read are tables that
// end where the payload begins, so that the algorithm's header may have any
// length; nvCOMP counts from the front, so that what is written has the very
// lengths of its public headers (formatSpec.hpp). All is little-endian. Both
// versions were read off streams that nvCOMP's own CPU library wrote:
//
//	          5.x   6.x
//	bytes      64    56
//	u32         0     0  magic: 0x52911326, 0x52911327
//	u8        4, 5  4, 5  major and minor version of the writer
//	u8          6     6  format
//	u64         8     8  payload bytes
//	u64        16    16  content bytes
//	u64        24    24  chunks
//	u64        48    32  content bytes of a chunk
//	u32        56    40  offset of the payload
//	u8         32    52  offsets of chunks are there
//	u8     44, 45 53, 54  checksums of stored chunks, of contents are there
//	u32     ?      48  checksum of what stands before the payload, with them
//
// nvCOMP 5 refuses streams of 6, and 6 those of 5. Read are both, written is
// the one that the Spec asks for. Read besides are those of the last open
// release, 2.2, whose magic is 0 (and what follows it, to 4): 5.x's header,
// tables counted from the front, two checksums a chunk behind them whether they
// were computed or not, and chunks without gaps.
//
// Checksums are u32 for each stored chunk and then for each content, behind the
// table of sizes. Version 6's are computed as sums.go says. Those of nvCOMP 5
// are not known; in streams of version 5 of ours they are CRC-32 (IEEE), and
// such a stream has 'w' at 7, where nvCOMP has zero. So did ours of version 6
// once, which are read.
const (
	headBytes = 64
	magic2    = 0
	magic5    = 0x52911326
	magic6    = 0x52911327
)

// mark, at markAt, is that of checksums of ours.
const (
	markAt = 7
	mark   = 'w'
)

// header is what both versions say.
type header struct {
	format                 Algorithm
	payload, size, chunks  uint64
	chunk                  uint64
	offset                 uint32
	starts, stored, conten bool
	mine                   bool
	version                int  // 5, also for 2.2, or 6
	old                    bool // 2.2
}

func parseHeader(src []byte) (h header, err error) {
	if len(src) < headBytes {
		return h, fault.New(fault.ErrFormat, "%d bytes are no native stream", len(src))
	}
	le := binary.LittleEndian
	h = header{
		format: Algorithm(src[6]), payload: le.Uint64(src[8:]), size: le.Uint64(src[16:]), chunks: le.Uint64(src[24:]),
	}
	switch magic := le.Uint32(src); magic {
	case magic5, magic2:
		h.version = 5
		if h.old = magic == magic2; h.old && (src[4] < 2 || src[4] > 4) {
			return h, fault.New(fault.ErrFormat, "no native stream: it begins with zeros")
		}
		h.chunk, h.offset = le.Uint64(src[48:]), le.Uint32(src[56:])
		h.starts, h.stored, h.conten = src[32] != 0, src[44] != 0, src[45] != 0
	case magic6:
		h.version = 6
		h.chunk, h.offset = le.Uint64(src[32:]), le.Uint32(src[40:])
		h.starts, h.stored, h.conten = src[52] != 0, src[53] != 0, src[54] != 0
	default:
		return h, fault.New(fault.ErrFormat, "no native stream: it begins with %#x", magic)
	}
	h.mine = src[markAt] == mark
	return h, nil
}

func parseNative(src []byte, s *Spec, want *algorithm) (layout, error) {
	bad := func(format string, args ...any) (layout, error) {
		return layout{}, fault.New(fault.ErrCorrupt, "native stream: "+format, args...)
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
		return layout{}, fault.New(fault.ErrArgument, "the stream is %s, not %s", algo.name, want.name)
	}
	n := len(src)
	switch {
	case h.size > 1<<62 || h.chunk > 1<<40:
		return bad("%d bytes in chunks of %d", h.size, h.chunk)
	case uint64(h.offset) > uint64(n) || h.payload > uint64(n)-uint64(h.offset):
		return bad("%d bytes at %d of %d", h.payload, h.offset, n)
	case h.size == 0:
		return layout{algo: algo, damaged: s.Verify != VerifyNever && h.damaged(src)}, nil
	case h.chunk == 0 || sizes.CeilDiv(h.size, h.chunk) != h.chunks:
		return bad("%d chunks of %d bytes for %d", h.chunks, h.chunk, h.size)
	case !h.starts:
		return layout{}, fault.New(fault.ErrNotSupported, "a native stream without the offsets of its chunks")
	}
	if algo.shuffled(src, h.version) {
		return layout{}, fault.New(fault.ErrNotSupported, "a native stream of %s whose bits are shuffled", algo.name)
	}
	row := uint64(16)
	if h.stored {
		row += 4
	}
	if h.conten {
		row += 4
	}
	if h.chunks > uint64(n)/row || headBytes+h.chunks*row > uint64(h.offset) {
		return bad("%d chunks do not fit before the payload at %d", h.chunks, h.offset)
	}
	le := binary.LittleEndian
	count := int(h.chunks)
	tables := (int(h.offset) - count*int(row)) &^ 7
	if h.old {
		if tables = int(algo.firstTable(5)); tables+16*count > int(h.offset) {
			return bad("%d chunks do not fit before the payload at %d", h.chunks, h.offset)
		}
	}
	offsets, sizes := src[tables:], src[tables+8*count:]
	sums, payload := src[tables+16*count:], src[h.offset:uint64(h.offset)+h.payload]
	out := layout{algo: algo, size: int64(h.size), parts: make([]part, count), sums: h.sums()}
	var stored uint64
	for i := range out.parts {
		off, size := le.Uint64(offsets[8*i:]), le.Uint64(sizes[8*i:])
		if off > h.payload || size > h.payload-off {
			return bad("chunk %d has %d bytes at %d of %d", i, size, off, h.payload)
		}
		if stored += size; stored > h.payload {
			return bad("its chunks overlap")
		}
		p := part{src: payload[off : off+size], at: int64(uint64(i) * h.chunk), from: int64(uint64(h.offset) + off)}
		p.n = min(int64(h.chunk), out.size-p.at)
		if out.sums != sumNone {
			p.stored, p.contents = le.Uint32(sums[4*i:]), le.Uint32(sums[4*(count+i):])
		}
		if err := algo.possible(p.src, p.n); err != nil {
			return layout{}, &fault.At{Verb: "decode", Chunk: int64(i), Offset: int64(uint64(h.offset) + off), Err: err}
		}
		out.parts[i] = p
	}
	switch {
	case s.Verify == VerifyNever:
	case out.sums == sumLanes:
		out.damaged = h.damaged(src)
	case out.sums == sumNone && (h.stored || h.conten):
		return layout{}, fault.New(fault.ErrNotSupported,
			"the stream has checksums of an nvCOMP before 6, which are not known: decode without verifying them")
	case out.sums == sumNone && s.Verify == VerifyAlways:
		return layout{}, fault.New(fault.ErrArgument, "the stream has no checksums to verify")
	}
	return out, nil
}

// sums is what the checksums are that the header speaks of.
func (h *header) sums() sumKind {
	switch {
	case !h.stored || !h.conten || h.old:
		return sumNone
	case h.mine:
		return sumCRC
	case h.version == 6:
		return sumLanes
	}
	return sumNone
}

// damaged says whether the header has a checksum that is not its own.
func (h *header) damaged(src []byte) bool {
	return h.sums() == sumLanes && h.offset >= headBytes-8 && h.offset <= headKnown &&
		headSum(src[:h.offset]) != binary.LittleEndian.Uint32(src[headSumAt:])
}

// own is the bytes of an algorithm's own header, by nvCOMP's version.
func (a *algorithm) own(version int) int64 {
	switch a.id {
	case Cascaded:
		return [2]int64{24, 40}[version-5]
	case LZ4:
		return [2]int64{4, 12}[version-5]
	case X16:
		return [2]int64{8, 16}[version-5]
	}
	return 4 // or 8 with version 6, which comes to the same place
}

// firstTable is where a stream has its tables, X16 perhaps 8 later.
func (a *algorithm) firstTable(version int) int64 {
	if version == 5 {
		return (headBytes + a.own(5) + 7) &^ 7
	}
	return (headBytes - 8 + a.own(6) + 7) &^ 7
}

// shuffled reports whether nvCOMP says, in the algorithm's own header, that it
// did to the content what cannot be undone here: the bytes would be others.
func (a *algorithm) shuffled(src []byte, version int) bool {
	le := binary.LittleEndian
	switch {
	case a.id == LZ4 && version == 6:
		return le.Uint32(src[60:]) != 0
	case a.id == LZ4: // one byte is the type
		return len(src) >= 68 && le.Uint32(src[64:]) > 0xFF
	case a.id == Cascaded && version == 5:
		return len(src) >= 88 && (le.Uint32(src[72:]) > 0xFF || le.Uint32(src[84:]) > 1)
	}
	return false
}

// putOwn writes an algorithm's own header.
func (a *algorithm) putOwn(p []byte, version int, s *Spec) {
	le := binary.LittleEndian
	switch a.id {
	case Deflate, GDeflate:
		le.PutUint32(p, uint32(s.Level))
	case Gzip:
		p[0] = byte(s.Level)
	case Cascaded:
		c := s.Cascaded
		pack := uint32(0)
		if c.Pack {
			pack = 1
		}
		words := []uint32{4096, 0, uint32(c.Type), uint32(c.RLEs), uint32(c.Deltas), pack}
		if version == 6 { // type, asymmetric, packed; encodings by differences 1, runs 2 and above the smallest 4; level
			words = []uint32{uint32(c.Type), 1, 1, 0, 0, 0, uint32(min(c.Deltas, 1) + 2*min(c.RLEs, 1) + 4), 0, uint32(c.Level())}
		}
		for i, w := range words {
			le.PutUint32(p[4*i:], w)
		}
	}
}

// nativeTables is the offset of the payload for n chunks. Behind the head of an
// X16 block lies what a GPU reads on multiples of 16: its payload begins 8
// before one, and so do its chunks.
func nativeTables(algo *algorithm, version int, chunks int64, sums bool) int64 {
	row := int64(16)
	if sums {
		row += 8
	}
	n := algo.firstTable(version) + chunks*row
	if algo.id == X16 && n%16 == 0 {
		n += 8
	}
	return n
}

// padded is the room of a stored chunk in a payload.
func (a *algorithm) padded(n int64) int64 {
	if a.id == X16 {
		return (n + 15) &^ 15
	}
	return (n + 7) &^ 7
}

// putNative writes header and tables into dst, which has nativeTables bytes
// of zeros, for chunks of these stored parts and sums. It returns where each
// chunk goes, and the length of it all.
func putNative(dst []byte, s *Spec, algo *algorithm, size int64, stored [][]byte, sums [][2]uint32) (at []int64, total int64) {
	le := binary.LittleEndian
	head := int64(len(dst))
	row := 16
	if sums != nil {
		row = 24
	}
	tables := dst[len(dst)-row*len(stored):]
	at = make([]int64, len(stored))
	var off int64
	for i, part := range stored {
		at[i] = head + off
		le.PutUint64(tables[8*i:], uint64(off))
		le.PutUint64(tables[8*(len(stored)+i):], uint64(len(part)))
		if sums != nil {
			row := tables[16*len(stored):]
			le.PutUint32(row[4*i:], sums[i][0])
			le.PutUint32(row[4*(len(stored)+i):], sums[i][1])
		}
		off += algo.padded(int64(len(part)))
	}
	le.PutUint64(dst[8:], uint64(off))
	le.PutUint64(dst[16:], uint64(size))
	le.PutUint64(dst[24:], uint64(len(stored)))
	dst[6] = byte(algo.id)
	if s.Version == 5 {
		algo.putOwn(dst[headBytes:], 5, s)
		le.PutUint32(dst, magic5)
		dst[4], dst[5] = 5, 3
		le.PutUint64(dst[48:], uint64(s.Chunk))
		le.PutUint32(dst[56:], uint32(head))
		dst[32] = 1
		if sums != nil {
			dst[44], dst[45], dst[markAt] = 1, 1, mark
		}
	} else {
		algo.putOwn(dst[headBytes-8:], 6, s)
		le.PutUint32(dst, magic6)
		dst[4] = 6
		le.PutUint64(dst[32:], uint64(s.Chunk))
		le.PutUint32(dst[40:], uint32(head))
		dst[52] = 1
		if sums != nil {
			dst[53], dst[54] = 1, 1
			le.PutUint32(dst[headSumAt:], headSum(dst))
		}
	}
	return at, head + off
}
