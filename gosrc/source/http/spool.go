package http

// This file reads objects of servers without ranges: one GET, in order, into a
// spool.

import (
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"io"
	"net/http"
	"sync"
	"time"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/spawn"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/source/retry"
	"github.com/overwire/overwire/gosrc/source/spool"
)

var errStalled = errors.New("no progress")

// A stream is an object of a server without ranges (HTTP/1.0, or responses made on
// the fly): one GET brings it in order into a spool.
//
// A GET that breaks cannot be resumed: the next starts at 0, and what it brings
// again is compared by hash with what is there before a new byte counts. A server
// that names no length, and ends the object by closing the connection, gives no way
// to notice a truncated one; formats do.
type stream struct {
	*spool.File
	o     *object
	tries retry.Options

	cancel context.CancelCauseFunc
	ended  chan struct{} // fill has ended
	once   sync.Once
	shut   error

	// fill's own.
	hash   maphash.Hash // of what is there
	pinned bool         // a response has identified the object
}

// spooled opens an object without ranges; it returns when the size is known.
func (o *object) spooled(ctx context.Context, tries retry.Options) (*Source, error) {
	f, err := spool.New(o.uri, source.OutlineOf(ctx))
	if err != nil {
		return nil, err
	}
	s := &stream{File: f, o: o, tries: tries, ended: make(chan struct{})}
	run, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	s.cancel = cancel
	spawn.Go("http spool", func() {
		defer close(s.ended)
		f.End(spawn.Guard("http spool", func() error { return s.fill(run) }))
	})
	if err := f.Sized(ctx); err != nil {
		cancel(err)
		<-s.ended
		_ = f.Close()
		return nil, err
	}
	return &Source{s, o}, nil
}

// Close ends the GET.
func (s *stream) Close() error {
	s.once.Do(func() {
		s.cancel(errs.New(errs.ErrArgument, "the source is closed"))
		<-s.ended
		s.o.client.drop()
		s.shut = s.File.Close()
	})
	return s.shut
}

// fill brings the object, starting again when a GET breaks.
func (s *stream) fill(ctx context.Context) error {
	s.hash.SetSeed(maphash.MakeSeed())
	most := s.tries.Retries + 1
	for failed, silent := 0, 0; ; {
		before := s.Have()
		err := s.get(ctx)
		if err == nil {
			return nil
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if s.Have()-before >= retry.Progress {
			failed = 0
		}
		verdict, after := s.o.Judge(err)
		failed++
		if verdict == retry.Again && !s.pinned {
			silent++
		}
		switch {
		case verdict == retry.Changed:
			return errs.New(errs.ErrCorrupt, "changed while it was read: %v", err)
		case verdict == retry.Never || failed >= most || silent >= retry.OpenTries:
			if errs.Classed(err) {
				return err
			}
			if err == errStalled {
				return errs.New(errs.ErrTimeout, "less than %d bytes in %v (after %d attempts)", retry.Progress, s.tries.Timeout, failed)
			}
			return errs.New(errs.ErrIO, "%v (after %d attempts)", err, failed)
		}
		if err := retry.Pause(ctx, failed, after); err != nil {
			return err
		}
	}
}

// get is one GET.
func (s *stream) get(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	watchdog := time.AfterFunc(s.tries.Timeout, func() { cancel(errStalled) })
	defer watchdog.Stop()
	named := func(err error) error {
		if context.Cause(ctx) == errStalled {
			return errStalled
		}
		return err
	}
	h := http.Header{}
	if s.pinned {
		s.o.pin(h)
	}
	resp, err := s.o.get(ctx, h)
	if err != nil {
		return named(err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return s.o.status(resp)
	}
	if err := plain(resp); err != nil {
		return err
	}
	length := resp.ContentLength // -1: not said
	if !s.pinned {
		s.pinned = true
		s.o.answer = resp.Header
		s.o.etag, s.o.modified, s.o.date = resp.Header.Get("ETag"), resp.Header.Get("Last-Modified"), resp.Header.Get("Date")
		if length >= 0 {
			s.Expect(length)
		}
	} else if err := s.o.same(resp); err != nil {
		return err
	} else if size := s.Size(); size >= 0 && length >= 0 && length != size {
		return &changed{fmt.Sprintf("it had %d bytes and has %d", size, length)}
	}
	var again maphash.Hash
	again.SetSeed(s.hash.Seed())
	buf := make([]byte, 256<<10)
	seen, old, mark := int64(0), s.Have(), int64(0)
	for {
		n, err := resp.Body.Read(buf)
		b := buf[:n]
		if seen+int64(n)-mark >= retry.Progress {
			mark = seen + int64(n)
			watchdog.Reset(s.tries.Timeout)
		}
		if k := min(int64(n), old-seen); k > 0 {
			_, _ = again.Write(b[:k])
			b = b[k:]
			if seen+k == old && again.Sum64() != s.hash.Sum64() {
				return &changed{"its bytes are others"}
			}
		}
		seen += int64(n)
		if len(b) > 0 {
			switch err := s.Append(b); {
			case err == spool.ErrEnough:
				return nil
			case err != nil:
				return err
			}
			_, _ = s.hash.Write(b)
		}
		switch {
		case err == io.EOF && seen < old:
			return &changed{"it is shorter now"}
		case err == io.EOF && length >= 0 && seen != length:
			return io.ErrUnexpectedEOF
		case err == io.EOF:
			return nil
		case err != nil:
			return named(err)
		}
	}
}
