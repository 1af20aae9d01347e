// Package lz4 implements LZ4's block format: sequences of a token, literals, a two-byte offset and a match. The last
// sequence has only literals. A block does not store the length of its content; Size computes it. Other writers are
// liblz4, numcodecs and nvCOMP.
package lz4

import (
	"slices"
	"sync"

	"github.com/pierrec/lz4/v4"

	"github.com/overwire/overwire/gosrc/errs"
)

var compressors = sync.Pool{New: func() any { return new(lz4.Compressor) }}

// Bound returns the maximum number of bytes that Encode appends for n bytes.
func Bound(n int) int { return lz4.CompressBlockBound(n) }

// Encode appends the block of src to dst. It is safe for concurrent use.
func Encode(dst, src []byte) ([]byte, error) {
	if len(src) == 0 {
		return append(dst, 0), nil // the library omits the token of an empty block
	}
	n := Bound(len(src))
	dst = slices.Grow(dst, n)
	c := compressors.Get().(*lz4.Compressor)
	defer compressors.Put(c)
	size, err := c.CompressBlock(src, dst[len(dst):len(dst)+n])
	if err != nil || size == 0 {
		return dst, errs.New(errs.ErrEngine, "LZ4: cannot encode %d bytes: %v", len(src), err)
	}
	return dst[:len(dst)+size], nil
}

// Size returns the number of bytes that the block decodes to. A block that is truncated or refers to bytes before its
// start gives errs.ErrCorrupt.
func Size(src []byte) (int64, error) {
	n, _, err := walkBlock(src)
	return n, err
}

// walkBlock walks the sequences of a block. It returns the length of its content and the offset of its last token.
func walkBlock(src []byte) (out int64, last int, err error) {
	for at := 0; ; {
		if at >= len(src) {
			return 0, 0, errs.New(errs.ErrCorrupt, "the LZ4 block ends before its last literals")
		}
		last = at
		token := src[at]
		at++
		n, next, ok := readLength(src, at, int(token>>4))
		if !ok || n > int64(len(src)-next) {
			return 0, 0, errs.New(errs.ErrCorrupt, "LZ4 literals at %d run past the end", at)
		}
		out += n
		at = next + int(n)
		if at == len(src) {
			return out, last, nil
		}
		if len(src)-at < 2 {
			return 0, 0, errs.New(errs.ErrCorrupt, "LZ4 offset at %d is truncated", at)
		}
		back := int64(src[at]) | int64(src[at+1])<<8
		if back == 0 || back > out {
			return 0, 0, errs.New(errs.ErrCorrupt, "LZ4 offset %d at %d is invalid after %d bytes", back, at, out)
		}
		if n, at, ok = readLength(src, at+2, int(token&15)); !ok {
			return 0, 0, errs.New(errs.ErrCorrupt, "LZ4 match length is truncated")
		}
		out += n + 4
	}
}

// readLength reads the rest of a length that starts with the four bits n.
func readLength(src []byte, at, n int) (int64, int, bool) {
	total := int64(n)
	if n < 15 {
		return total, at, true
	}
	for ; at < len(src); at++ {
		total += int64(src[at])
		if src[at] != 255 {
			return total, at + 1, true
		}
	}
	return 0, at, false
}

// Decode fills dst, which must have the length of the content. A different length or an invalid block gives
// errs.ErrCorrupt. It never writes outside dst. It is safe for concurrent use.
func Decode(dst, src []byte) error {
	if len(dst) == 0 {
		// A valid block has a single sequence without literals.
		if n, err := Size(src); err == nil && n == 0 {
			return nil
		}
		return errs.New(errs.ErrCorrupt, "the LZ4 block of %d bytes does not have empty content", len(src))
	}
	n, err := lz4.UncompressBlock(src, dst)
	if err != nil {
		// The last sequence has no match, so the match length in its token is meaningless (lz4_Block_format.md). The
		// library refuses nonzero bits there.
		if _, at, bad := walkBlock(src); bad == nil && src[at]&15 != 0 {
			own := slices.Clone(src)
			own[at] &^= 15
			n, err = lz4.UncompressBlock(own, dst)
		}
	}
	if err != nil {
		return errs.New(errs.ErrCorrupt, "LZ4: %v", err)
	}
	if n != len(dst) {
		return errs.New(errs.ErrCorrupt, "the LZ4 block has %d bytes, expected %d", n, len(dst))
	}
	return nil
}
