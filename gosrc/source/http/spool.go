package http

import (
	"context"
	"fmt"
	"hash/maphash"
	"io"
	"net/http"
	"os"
	"sync"
	"time"

	"github.com/overwire/overwire/gosrc/fault"
	"github.com/overwire/overwire/gosrc/internal/spawn"
	"github.com/overwire/overwire/gosrc/source/retry"
)

// A spool is an object of a server without ranges (HTTP/1.0, and what makes
// its answers on the fly). One GET brings it in order into an unlinked file in
// the temporary folder, and a read waits until its bytes are there. A file and
// not memory: the tensors need that memory, and a page of a file can be given
// up; and not a window that moves on, because a tensor's bytes may be asked
// for in any order, and twice.
//
// A GET that breaks cannot be resumed: the next begins at 0, and what it
// brings again is compared, by its hash, with what is there, before a new byte
// counts. A server that names no length, and closes the connection to say
// that the object ends, gives no way to tell a cut; formats find it.
type spool struct {
	o    *object
	far  retry.Options
	file *os.File

	cancel context.CancelCauseFunc
	ended  chan struct{} // the GET has

	// fill's own.
	hash   maphash.Hash // of what is there
	pinned bool         // an answer has said what the object is

	mu   sync.Mutex
	size int64 // -1 until it is known
	have int64
	err  error
	more chan struct{} // closed and renewed when have, size or err change
	shut bool
}

// spooled opens an object that has no ranges.
func (o *object) spooled(ctx context.Context, far retry.Options) (*Source, error) {
	f, err := os.CreateTemp("", "overwire-*")
	if err != nil {
		return nil, fault.FromOS(err)
	}
	_ = os.Remove(f.Name())
	s := &spool{o: o, far: far, file: f, size: -1, more: make(chan struct{}), ended: make(chan struct{})}
	run, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	s.cancel = cancel
	spawn.Go("http spool", func() {
		defer close(s.ended)
		err := spawn.Guard("http spool", func() error { return s.fill(run) })
		s.change(func() { s.err = err })
	})
	// Open returns when the size is known.
	if err := s.until(ctx, func() bool { return s.size >= 0 }); err != nil {
		cancel(err)
		<-s.ended
		_ = f.Close()
		return nil, err
	}
	return &Source{Source: s}, nil
}

func (s *spool) URI() string { return s.o.uri }

func (s *spool) Size() int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.size
}

func (s *spool) ReadAt(ctx context.Context, p []byte, off int64) error {
	at := func(err error) error {
		return &fault.At{Verb: "read", Source: s.o.uri, Chunk: -1, Offset: off, Err: err}
	}
	if size := s.Size(); off < 0 || off > size || int64(len(p)) > size-off {
		return at(fault.New(fault.ErrCorrupt, "truncated: %d bytes wanted, the object has %d", len(p), size))
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if err := s.until(ctx, func() bool { return s.have >= off+int64(len(p)) }); err != nil {
		if ctx.Err() != nil {
			return err
		}
		return at(err)
	}
	if _, err := s.file.ReadAt(p, off); err != nil {
		return at(fault.FromOS(err))
	}
	return nil
}

func (s *spool) Close() error {
	s.mu.Lock()
	again := s.shut
	s.shut = true
	s.mu.Unlock()
	if again {
		return nil
	}
	s.cancel(fault.New(fault.ErrArgument, "the source is closed"))
	<-s.ended
	s.change(func() { s.err = fault.New(fault.ErrArgument, "the source is closed") })
	s.o.client.drop()
	return s.file.Close()
}

// until waits for what ok, called under the lock, says.
func (s *spool) until(ctx context.Context, ok func() bool) error {
	for {
		s.mu.Lock()
		yes, err, more := ok() && !s.shut, s.err, s.more
		s.mu.Unlock()
		switch {
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

func (s *spool) change(fn func()) {
	s.mu.Lock()
	fn()
	close(s.more)
	s.more = make(chan struct{})
	s.mu.Unlock()
}

// fill brings the object, beginning again when a GET breaks.
func (s *spool) fill(ctx context.Context) error {
	s.hash.SetSeed(maphash.MakeSeed())
	tries := max(0, s.far.Retries) + 1
	for failed := 0; ; {
		before := s.have
		err := s.once(ctx)
		if err == nil {
			return nil
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if s.have > before {
			failed = 0
		}
		verdict, after := s.o.Judge(err)
		failed++
		switch {
		case verdict == retry.Changed:
			return fault.New(fault.ErrCorrupt, "changed while it was read: %v", err)
		case verdict == retry.Never || failed >= tries:
			if fault.Classed(err) {
				return err
			}
			return fault.New(fault.ErrIO, "%v (after %d attempts)", err, failed)
		}
		if err := retry.Pause(ctx, failed, after); err != nil {
			return err
		}
	}
}

// once is one GET.
func (s *spool) once(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	stall := fault.New(fault.ErrTimeout, "no progress in %v", s.far.Timeout)
	watchdog := time.AfterFunc(s.far.Timeout, func() { cancel(stall) })
	defer watchdog.Stop()
	named := func(err error) error {
		if context.Cause(ctx) == stall {
			return &wrong{stall.Error()} // worth another try
		}
		return err
	}
	h := http.Header{}
	first := !s.pinned
	if !first {
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
	if first {
		s.pinned = true
		s.o.etag, s.o.modified = resp.Header.Get("ETag"), resp.Header.Get("Last-Modified")
		if length >= 0 {
			s.change(func() { s.size = length })
		}
	} else if err := s.o.same(resp); err != nil {
		return err
	} else if s.size >= 0 && length >= 0 && length != s.size {
		return &changed{fmt.Sprintf("it had %d bytes and has %d", s.size, length)}
	}
	var again maphash.Hash
	again.SetSeed(s.hash.Seed())
	buf := make([]byte, 256<<10)
	seen := int64(0)
	for {
		n, err := resp.Body.Read(buf)
		b := buf[:n]
		seen += int64(n)
		if n > 0 {
			watchdog.Reset(s.far.Timeout)
		}
		if old := min(int64(n), s.have-(seen-int64(n))); old > 0 {
			_, _ = again.Write(b[:old])
			b = b[old:]
			if seen >= s.have && again.Sum64() != s.hash.Sum64() {
				return &changed{"its bytes are others"}
			}
		}
		if len(b) > 0 {
			if _, err := s.file.WriteAt(b, s.have); err != nil {
				return fault.FromOS(err)
			}
			_, _ = s.hash.Write(b)
			s.change(func() { s.have += int64(len(b)) })
		}
		switch {
		case err == io.EOF && seen < s.have:
			return &changed{"it is shorter now"}
		case err == io.EOF:
			if length >= 0 && seen != length {
				return io.ErrUnexpectedEOF
			}
			s.change(func() { s.size = s.have })
			return nil
		case err != nil:
			return named(err)
		}
	}
}
