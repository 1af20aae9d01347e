package tensorizer

// This file verifies bytes that no hash covers.

import (
	"context"
	"math"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/source"
)

// Exact checks the bytes that no reader needs, but that every writer writes. It checks that there is nothing between
// head, index, records and end, that unused bytes are zero, and that repeated values agree. Together with the
// tensors' hashes, this verifies every byte of a file. The only exception is the key derivation's parameters if a
// file is read with a key instead of a password. The records of the file must have been read.
func Exact(ctx context.Context, f *File, src source.Source) error {
	bad := func(name string, off int64, format string, args ...any) error {
		return f.at(name, off, errs.New(errs.ErrCorrupt, format, args...))
	}
	zeros := func(p []byte, off int64) error {
		for i, b := range p {
			if b != 0 {
				return bad("", off+int64(i), "an unused byte is %#x, expected 0", b)
			}
		}
		return nil
	}
	if f.Version < 4 {
		if err := zeros(f.head[9:41], 9); err != nil {
			return err
		}
	}
	if err := zeros(f.head[49:57], 49); err != nil {
		return err
	}
	next := headSize + int64(le.Uint64(f.head[65:]))
	if err := zeros(f.rest, next-int64(len(f.rest))); err != nil {
		return err
	}
	total, version := int64(0), uint32(1)
	for i := range f.Entries {
		e, r := &f.Entries[i], &f.Records[i]
		if e.Record != next {
			return bad(e.Name, e.Record, "the record begins at %d, expected %d", e.Record, next)
		}
		if c := r.Crypt; c != nil && len(c.MACs) == 1 && c.Said != 0 && c.Said != ChunkBytes {
			return bad(e.Name, e.Record, "the box has %d bytes, but the record says chunks of %d bytes",
				e.Bytes, c.Said)
		}
		it := Item{Text: e.Text, Dims: e.Dims, Bytes: e.Bytes, Sealed: f.Encrypted}
		version = max(version, it.Version())
		next = e.Data + e.Bytes
		total += e.Bytes
	}
	switch {
	case total != f.Total:
		return bad("", 41, "the head says %d bytes of data, but the index says %d", f.Total, total)
	case f.Version < version:
		return bad("", 5, "the file says version %d, but uses features of version %d", f.Version, version)
	case f.Size-next > math.MaxUint16:
		return bad("", next, "the file has %d bytes after the last tensor", f.Size-next)
	}
	tail := make([]byte, f.Size-next)
	if err := src.ReadAt(ctx, tail, next); err != nil {
		return err
	}
	return zeros(tail, next)
}
