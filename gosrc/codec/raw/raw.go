// Package raw is codec 0: the stored bytes are the logical bytes.
package raw

import "github.com/overwire/overwire/gosrc/errs"

// Decode copies src to dst, which must have the same length.
func Decode(dst, src []byte) error {
	if len(dst) != len(src) {
		return errs.New(errs.ErrCorrupt, "raw chunk stores %d bytes for %d", len(src), len(dst))
	}
	copy(dst, src)
	return nil
}

// Encode appends src to dst.
func Encode(dst, src []byte) []byte { return append(dst, src...) }
