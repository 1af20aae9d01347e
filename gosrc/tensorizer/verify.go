package tensorizer

// This file verifies files by their hashes, and bytes that no hash covers. It also compares the CRC32 of tensors as
// they are read, and combines the sums of consecutive pieces.

import (
	"bytes"
	"context"
	"hash/crc32"
	"math"
	"slices"
	"sort"
	"sync"

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

// checked is a source that compares the CRC32 of its plain tensors when they are read, by any reader and in any order.
// It computes a sum for each piece and combines the sums when the last piece of a tensor has been read. If the result
// is wrong, that read fails. A tensor that is read in overlapping pieces, or never completely, is not compared.
type checked struct {
	source.Source
	tensors []partial // sorted by offset
}

// A partial is the state of a tensor that is read in pieces.
type partial struct {
	off, end int64
	name     string
	start    uint32 // the sum of the record's prefix
	want     uint32

	mu     sync.Mutex
	left   int64    // bytes that have not been read yet
	pieces []summed // sorted by offset; adjacent pieces are joined
}

type summed struct {
	off, n int64
	crc    uint32
}

// checkSource wraps src in a source that compares the CRC32 of every plain tensor. Encrypted tensors are skipped,
// because each of their encrypted blocks has a MAC. The records of the file must have been read.
func checkSource(f *File, src source.Source) (source.Source, error) {
	c := &checked{Source: src, tensors: make([]partial, 0, len(f.Entries))}
	for i := range f.Entries {
		e, r := &f.Entries[i], &f.Records[i]
		if e.Bytes == 0 || r.Crypt != nil {
			continue
		}
		if r.CRC32 == nil {
			return nil, f.at(e.Name, e.Record, errs.New(errs.ErrNotSupported, "the file has no CRC32 for this tensor"))
		}
		c.tensors = append(c.tensors, partial{off: e.Data, end: e.Data + e.Bytes, name: e.Name, left: e.Bytes,
			start: crc32.ChecksumIEEE(r.Prefix), want: le.Uint32(r.CRC32)})
	}
	return c, nil
}

// Facts returns the facts of the wrapped source without a view, because ReadAt compares the bytes.
func (c *checked) Facts() source.Facts { return c.Source.Facts().ReadAtOnly() }

// ReadAt reads from the wrapped source; see source.Source.
func (c *checked) ReadAt(ctx context.Context, p []byte, off int64) error {
	if err := c.Source.ReadAt(ctx, p, off); err != nil {
		return err
	}
	end := off + int64(len(p))
	for i := sort.Search(len(c.tensors), func(i int) bool {
		return c.tensors[i].end > off
	}); i < len(c.tensors) && c.tensors[i].off < end; i++ {
		t := &c.tensors[i]
		lo, hi := max(off, t.off), min(end, t.end)
		if err := t.passPiece(p[lo-off:hi-off], lo); err != nil {
			return errs.Place("check", c.URI(), t.name, t.off, err)
		}
	}
	return nil
}

func (t *partial) passPiece(p []byte, off int64) error {
	piece := summed{off, int64(len(p)), crc32.ChecksumIEEE(p)}
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.addPiece(piece) {
		t.left, t.pieces = t.end-t.off, append(t.pieces[:0], piece) // the tensor is being read again
	}
	if t.left -= piece.n; t.left > 0 {
		return nil
	}
	sum := crcJoin(t.start, t.pieces[0].crc, t.pieces[0].n)
	t.left, t.pieces = t.end-t.off, nil
	if sum != t.want {
		return errs.WithRule(errs.RuleChecksum, errs.New(errs.ErrCorrupt,
			"checksum mismatch: CRC32 %08x computed, %08x stored", sum, t.want))
	}
	return nil
}

// addPiece adds a piece and joins it with adjacent ones. It returns false if a part of it was read before.
func (t *partial) addPiece(p summed) bool {
	all := t.pieces
	i := sort.Search(len(all), func(i int) bool { return all[i].off >= p.off })
	before, after := i > 0 && all[i-1].off+all[i-1].n >= p.off, i < len(all) && all[i].off <= p.off+p.n
	if before && all[i-1].off+all[i-1].n > p.off || after && all[i].off < p.off+p.n {
		return false
	}
	join := func(a *summed, b summed) { a.crc, a.n = crcJoin(a.crc, b.crc, b.n), a.n+b.n }
	switch {
	case before && after:
		join(&all[i-1], p)
		join(&all[i-1], all[i])
		t.pieces = slices.Delete(all, i, i+1)
	case before:
		join(&all[i-1], p)
	case after:
		join(&p, all[i])
		all[i] = p
	default:
		t.pieces = slices.Insert(all, i, p)
	}
	return true
}

// The arithmetic of CRC-32 (IEEE) works on polynomials modulo the CRC polynomial. Their bits are reversed, as in the
// sums, so 1<<31 is the polynomial 1.

// multiplyCRC returns the product of two polynomials.
func multiplyCRC(a, b uint32) uint32 {
	var p uint32
	for m := uint32(1) << 31; m != 0; m >>= 1 {
		if a&m != 0 {
			p ^= b
		}
		b = b>>1 ^ crc32.IEEE&-(b&1)
	}
	return p
}

// crcPower returns x to the power n. Multiplying a sum by it has the effect of appending n zero bits.
func crcPower(n uint64) uint32 {
	p := uint32(1) << 31
	for k := 0; n != 0; k, n = k+1, n>>1 {
		if n&1 != 0 {
			p = multiplyCRC(crcSquares()[k&31], p)
		}
	}
	return p
}

// crcJoin returns the CRC-32 of two consecutive pieces with the sums a and b. n is the length of the second piece in
// bytes.
func crcJoin(a, b uint32, n int64) uint32 { return multiplyCRC(crcPower(uint64(n)*8), a) ^ b }

// crcSquares returns x to the powers 2^0 to 2^31. After that, the values repeat.
var crcSquares = sync.OnceValue(func() (all [32]uint32) {
	all[0] = 1 << 30 // x
	for i := 1; i < len(all); i++ {
		all[i] = multiplyCRC(all[i-1], all[i-1])
	}
	return all
})
