// Package spool provides a source for bytes that arrive once and in order. They are written to an unlinked file
// in the temporary folder, and a read waits until its bytes have arrived. A file is used because the tensors
// need the memory. All bytes are preserved because a tensor's bytes may be read in any order, and twice.
//
// An object that is larger than the free space of the temporary folder is refused before any byte is written.
// If its size is not stated, at most half of the free space is used. If its first bytes state its length
// (source.Outline), the last byte can only be read once the object has ended there.
package spool

import (
	"context"
	"errors"
	"math"
	"os"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/source"
)

// A File is filled by one goroutine and read by any number. It implements source.Source once its size is known;
// see Sized.
type File struct {
	uri     string
	file    *os.File
	outline source.Outline
	free    int64 // free bytes of the temporary folder at the start

	// Used only by the goroutine that fills the file.
	need   int64 // number of bytes from which the outline can derive the size; -1 if it already has
	stated bool  // Expect was called

	mu    sync.Mutex
	size  int64 // -1 until it is known
	have  int64
	ended bool
	ends  int64 // end of the object according to its outline; -1 if unknown
	err   error
	more  chan struct{} // closed and replaced when another field changes
	shut  bool
}

// ErrEnough is returned by Append if the outline needs no further bytes: the download can stop.
var ErrEnough = errors.New("the remaining bytes are not needed")

var errClosed = errs.New(errs.ErrArgument, "the source is closed")

// New returns an empty file. uri names it in errors.
func New(uri string, outline source.Outline) (*File, error) {
	f, err := os.CreateTemp("", "overwire-*")
	if err != nil {
		return nil, errs.FromOS(err)
	}
	_ = os.Remove(f.Name())
	free := int64(math.MaxInt64)
	var st unix.Statfs_t
	if unix.Fstatfs(int(f.Fd()), &st) == nil && st.Blocks > 0 {
		free = int64(min(st.Bavail, math.MaxInt64/uint64(st.Bsize)) * uint64(st.Bsize))
	}
	return &File{uri: uri, file: f, outline: outline, free: free, size: -1, ends: -1, more: make(chan struct{})}, nil
}

// Append adds bytes. It refuses bytes beyond the object's limits, and all bytes once the first ones show that
// the object does not match its outline.
func (f *File) Append(p []byte) error {
	before := f.Have()
	have := before + int64(len(p))
	switch most := f.outline.Most; {
	case most > 0 && have > most:
		return errs.New(errs.ErrFormat, "the object has more than %d bytes", most)
	case f.stated && f.Size() > f.free:
		return errs.New(errs.ErrIO, "the object has %d bytes, but %s has only %d bytes free: set TMPDIR to a "+
			"folder on a larger disk", f.Size(), os.TempDir(), f.free)
	case !f.stated && have > f.free/2:
		return errs.New(errs.ErrIO, "the object has no stated size and more than %d bytes, half of the free space "+
			"in %s", f.free/2, os.TempDir())
	case f.ends >= 0 && have > f.ends:
		return f.appendBeyond(p[:f.ends-before])
	}
	if _, err := f.file.WriteAt(p, before); err != nil {
		return errs.FromOS(err)
	}
	f.changeState(func() { f.have = have })
	return f.measureSize()
}

// appendBeyond handles bytes beyond the end of the object. p has the bytes that precede the end.
func (f *File) appendBeyond(p []byte) error {
	if !f.outline.Longer {
		return errs.New(errs.ErrFormat, "the object has more than its stated %d bytes", f.ends)
	}
	if _, err := f.file.WriteAt(p, f.Have()); err != nil {
		return errs.FromOS(err)
	}
	f.changeState(func() { f.have += int64(len(p)) })
	return ErrEnough
}

// measureSize asks the outline for the size once enough bytes have arrived.
func (f *File) measureSize() error {
	have := f.Have()
	if f.outline.Size == nil || f.need < 0 || have < f.need {
		return nil
	}
	head := make([]byte, have)
	if _, err := f.file.ReadAt(head, 0); err != nil {
		return errs.FromOS(err)
	}
	size, need, err := f.outline.Size(f.uri, head)
	if err != nil {
		return err
	}
	if f.need = need; need > have {
		return nil
	}
	f.need = -1
	switch {
	case size < 0:
		return nil
	case have > size:
		f.changeState(func() { f.have = size })
		f.ends = size
		err = f.appendBeyond(nil)
		if err != ErrEnough {
			return err
		}
	}
	f.changeState(func() {
		f.ends = size
		if f.size < 0 {
			f.size = size
		}
	})
	return err
}

// Have returns how many bytes have arrived.
func (f *File) Have() int64 {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.have
}

// Expect sets the number of bytes that will arrive.
func (f *File) Expect(size int64) {
	f.stated = true
	f.changeState(func() { f.size = size })
}

// End announces that no more bytes will arrive. Reads of missing bytes return err. If err is nil and the size is
// unknown, the size becomes the number of bytes that have arrived.
func (f *File) End(err error) {
	f.changeState(func() {
		f.ended = err == nil
		switch {
		case f.err != nil:
		case err != nil:
			f.err = err
		case f.size < 0:
			f.size = f.have
		case f.have < f.size:
			f.err = errs.New(errs.ErrCorrupt, "truncated: only %d of %d bytes arrived", f.have, f.size)
		}
	})
}

// Sized waits until the size is known.
func (f *File) Sized(ctx context.Context) error {
	return f.waitUntil(ctx, func() bool { return f.size >= 0 })
}

// URI returns the name of the object.
func (f *File) URI() string { return f.uri }

// Size returns the number of bytes that will arrive, or -1 while it is unknown.
func (f *File) Size() int64 {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.size
}

// Facts implements source.Source. The concurrency is 1 because the bytes arrive in order.
func (f *File) Facts() source.Facts { return source.Facts{Remote: true, Concurrency: 1} }

// ReadAt waits for its bytes; see source.Source.
func (f *File) ReadAt(ctx context.Context, p []byte, off int64) error {
	at := func(err error) error {
		return &errs.At{Verb: "read", Source: f.uri, Chunk: -1, Offset: off, Err: err}
	}
	if size := f.Size(); off < 0 || off > size || int64(len(p)) > size-off {
		return at(errs.New(errs.ErrCorrupt, "truncated: expected %d bytes from this offset, but the object has %d",
			len(p), size))
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if err := f.waitUntil(ctx, func() bool { return f.readyBytes() >= off+int64(len(p)) }); err != nil {
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

// readyBytes returns how many bytes may be read. The caller holds f.mu.
func (f *File) readyBytes() int64 {
	if f.ends < 0 || f.ended {
		return f.have
	}
	return min(f.have, f.ends-1)
}

// Close frees the file. The caller must have stopped filling it.
func (f *File) Close() error {
	var err error
	f.changeState(func() {
		if !f.shut {
			err = f.file.Close()
		}
		f.shut = true
	})
	return err
}

// waitUntil waits until ok returns true. ok is called under the lock.
func (f *File) waitUntil(ctx context.Context, ok func() bool) error {
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

func (f *File) changeState(fn func()) {
	f.mu.Lock()
	fn()
	close(f.more)
	f.more = make(chan struct{})
	f.mu.Unlock()
}
