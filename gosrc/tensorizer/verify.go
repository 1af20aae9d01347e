package tensorizer

// This file verifies files by their hashes.

import (
	"bytes"
	"context"

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
