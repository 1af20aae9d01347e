package stream

// Descriptions of work on a caller's stream, and its status words.

import (
	"unsafe"

	"github.com/overwire/overwire/gosrc/device/cuda/driver"
	"github.com/overwire/overwire/gosrc/errs"
)

// Kind is how a stream's blocks are framed; the numbers are nvCOMP's.
type Kind uint32

// FormatX16 is our codec among nvCOMP's numbers of algorithms.
const FormatX16 = 'X'

// A Bitstream is one bitstream on the device and the destination of its content, which
// has exactly Size bytes, in chunks of Chunk.
type Bitstream struct {
	Src         uint64 // a multiple of 8; for X16 of 16, except raw blocks, which have 8 bytes before their first
	Stored      int64
	Dst         uint64 // X16: a multiple of 16
	Size, Chunk int64
	Kind        Kind
	Arg         uint32 // meaning depends on the codec
}

// blockCount is how many blocks a stream has; 1 if it has none.
func (s *Bitstream) blockCount() int {
	return int(max(1, (s.Size+s.Chunk-1)/s.Chunk))
}

// enoughWarps is how many warps keep a device busy if their shares are alike: on an H200
// more gain nothing, and with chunks of 64 KiB they cost 2 %.
const enoughWarps = 4096

// warpsPerChunk is how many warps share each of the chunks: as many as encoders make
// segments of the longest (codec/x16), unless there are enough warps without.
func warpsPerChunk(streams []Bitstream, rows int) int {
	var most, all int64
	for i := range streams {
		all += streams[i].Size
		most = max(most, min(streams[i].Chunk, streams[i].Size))
	}
	n := max(1, min(4, most>>14), min(1024, most>>17))
	for n > 1 && most*enoughWarps*2 <= all*n || int64(rows)*n > 1<<30 {
		n /= 2
	}
	return int(n)
}

// PackedRange is a range of device memory on its way to the host, encoded or as it is.
type PackedRange struct {
	Src       uint64
	N         int64          // bytes; encoded, at most Packer.SlotBytes
	Transform uint8          // of X16; 0: not encoded
	Hash      bool           // QueueSums makes its sums; Src is a multiple of 8
	Tail      int            // for QueueSums: bytes that end with the range; the first may lie before Src
	To        unsafe.Pointer // pinned, for QueueFetches

	// Set by Encode: the bytes that QueueFetches copies, and X16's tiles of a segment, 0 if
	// the range stays as it is.
	Stored int64
	Tiles  uint16
	at     uint64
	sums   []byte
}

// SumsAndTail are the sums of the blocks of a range, for package blocksum, and the bytes of its
// tail: valid until the slot's next use.
func (r *PackedRange) SumsAndTail() (sums, tail []byte) {
	n := len(r.sums) - r.Tail
	return r.sums[:n], r.sums[n:]
}

// A DeltaChunk is a chunk of a tensor in device memory: Bytes at Now, and for the
// encoder at Base, both multiples of the element's Width (at least 4 if that is 8). Stored
// is its delta in host memory, checked by delta.Check.
type DeltaChunk struct {
	Now, Base uint64
	Bytes     int
	Width     int
	Stored    []byte
}

// StreamInfo is what a stream says about itself. Only native streams have Chunk and
// Format.
type StreamInfo struct {
	Size, Chunk int64
	Format      uint32
	Err         error
}

// maxBlock is the longest chunk of a native stream, and the longest block of X16.
const maxBlock = 16 << 20

// statusMisplaced is the status bit of blocks that are not aligned for the GPU.
const statusMisplaced = 1 << 11

// statusTooSmall is the status bit of a stream with a destination that is too small.
const statusTooSmall = 1 << 13

// statusError explains a status word.
func statusError(w uint32) error {
	if w == 0 {
		return nil
	}
	if w&statusMisplaced != 0 && w&^statusMisplaced == 0 {
		return errs.New(errs.ErrNotSupported,
			"blocks that do not lie on multiples of 16: decode the stream without a config, or on the host")
	}
	if w == statusTooSmall {
		return errs.New(errs.ErrArgument, "the output is too small for the stream")
	}
	return errs.New(errs.ErrCorrupt, "%s", driver.StatusText(w))
}
