package stream

// This file describes work on a caller's stream, and explains status words.

import (
	"unsafe"

	"github.com/overwire/overwire/gosrc/device/cuda/driver"
	"github.com/overwire/overwire/gosrc/errs"
)

// Kind is how a stream's blocks are framed. The numbers are nvCOMP's.
type Kind uint32

// FormatX16 is the number of our codec among nvCOMP's algorithms.
const FormatX16 = 'X'

// A Bitstream is one bitstream on the device and the destination of its content. The content has exactly Size
// bytes, in chunks of Chunk.
type Bitstream struct {
	Src         uint64 // a multiple of 8; for X16 of 16, except raw blocks, which have 8 bytes before the first one
	Stored      int64
	Dst         uint64 // X16: a multiple of 16
	Size, Chunk int64
	Kind        Kind
	Arg         uint32 // meaning depends on the codec
}

// blockCount is the number of a stream's blocks, at least 1.
func (s *Bitstream) blockCount() int {
	return int(max(1, (s.Size+s.Chunk-1)/s.Chunk))
}

// enoughWarps is how many warps keep a device busy if they have equal work. On an H200 more warps gain nothing,
// and with chunks of 64 KiB they cost 2 %.
const enoughWarps = 4096

// warpsPerChunk is how many warps share each chunk. If there would be too few warps otherwise, it is the number
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

// PackedRange is a range of device memory on its way to the host, encoded or unchanged.
type PackedRange struct {
	Src       uint64
	N         int64          // bytes; if encoded, at most Packer.SlotBytes
	Transform uint8          // of X16; 0 means not encoded
	Hash      bool           // QueueSums computes its sums; Src is a multiple of 8
	Tail      int            // for QueueSums: number of bytes up to the end of the range; the first may be before Src
	To        unsafe.Pointer // pinned, for QueueFetches

	// Set by Encode: the bytes that QueueFetches copies, and X16's tiles of a segment, 0 if the range is
	// unchanged.
	Stored int64
	Tiles  uint16
	at     uint64
	sums   []byte
}

// SumsAndTail returns the sums of the range's blocks, for package blocksum, and the bytes of its tail. They are
// valid until the slot's next use.
func (r *PackedRange) SumsAndTail() (sums, tail []byte) {
	n := len(r.sums) - r.Tail
	return r.sums[:n], r.sums[n:]
}

// A DeltaChunk is a chunk of a tensor in device memory. It has Bytes bytes at Now, and for the encoder at Base.
// Both addresses are multiples of the element's Width (of at least 4 if that is 8). Stored is its delta in host
// memory, checked by delta.Check.
type DeltaChunk struct {
	Now, Base uint64
	Bytes     int
	Width     int
	Stored    []byte
}

// StreamInfo is what a stream says about itself. Only native streams set Chunk and Format.
type StreamInfo struct {
	Size, Chunk int64
	Format      uint32
	Err         error
}

// maxBlock is the longest chunk of a native stream and the longest block of X16.
const maxBlock = 16 << 20

// statusMisplaced is the status bit for blocks that are not aligned for the GPU.
const statusMisplaced = 1 << 11

// statusTooSmall is the status bit for a stream with a destination that is too small.
const statusTooSmall = 1 << 13

// statusError explains a status word.
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
