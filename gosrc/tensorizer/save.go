package tensorizer

// This file writes whole files, and writes records into a file that the caller has opened. Several workers hash
// tensors.

import (
	"cmp"
	"context"
	"slices"
	"sync/atomic"
	"time"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/atomicfile"
	"github.com/overwire/overwire/gosrc/internal/sizes"
	"github.com/overwire/overwire/gosrc/internal/spawn"
	"golang.org/x/sys/unix"
)

// An Output receives the bytes of one file.
type Output interface {
	// Write writes bytes at an offset. It is safe for concurrent use.
	Write(p []byte, off int64) error
}

// A Tensor is a tensor to write: its description and its bytes. The function Write sets Sum and Bytes of Data. It
// calls Pass before it encrypts and writes a piece, and Done before it writes the record.
type Tensor struct {
	Item Item
	Data Flow
}

// How holds the options of Write.
type How struct {
	Path    string            // the file's name in errors
	Encrypt map[string]string // OptionKey or OptionPassword; without them, the file is not encrypted
	Workers int
	InOrder bool // whether to write the tensors in order
}

// Write writes a whole file. The index has exactly the necessary size, and the data of each tensor starts at a page
// boundary. Each tensor is hashed, encrypted if requested, and written by one worker. Write returns the file's size.
func Write(ctx context.Context, to Output, how How, all []Tensor) (int64, error) {
	fail := func(name string, err error) error { return errs.Locate("save", how.Path, name, -1, err) }
	key, err := KeyOf(ctx, how.Encrypt)
	if err != nil {
		return 0, fail("", err)
	}
	items := make([]Item, len(all))
	for i := range all {
		it := all[i].Item
		if err := it.Check(); err != nil {
			return 0, fail(it.Name, err)
		}
		if it.Sealed = key != nil; key != nil && it.Bytes > 0 {
			it.Crypt = NewCrypt(it.Bytes, key.Derive)
		}
		items[i] = it
	}
	length := IndexBytes(items)
	at := Start(length)
	for i := range items {
		items[i].Record = at
		if items[i].Bytes > 0 {
			items[i].PadTo(Align)
		}
		at = items[i].Data() + items[i].Bytes
	}
	front, err := Front(items, 1, length)
	if err != nil {
		return 0, fail("", err)
	}
	if err := to.Write(front, 0); err != nil {
		return 0, err
	}
	flows := make([]Flow, len(all))
	for i := range all {
		flows[i] = writtenFlow(to, how.Path, &items[i], key, all[i].Data)
	}
	if err := Run(ctx, "tensorizer.save", how.Workers, how.InOrder, flows); err != nil {
		return 0, err
	}
	return at + Tail, to.Write(make([]byte, Tail), at)
}

// Records writes the records of a file and their data, in order from offset `at` of an open file, and sets
// the Record of every item. The caller writes the head and the index. data holds the bytes of each item; it is not
// changed. key, if not nil, encrypts the items that are Sealed. Records returns the end of the last record. The file
// must not be open with O_APPEND.
func Records(ctx context.Context, fd int, path string, at int64, items []Item, data [][]byte, key *Key,
	workers int) (int64, error) {
	to := descriptor{fd, path, make(chan struct{}, writers)}
	flows := make([]Flow, len(items))
	for i := range items {
		it := &items[i]
		if it.Sealed && it.Bytes > 0 {
			it.Crypt = NewCrypt(it.Bytes, key.Derive)
		}
		it.Record = at
		at = it.Data() + it.Bytes
		flows[i] = writtenFlow(to, path, it, key, Flow{Bytes: it.Bytes, Memory: data[i]})
	}
	return at, Run(ctx, "tensorizer.save", workers, false, flows)
}

