package stream

// This file describes streams and ranges in device memory, and explains status words.

import (
	"unsafe"

	"github.com/overwire/overwire/gosrc/device/cuda/driver"
	"github.com/overwire/overwire/gosrc/errs"
)

// Kind is the framing of a stream's blocks. Its values are those of nvCOMP.
type Kind uint32

// FormatX16 is the algorithm number of X16, next to those of nvCOMP.
const FormatX16 = 'X'

// A Bitstream is a bitstream on the device and the destination of its content. The content has exactly Size
// bytes, in chunks of Chunk bytes.
type Bitstream struct {
	Src         uint64 // a multiple of 8; for X16 a multiple of 16, or 8 less than one for raw blocks
	Stored      int64
	Dst         uint64 // for X16 a multiple of 16
	Size, Chunk int64
	Kind        Kind
	Arg         uint32 // meaning depends on the codec
}

// blockCount returns the number of a stream's blocks, at least 1.
func (s *Bitstream) blockCount() int {
	return int(max(1, (s.Size+s.Chunk-1)/s.Chunk))
}

// enoughWarps is the number of warps with equal work that keep a device busy. On an H200, more warps were not faster,
// and with chunks of 64 KiB they were 2 % slower.
const enoughWarps = 4096

// warpsPerChunk returns how many warps share each chunk. If there would otherwise be too few warps, it is the number
// of segments that encoders make of the longest chunk (codec/x16).
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

// PackedRange is a range of device memory that is copied to the host, encoded or unchanged.
type PackedRange struct {
	Src       uint64
	N         int64          // bytes; if encoded, at most Packer.SlotBytes
	Transform uint8          // X16 transform; 0 means not encoded
	Hash      bool           // compute sums in QueueSums; Src must be a multiple of 8
	Tail      int            // for QueueSums: number of bytes before the end of the range; may begin before Src
	To        unsafe.Pointer // pinned destination of QueueFetches

	// Set by Encode: the number of bytes that QueueFetches copies, and the tiles of an X16 segment, or 0 if the range
	// is unchanged.
	Stored int64
	Tiles  uint16
	at     uint64
	sums   []byte
}

// SumsAndTail returns the sums of the range's blocks, for package blocksum, and the bytes of its tail. They are
// valid until the slot is used again.
func (r *PackedRange) SumsAndTail() (sums, tail []byte) {
	n := len(r.sums) - r.Tail
	return r.sums[:n], r.sums[n:]
}

// A DeltaChunk is a chunk of a tensor in device memory. It has Bytes bytes at Now and, for the encoder, at Base. Both
// addresses must be multiples of the element's Width, or of 4 if Width is 8. Stored is the delta in host memory, which
// delta.Check has checked.
type DeltaChunk struct {
	Now, Base uint64
	Bytes     int
	Width     int
	Stored    []byte
}

// StreamInfo is the result of Peek for a stream. Only native streams set Chunk and Format.
type StreamInfo struct {
	Size, Chunk int64
	Format      uint32
	Err         error
}

// maxBlock is the maximum size of a chunk of a native stream, and of an X16 block.
const maxBlock = 16 << 20

// statusMisplaced is the status bit for blocks that are not aligned for the GPU.
const statusMisplaced = 1 << 11

// statusTooSmall is the status bit for a stream with too small a destination.
const statusTooSmall = 1 << 13

// statusError converts a status word to an error.
func statusError(w uint32) error {
	if w == 0 {
		return nil
	}
	if w&statusMisplaced != 0 && w&^statusMisplaced == 0 {
		return errs.New(errs.ErrNotSupported,
			"blocks are not at multiples of 16: decode the stream without a config, or on the host")
	}
	if w == statusTooSmall {
		return errs.New(errs.ErrArgument, "the output is too small for the stream")
	}
	return errs.New(errs.ErrCorrupt, "%s", driver.StatusText(w))
}
