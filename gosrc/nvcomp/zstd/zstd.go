// Package zstd implements Zstandard: one or more frames (RFC 8878) without dictionaries. Other writers are libzstd
// and nvCOMP.
package zstd

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"math/bits"
	"slices"
	"sync"

	"github.com/klauspost/compress/zstd"

	"github.com/overwire/overwire/gosrc/errs"
)

// maxBlock is the maximum number of bytes that one block decodes to (RFC 8878, 3.1.1.2.4).
const maxBlock = 128 << 10

// maxWindow is the largest window that is accepted. It is libzstd's default limit.
const (
	maxWindowLog = 27
	maxWindow    = 1 << maxWindowLog
)

var (
	encoders = sync.Pool{New: func() any {
		// Frames have no CRC, because containers have checksums. All literals are entropy-coded, because weights have
		// few matches but compress with entropy coding.
		e, _ := zstd.NewWriter(nil, zstd.WithEncoderConcurrency(1), zstd.WithZeroFrames(true),
			zstd.WithEncoderCRC(false),
			zstd.WithAllLitEntropyCompression(true)) // fails only for invalid options
		return e
	}}
	decoders = sync.Pool{New: func() any {
		d, _ := zstd.NewReader(nil, zstd.WithDecoderConcurrency(1), zstd.WithDecodeAllCapLimit(true),
			zstd.WithDecoderMaxWindow(maxWindow))
		return d
	}}
)

// Bound returns the maximum number of bytes that Encode appends for n bytes.
func Bound(n int) int { return n + 3*(n/maxBlock+1) + 18 }

// Encode appends src to dst as one frame, which states the content's length. It is safe for concurrent use.
func Encode(dst, src []byte) ([]byte, error) {
	e := encoders.Get().(*zstd.Encoder)
	defer encoders.Put(e)
	return e.EncodeAll(src, dst), nil
}

// Size returns the number of bytes that the frames decode to. It refuses a stated length that a frame's blocks cannot
// decode to. It decodes frames that state no length and discards the output. Errors are errs.ErrCorrupt.
func Size(src []byte) (int64, error) {
	var total int64
	frames := 0
	for at := 0; at < len(src); {
		var h zstd.Header
		if err := h.Decode(src[at:]); err != nil {
			return 0, errs.New(errs.ErrCorrupt, "Zstandard frame at %d: %v", at, err)
		}
		start := at
		at += h.HeaderSize
		if h.Skippable {
			if int64(h.SkippableSize) > int64(len(src)-at) {
				return 0, errs.New(errs.ErrCorrupt, "Zstandard frame at %d is truncated", start)
			}
			at += int(h.SkippableSize)
			continue
		}
		frames++
		if h.DictionaryID != 0 {
			return 0, errs.New(errs.ErrNotSupported, "Zstandard frame at %d needs a dictionary", start)
		}
		most, end, err := walkBlocks(src, at)
		if err != nil {
			return 0, err
		}
		at = end
		if h.HasCheckSum {
			at += 4
		}
		if at > len(src) {
			return 0, errs.New(errs.ErrCorrupt, "Zstandard frame at %d is truncated", start)
		}
		n := int64(h.FrameContentSize)
		if !h.HasFCS {
			if n, err = countFrame(src[start:at], most); err != nil {
				return 0, err
			}
		}
		if n < 0 || n > most {
			return 0, errs.New(errs.ErrCorrupt, "Zstandard frame at %d states %d bytes, but its blocks have at most %d",
				start, n, most)
		}
		total += n
	}
	if frames == 0 {
		return 0, errs.New(errs.ErrCorrupt, "no Zstandard frame found in %d bytes", len(src))
	}
	return total, nil
}

// walkBlocks walks the blocks of a frame. It returns the maximum number of bytes they can decode to and the frame's
// end.
func walkBlocks(src []byte, at int) (most int64, end int, err error) {
	for {
		if len(src)-at < 3 {
			return 0, 0, errs.New(errs.ErrCorrupt, "Zstandard block at %d is truncated", at)
		}
		h := uint32(src[at]) | uint32(binary.LittleEndian.Uint16(src[at+1:]))<<8
		n := int(h >> 3)
		at += 3
		if n > maxBlock { // without this limit, a few bytes could claim megabytes
			return 0, 0, errs.New(errs.ErrCorrupt, "Zstandard block at %d has %d bytes, expected at most %d",
				at-3, n, maxBlock)
		}
		switch h >> 1 & 3 {
		case 0: // raw
			most += int64(n)
		case 1: // a repeated byte
			most += int64(n)
			n = 1
		case 2:
			most += maxBlock
		default:
			return 0, 0, errs.New(errs.ErrCorrupt, "Zstandard block at %d has an unknown kind", at-3)
		}
		if n > len(src)-at {
			return 0, 0, errs.New(errs.ErrCorrupt, "Zstandard block at %d is truncated", at-3)
		}
		at += n
		if h&1 != 0 {
			return most, at, nil
		}
	}
}

// countFrame counts the bytes of one frame, at most `most`. The library allocates and clears memory for the window
// that the frame declares, and a frame of nine bytes may declare 128 MiB. A window larger than the content makes no
// difference, so countFrame reduces it.
func countFrame(frame []byte, most int64) (int64, error) {
	const at = 5 // offset of the window descriptor v of a frame without a size: 2^(10 + v/8), plus eighths
	if v := byte(bits.Len64(uint64(max(most, 1<<10)-1))-10) << 3; v < frame[at] && frame[at] <= (maxWindowLog-10)<<3 {
		frame = slices.Clone(frame)
		frame[at] = v
	}
	d, err := zstd.NewReader(bytes.NewReader(frame), zstd.WithDecoderConcurrency(1), zstd.WithDecoderLowmem(true),
		zstd.WithDecoderMaxWindow(maxWindow))
	if err != nil {
		return 0, errs.New(errs.ErrCorrupt, "Zstandard: %v", err)
	}
	defer d.Close()
	n, err := io.Copy(io.Discard, d)
	if err != nil {
		return 0, corruptError(err)
	}
	return n, nil
}

func corruptError(err error) error {
	if errors.Is(err, zstd.ErrWindowSizeExceeded) {
		return errs.New(errs.ErrNotSupported, "Zstandard: the window is larger than %d bytes", maxWindow)
	}
	return errs.New(errs.ErrCorrupt, "Zstandard: %v", err)
}

// Decode fills dst, which must have the length of the content. A different length or an invalid frame gives
// errs.ErrCorrupt. It never writes outside dst. It is safe for concurrent use.
func Decode(dst, src []byte) error {
	d := decoders.Get().(*zstd.Decoder)
	defer decoders.Put(d)
	out, err := d.DecodeAll(src, dst[:0:len(dst)])
	if err != nil {
		return corruptError(err)
	}
	if len(out) != len(dst) || len(src) == 0 {
		return errs.New(errs.ErrCorrupt, "Zstandard frames have %d bytes, expected %d", len(out), len(dst))
	}
	if len(out) > 0 && &out[0] != &dst[0] {
		copy(dst, out)
	}
	return nil
}
