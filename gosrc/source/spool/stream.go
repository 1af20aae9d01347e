package spool

// This file fills a spool from a store that can only send whole objects.

import (
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"io"
	"sync"
	"time"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/spawn"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/source/retry"
)

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
