// Package snappy implements Snappy's block format: a varint with the content's length, then literals and copies.
// Other writers are libsnappy and nvCOMP. Like libsnappy and the GPU decoder, it refuses the S2 extensions, although
// the underlying library decodes them.
package snappy

import (
	"encoding/binary"
	"slices"

	"github.com/klauspost/compress/snappy"

	"github.com/overwire/overwire/gosrc/errs"
)

// Bound returns the maximum number of bytes that Encode appends for n bytes, or -1 if n is too large for the format.
func Bound(n int) int { return snappy.MaxEncodedLen(n) }

// Encode appends the block of src to dst. It is safe for concurrent use.
func Encode(dst, src []byte) ([]byte, error) {
	n := Bound(len(src))
	if n < 0 {
		return dst, errs.New(errs.ErrArgument, "Snappy cannot encode %d bytes", len(src))
	}
	dst = slices.Grow(dst, n)
	block := snappy.Encode(dst[len(dst):len(dst)+n], src)
	return dst[:len(dst)+len(block)], nil
}

// Size returns the number of bytes that the block decodes to. A block that is truncated, refers to bytes before its
// start, or states a wrong length gives errs.ErrCorrupt.
func Size(src []byte) (int64, error) {
	size, at := binary.Uvarint(src)
	if at <= 0 || size > 1<<32-1 {
		return 0, errs.New(errs.ErrCorrupt, "the Snappy block has no valid length")
	}
	var out int64
	for at < len(src) {
		tag := src[at]
		at++
		var extra int
		if tag&3 == 0 {
			extra = max(0, int(tag>>2)-59)
		} else {
			extra = [4]int{0, 1, 2, 4}[tag&3]
		}
		if extra > len(src)-at {
			return 0, errs.New(errs.ErrCorrupt, "Snappy element at %d is truncated", at-1)
		}
		var v int64
		for i := extra - 1; i >= 0; i-- {
			v = v<<8 | int64(src[at+i])
		}
		at += extra
		n := int64(tag>>2) + 1
		switch tag & 3 {
		case 0:
			if extra > 0 {
				n = v + 1
			}
			if n > int64(len(src)-at) {
				return 0, errs.New(errs.ErrCorrupt, "Snappy literals at %d run past the end", at)
			}
			at += int(n)
			out += n
			continue
		case 1:
			v |= int64(tag>>5) << 8
			n = int64(tag>>2&7) + 4
		}
		if v == 0 || v > out {
			return 0, errs.New(errs.ErrCorrupt, "Snappy offset %d at %d is invalid after %d bytes", v, at, out)
		}
		out += n
	}
	if out != int64(size) {
		return 0, errs.New(errs.ErrCorrupt, "the Snappy block states %d bytes, but has %d", size, out)
	}
	return out, nil
}

// Decode fills dst, which must have the length of the content. A different length or an invalid block gives
// errs.ErrCorrupt. It never writes outside dst. It is safe for concurrent use.
func Decode(dst, src []byte) error {
	n, err := Size(src)
	if err != nil {
		return err
	}
	if n != int64(len(dst)) {
		return errs.New(errs.ErrCorrupt, "the Snappy block states %d bytes, expected %d", n, len(dst))
	}
	out, err := snappy.Decode(dst, src)
	if err != nil || len(out) != len(dst) || len(out) > 0 && &out[0] != &dst[0] {
		return errs.New(errs.ErrCorrupt, "Snappy: %v", err)
	}
	return nil
}
