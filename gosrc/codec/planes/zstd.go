package planes

// Stores a plane as a Zstandard frame (RFC 8878).

import (
	"sync"

	"github.com/klauspost/compress/zstd"
)

// maxWindow is the size of the largest chunk, in bytes.
const maxWindow = 16 << 20

var (
	zippers = sync.Pool{New: func() any {
		// Frames have no checksum, because chunks have one.
		w, err := zstd.NewWriter(nil, zstd.WithEncoderConcurrency(1), zstd.WithEncoderCRC(false),
			zstd.WithWindowSize(maxWindow),
			zstd.WithSingleSegment(true), // frames state their size
			zstd.WithEncoderLevel(zstd.SpeedBetterCompression))
		if err != nil {
			return err
		}
		return w
	}}
	unzippers = sync.Pool{New: func() any {
		r, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(1), zstd.WithDecodeAllCapLimit(true),
			zstd.WithDecoderMaxWindow(maxWindow), zstd.WithDecoderMaxMemory(maxWindow))
		if err != nil {
			return err
		}
		return r
	}}
)

func appendFrame(dst, src []byte) []byte {
	w := zippers.Get().(*zstd.Encoder) // never an error: the options in zippers are valid
	defer zippers.Put(w)
	return w.EncodeAll(src, dst)
}

// decodeFrame fills dst with the contents of one frame, which must state its size.
func decodeFrame(dst, frame []byte) error {
	var h zstd.Header
	if err := h.Decode(frame); err != nil {
		return corruptError("invalid Zstandard frame: %v", err)
	}
	if h.Skippable || h.DictionaryID != 0 || !h.HasFCS || h.FrameContentSize != uint64(len(dst)) {
		return corruptError("expected a Zstandard frame that states %d bytes and uses no dictionary", len(dst))
	}
	// The library would also decode empty and skippable frames that follow.
	if n := frameBytes(frame, &h); n != len(frame) {
		return corruptError("a Zstandard frame ends at byte %d of %d", n, len(frame))
	}
	r := unzippers.Get().(*zstd.Decoder)
	defer unzippers.Put(r)
	content, err := r.DecodeAll(frame, dst[:0:len(dst)])
	if err != nil {
		return corruptError("invalid Zstandard frame: %v", err)
	}
	if len(content) != len(dst) || &content[0] != &dst[0] {
		return corruptError("a Zstandard frame has %d bytes, expected %d", len(content), len(dst))
	}
	return nil
}

// frameBytes returns the length of the frame with header h, computed from the headers of its blocks. It is more than
// len(p) if the frame is truncated.
func frameBytes(p []byte, h *zstd.Header) int {
	const (
		last, sizeShift = 1, 3 // fields of a block's header
		headBytes       = 3
		oneValue        = 1 // kind of a block that stores one repeated byte
		checksum        = 4
	)
	at := h.HeaderSize
	for at+headBytes <= len(p) {
		head := int(p[at]) | int(p[at+1])<<8 | int(p[at+2])<<16
		if at += headBytes; head>>1&3 == oneValue {
			at++
		} else {
			at += head >> sizeShift
		}
		if head&last != 0 {
			if h.HasCheckSum {
				at += checksum
			}
			return at
		}
	}
	return len(p) + 1
}
