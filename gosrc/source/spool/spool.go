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
	"fmt"
	"hash/maphash"
	"io"
	"math"
	"os"
	"sync"
	"time"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/spawn"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/source/retry"
	"golang.org/x/sys/unix"
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

// A Whole opens an object as a whole. It is used by one goroutine.
type Whole interface {
	// URI returns the object's name as the user wrote it.
	URI() string
	// Whole opens the object's body from its beginning. length is -1 if the store does not state it. Later calls must
	// return the same state as the first call that succeeded. For a different state they return an error for which
	// Judge returns retry.Changed.
	Whole(ctx context.Context) (body io.ReadCloser, length int64, err error)
	// Judge is the same as in retry.Fetcher.
	Judge(err error) (retry.Verdict, time.Duration)
	// Close releases the object's resources.
	Close() error
}

var errStalled = errors.New("no progress")

// changed is the error for bytes that differ from those received before.
type changed struct{ what string }

func (c *changed) Error() string { return c.what }

// A Stream is an object that is read in order by one request into a spool. It is used for servers without
// ranges (HTTP/1.0, or generated responses) and for servers that do not identify the object's state, where two
// requests could return bytes of different states.
//
// A broken request cannot be resumed. The next one starts at 0, and the bytes that it repeats are compared by
// hash with those already received before a new byte is used. If a server sends no length and ends the object
// by closing the connection, only the reader of the file's format can detect truncation.
type Stream struct {
	*File
	o     Whole
	tries retry.Options

	cancel context.CancelCauseFunc
	ended  chan struct{} // closed when fillFile has ended
	once   sync.Once
	shut   error

	// Used only by fillFile.
	hash maphash.Hash // hash of the bytes already received
	met  bool         // the store has responded at least once
}

// Open opens an object and waits until its size is known. Closing the stream closes the object. If Open fails,
// the caller closes the object.
func Open(ctx context.Context, o Whole, tries retry.Options, outline source.Outline) (*Stream, error) {
	f, err := New(o.URI(), outline)
	if err != nil {
		return nil, err
	}
	s := &Stream{File: f, o: o, tries: tries, ended: make(chan struct{})}
	run, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	s.cancel = cancel
	spawn.Go("spool", func() {
		defer close(s.ended)
		f.End(spawn.Guard("spool", func() error { return s.fillFile(run) }))
	})
	if err := f.Sized(ctx); err != nil {
		cancel(err)
		<-s.ended
		_ = f.Close()
		return nil, err
	}
	return s, nil
}

// Close aborts the request.
func (s *Stream) Close() error {
	s.once.Do(func() {
		s.cancel(errs.New(errs.ErrArgument, "the source is closed"))
		<-s.ended
		s.shut = errors.Join(s.o.Close(), s.File.Close())
	})
	return s.shut
}

// fillFile downloads the object and starts again when a request breaks.
func (s *Stream) fillFile(ctx context.Context) error {
	s.hash.SetSeed(maphash.MakeSeed())
	most := s.tries.Retries + 1
	for failures, silent := 0, 0; ; {
		before := s.Have()
		err := s.requestOnce(ctx)
		if err == nil {
			return nil
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if s.Have()-before >= retry.Progress {
			failures = 0
		}
		verdict, after := s.judgeError(err)
		failures++
		if verdict == retry.Again && !s.met {
			silent++
		}
		switch {
		case verdict == retry.Changed:
			return errs.New(errs.ErrCorrupt, "changed while it was read: %v", err)
		case verdict == retry.Never || failures >= most || silent >= retry.OpenTries:
			if errs.Classed(err) {
				return err
			}
			if err == errStalled {
				return errs.New(errs.ErrTimeout, "got fewer than %d bytes in %v (after %d attempts)", retry.Progress,
					s.tries.Timeout, failures)
			}
			return errs.New(errs.ErrIO, "%v (after %d attempts)", err, failures)
		}
		if err := retry.Pause(ctx, failures, after); err != nil {
			return err
		}
	}
}

func (s *Stream) judgeError(err error) (retry.Verdict, time.Duration) {
	var other *changed
	switch {
	case errors.As(err, &other):
		return retry.Changed, 0
	case err == errStalled:
		return retry.Again, 0
	}
	return s.o.Judge(err)
}

func (s *Stream) requestOnce(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	watchdog := time.AfterFunc(s.tries.Timeout, func() { cancel(errStalled) })
	defer watchdog.Stop()
	withName := func(err error) error {
		if context.Cause(ctx) == errStalled {
			return errStalled
		}
		return err
	}
	body, length, err := s.o.Whole(ctx)
	if err != nil {
		return withName(err)
	}
	defer body.Close()
	if !s.met {
		if s.met = true; length >= 0 {
			s.Expect(length)
		}
	} else if size := s.Size(); size >= 0 && length >= 0 && length != size {
		return &changed{fmt.Sprintf("it had %d bytes and now has %d", size, length)}
	}
	var again maphash.Hash
	again.SetSeed(s.hash.Seed())
	buf := make([]byte, 256<<10)
	arrivals, old, mark := int64(0), s.Have(), int64(0)
	for {
		n, err := body.Read(buf)
		b := buf[:n]
		if arrivals+int64(n)-mark >= retry.Progress {
			mark = arrivals + int64(n)
			watchdog.Reset(s.tries.Timeout)
		}
		if k := min(int64(n), old-arrivals); k > 0 {
			_, _ = again.Write(b[:k])
			b = b[k:]
			if arrivals+k == old && again.Sum64() != s.hash.Sum64() {
				return &changed{"its bytes have changed"}
			}
		}
		arrivals += int64(n)
		if len(b) > 0 {
			switch err := s.Append(b); {
			case err == ErrEnough:
				return nil
			case err != nil:
				return err
			}
			_, _ = s.hash.Write(b)
		}
		switch {
		case err == io.EOF && arrivals < old:
			return &changed{"it is shorter now"}
		case err == io.EOF && length >= 0 && arrivals != length:
			return io.ErrUnexpectedEOF
		case err == io.EOF:
			return nil
		case err != nil:
			return withName(err)
		}
	}
}
