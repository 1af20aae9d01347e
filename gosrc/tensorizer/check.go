package tensorizer

// This file compares the CRC32 of tensors while they are read.

import (
	"context"
	"hash/crc32"
	"sort"
	"sync"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/source"
)

// checked is a source that compares the CRC32 of its plain tensors while they are
// read, by any reader and in any order: each piece is summed, and the sums of a
// tensor's pieces are combined when the last of them was read. The read that
// completes a tensor with a wrong sum fails. A tensor that is read in overlapping
// pieces, or never completely, is not compared.
type checked struct {
	source.Source
	passing []passing // by offset
}

// passing is a tensor of which pieces were read.
type passing struct {
	off, end int64
	name     string
	start    uint32 // the sum of what precedes the data
	want     uint32

	mu     sync.Mutex
	left   int64
	pieces []summed
}

type summed struct {
	off, n int64
	crc    uint32
}

// check wraps src in a source that compares the CRC32 of every plain tensor of a
// file whose records were read. Encrypted ones have a MAC for each box.
func (f *File) check(src source.Source) (source.Source, error) {
	c := &checked{Source: src, passing: make([]passing, 0, len(f.Entries))}
	for i := range f.Entries {
		e, r := &f.Entries[i], &f.Records[i]
		if e.Bytes == 0 || r.Crypt != nil {
			continue
		}
		if r.CRC32 == nil {
			return nil, f.at(e.Name, e.Record, errs.New(errs.ErrNotSupported, "the tensor has no CRC32"))
		}
		c.passing = append(c.passing, passing{off: e.Data, end: e.Data + e.Bytes, name: e.Name, left: e.Bytes,
			start: crc32.ChecksumIEEE(r.Prefix), want: le.Uint32(r.CRC32)})
	}
	return c, nil
}

// Facts are those of the source below, whose bytes are compared by ReadAt.
func (c *checked) Facts() source.Facts { return c.Source.Facts().ReadAtOnly() }

// ReadAt is that of the source below; see source.Source.
func (c *checked) ReadAt(ctx context.Context, p []byte, off int64) error {
	if err := c.Source.ReadAt(ctx, p, off); err != nil {
		return err
	}
	end := off + int64(len(p))
	for i := sort.Search(len(c.passing), func(i int) bool { return c.passing[i].end > off }); i < len(c.passing) && c.passing[i].off < end; i++ {
		t := &c.passing[i]
		lo, hi := max(off, t.off), min(end, t.end)
		if err := t.pass(p[lo-off:hi-off], lo); err != nil {
			return errs.Place("check", c.URI(), t.name, t.off, err)
		}
	}
	return nil
}

// pass records a piece.
func (t *passing) pass(p []byte, off int64) error {
	piece := summed{off, int64(len(p)), crc32.ChecksumIEEE(p)}
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, have := range t.pieces {
		if have.off < piece.off+piece.n && piece.off < have.off+have.n {
			t.left, t.pieces = t.end-t.off, nil // the tensor is read again from the start
			break
		}
	}
	t.pieces = append(t.pieces, piece)
	if t.left -= piece.n; t.left > 0 {
		return nil
	}
	sort.Slice(t.pieces, func(i, k int) bool { return t.pieces[i].off < t.pieces[k].off })
	sum := t.start
	for _, have := range t.pieces {
		sum = crcJoin(sum, have.crc, have.n)
	}
	t.left, t.pieces = t.end-t.off, nil
	if sum != t.want {
		return errs.New(errs.ErrCorrupt, "checksum mismatch: CRC32 %08x, not %08x", sum, t.want)
	}
	return nil
}
