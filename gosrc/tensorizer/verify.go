package tensorizer

// This file verifies files by their hashes, and bytes that no hash covers.

import (
	"bytes"
	"context"
	"math"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/tensor"
)

// A Proof holds the options of Verify.
type Proof struct {
	Workers int
	InOrder bool // whether to read the tensors in file order
	// Passed is called with the number of bytes in each piece that was read, and Proven with the size of each
	// verified tensor. Both are called concurrently.
	Passed, Proven func(bytes int64)
}

// Verify verifies a file. src is the result of SourceOf for it. Verify checks that every record matches its index
// entry, that every tensor matches its hashes, that encrypted boxes match their MACs, and that the file contains
// nothing else. It stops at the first error.
func Verify(ctx context.Context, src source.Source, p Proof) error {
	f, err := Open(ctx, src, true)
	if err != nil {
		return err
	}
	if err := Exact(ctx, f, src); err != nil {
		return err
	}
	flows := make([]Flow, len(f.Entries))
	for i := range f.Entries {
		flows[i] = proofFlow(f, src, i, p)
	}
	return Run(ctx, "tensorizer.verify", p.Workers, p.InOrder, flows)
}

// proofFlow returns the flow that verifies tensor i.
func proofFlow(f *File, src source.Source, i int, p Proof) Flow {
	e, r := &f.Entries[i], &f.Records[i]
	bad := func(class error, format string, args ...any) error {
		return errs.Place("verify", f.URI, e.Name, e.Record, errs.New(class, format, args...))
	}
	sum := NewSummer(r.Prefix)
	flow := Flow{Sum: sum, Bytes: e.Bytes}
	if r.Crypt != nil && r.Crypt.Chunk <= tensor.MaxChunkBytes {
		flow.Step = r.Crypt.Chunk // whole boxes
	}
	flow.Next = func(ctx context.Context, buf []byte, off int64) ([]byte, error) {
		return buf, errs.Locate("verify", f.URI, e.Name, -1, src.ReadAt(ctx, buf, e.Data+off))
	}
	flow.Pass = func(b []byte) error {
		p.Passed(int64(len(b)))
		return nil
	}
	flow.Done = func() error {
		crc, sha := sum.Sums()
		switch {
		case r.CRC32 == nil && r.SHA256 == nil:
			return bad(errs.ErrNotSupported, "the file has no hash for this tensor")
		case r.CRC32 != nil && !bytes.Equal(crc, r.CRC32):
			return bad(errs.ErrCorrupt, "checksum mismatch: CRC32 %x computed, %x stored", crc, r.CRC32)
		case r.SHA256 != nil && !bytes.Equal(sha, r.SHA256):
			return bad(errs.ErrCorrupt, "checksum mismatch: SHA-256 %x computed, %x stored", sha, r.SHA256)
		}
		p.Proven(e.Bytes)
		return nil
	}
	return flow
}

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
