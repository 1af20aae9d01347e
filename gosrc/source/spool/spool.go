// Package spool makes a source of bytes that arrive in order and once: they go into
// an unlinked file in the temporary folder, and a read waits until its bytes have
// arrived. They are kept in a file because the tensors need the memory, and whole
// because a tensor's bytes may be read in any order, and twice.
package spool

import (
	"context"
	"os"
	"sync"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/source"
)

// A File is filled by one goroutine and read by any. It implements
// source.Source once its size is known; see Sized.
type File struct {
	uri  string
	file *os.File

	mu   sync.Mutex
	size int64 // -1 until it is known
	have int64
	err  error
	more chan struct{} // closed and renewed when one of the others changes
	shut bool
}

var errClosed = errs.New(errs.ErrArgument, "the source is closed")

// New makes an empty file; uri names it in errors.
func New(uri string) (*File, error) {
	f, err := os.CreateTemp("", "overwire-*")
	if err != nil {
		return nil, errs.FromOS(err)
	}
	_ = os.Remove(f.Name())
	return &File{uri: uri, file: f, size: -1, more: make(chan struct{})}, nil
}

// Append adds bytes.
func (f *File) Append(p []byte) error {
	if _, err := f.file.WriteAt(p, f.Have()); err != nil {
		return errs.FromOS(err)
	}
	f.change(func() { f.have += int64(len(p)) })
	return nil
}

// Have is how many bytes have arrived.
func (f *File) Have() int64 {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.have
}

// Expect sets how many bytes will arrive.
func (f *File) Expect(size int64) { f.change(func() { f.size = size }) }

// End says that no more bytes will arrive. Reads of missing bytes get err; if it is
// nil, the file has the size that it has reached.
func (f *File) End(err error) {
	f.change(func() {
		switch {
		case f.err != nil:
		case err != nil:
			f.err = err
		case f.size < 0:
			f.size = f.have
		case f.have < f.size:
			f.err = errs.New(errs.ErrCorrupt, "truncated: %d of %d bytes came", f.have, f.size)
		}
	})
}

// Sized waits until the size is known.
func (f *File) Sized(ctx context.Context) error {
	return f.until(ctx, func() bool { return f.size >= 0 })
}

// URI names it.
func (f *File) URI() string { return f.uri }

// Size is how many bytes will arrive; -1 while that is not known.
func (f *File) Size() int64 {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.size
}

// Facts say that one read at a time is enough: the bytes come in order.
func (f *File) Facts() source.Facts { return source.Facts{Remote: true, Concurrency: 1} }

// ReadAt waits for its bytes; see source.Source.
func (f *File) ReadAt(ctx context.Context, p []byte, off int64) error {
	at := func(err error) error {
		return &errs.At{Verb: "read", Source: f.uri, Chunk: -1, Offset: off, Err: err}
	}
	if size := f.Size(); off < 0 || off > size || int64(len(p)) > size-off {
		return at(errs.New(errs.ErrCorrupt, "truncated: %d bytes wanted, the object has %d", len(p), size))
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if err := f.until(ctx, func() bool { return f.have >= off+int64(len(p)) }); err != nil {
		if ctx.Err() != nil {
			return err
		}
		return at(err)
	}
	if _, err := f.file.ReadAt(p, off); err != nil {
		return at(errs.FromOS(err))
	}
	return nil
}

// Close frees the file. Stop filling it first.
func (f *File) Close() error {
	var err error
	f.change(func() {
		if !f.shut {
			err = f.file.Close()
		}
		f.shut = true
	})
	return err
}

// until waits until ok, which is called under the lock, returns true.
func (f *File) until(ctx context.Context, ok func() bool) error {
	for {
		f.mu.Lock()
		yes, shut, err, more := ok(), f.shut, f.err, f.more
		f.mu.Unlock()
		switch {
		case shut:
			return errClosed
		case yes:
			return nil
		case err != nil:
			return err
		}
		select {
		case <-more:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

func (f *File) change(fn func()) {
	f.mu.Lock()
	fn()
	close(f.more)
	f.more = make(chan struct{})
	f.mu.Unlock()
}