// writtenFlow returns a flow that writes data to its offset in the file, encrypted if the item is, and then writes
// the record.
func writtenFlow(to Output, path string, it *Item, key *Key, data Flow) Flow {
	at, end := it.Data(), it.Data()+it.Bytes
	fail := func(err error) error { return errs.Locate("save", path, it.Name, -1, err) }
	put := func(p []byte) error {
		err := to.Write(p, at)
		at += int64(len(p))
		return err
	}
	var box []byte // collects bytes until a whole box can be encrypted
	seal := func(p []byte) error {
		for len(p) > 0 {
			if box == nil {
				box = make([]byte, 0, min(it.Bytes, ChunkBytes))
			}
			n := copy(box[len(box):cap(box)], p)
			box, p = box[:len(box)+n], p[n:]
			if len(box) == cap(box) || at+int64(len(box)) == end {
				it.Crypt.Seal(box, (at-it.Data())/ChunkBytes, key.Bytes)
				if err := put(box); err != nil {
					return err
				}
				box = box[:0]
			}
		}
		return nil
	}
	if it.Crypt == nil {
		seal = put
	}
	f := data
	f.Sum, f.Bytes = it.Summer(), it.Bytes
	if data.Next != nil {
		f.Next = func(ctx context.Context, buf []byte, off int64) ([]byte, error) {
			p, err := data.Next(ctx, buf, off)
			return p, fail(err)
		}
	}
	f.Pass = func(p []byte) error {
		if data.Pass != nil {
			if err := data.Pass(p); err != nil {
				return fail(err)
			}
		}
		return fail(seal(p))
	}
	f.Done = func() error {
		box = nil
		if data.Done != nil {
			if err := data.Done(); err != nil {
				return fail(err)
			}
		}
		return fail(to.Write(it.Finish(f.Sum), it.Record))
	}
	return f
}

// descriptor writes to the caller's open file.
type descriptor struct {
	fd   int
	path string
	gate chan struct{} // holds one element for each active writer
}

// writers is the number of concurrent writes to the file. File systems admit one write at a time, so more than two
// writers would only spin.
const writers = 2

func (d descriptor) Write(p []byte, off int64) error {
	d.gate <- struct{}{}
	defer func() { <-d.gate }()
	for len(p) > 0 {
		n, err := unix.Pwrite(d.fd, p, off)
		if err == unix.EINTR {
			continue
		}
		if err == nil && n == 0 {
			err = unix.EIO
		}
		if err != nil {
			return atomicfile.Failed(d.path, off, errs.FromFile(err))
		}
		p, off = p[n:], off+int64(n)
	}
	return nil
}

// A Flow is the data of one tensor that is being hashed. Its functions are never called concurrently.
type Flow struct {
	Sum   *Summer
	Bytes int64
	// Next returns bytes [off, off+len(buf)). The result is buf, or another slice that is valid until the next call.
	Next func(ctx context.Context, buf []byte, off int64) ([]byte, error)
	// If Step is not 0, every offset passed to Next and every size except the last is a multiple of it.
	Step int64
	// Memory, if not nil, is the complete data and is used instead of Next.
	Memory []byte
	// Pass, if not nil, is called in order with every piece that was hashed.
	Pass func(p []byte) error
	// Done, if not nil, is called after all bytes were hashed and passed.
	Done func() error
	// Busy, if not nil, counts the nanoseconds that hashing takes.
	Busy *atomic.Int64
}

// Pieces of memory are small enough to stay in the second-level cache from hashing to Pass. They are large enough
// that two writers of a file rarely wait for each other. Other data is read in larger blocks.
const (
	memoryPiece = 512 << 10
	readPiece   = 1 << 20
)

// Run hashes all flows with several workers. Unless inOrder is set, the largest flows come first, so that they do not
// delay the end. The first error stops all workers.
func Run(ctx context.Context, name string, workers int, inOrder bool, flows []Flow) error {
	order := make([]*Flow, len(flows))
	for i := range flows {
		order[i] = &flows[i]
	}
	if !inOrder {
		slices.SortStableFunc(order, func(a, b *Flow) int { return cmp.Compare(b.Bytes, a.Bytes) })
	}
	return spawn.Each(ctx, name, workers, len(order), func(k int) error { return order[k].hashFlow(ctx) })
}

// hashFlow hashes one flow piece by piece.
func (f *Flow) hashFlow(ctx context.Context) error {
	var buf []byte
	for off := int64(0); off < f.Bytes; {
		if ctx.Err() != nil {
			return errs.FromOS(context.Cause(ctx))
		}
		p, err := f.piece(ctx, &buf, off)
		if err != nil {
			return err
		}
		start := time.Now()
		f.Sum.Write(p)
		if f.Busy != nil {
			f.Busy.Add(int64(time.Since(start)))
		}
		if f.Pass != nil {
			if err := f.Pass(p); err != nil {
				return err
			}
		}
		off += int64(len(p))
	}
	if f.Done != nil {
		return f.Done()
	}
	return nil
}

func (f *Flow) piece(ctx context.Context, buf *[]byte, off int64) ([]byte, error) {
	if f.Memory != nil {
		return f.Memory[off:min(off+memoryPiece, f.Bytes)], nil
	}
	step := max(1, f.Step)
	n := min(sizes.RoundUp(readPiece, step), f.Bytes-off)
	if *buf == nil {
		*buf = make([]byte, n)
	}
	return f.Next(ctx, (*buf)[:n], off)
}
