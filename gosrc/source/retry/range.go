package retry

import (
	"context"
	"fmt"
	"io"
	"time"

	"github.com/overwire/overwire/gosrc/fault"
	"github.com/overwire/overwire/gosrc/source"
)

// RangeBytes is what stores recommend for one range: at 100 MB/s a connection it
// takes four times the 20 ms after which they answer.
const RangeBytes = 8 << 20

// Ranged is how many bytes a range best has that is read in steps: so many
// that a round trip is lost in them. 0: steps cost what ranges do.
func (s *Source) Ranged() int64 { return s.opt.Range }

// Range begins to read n bytes from off in steps; see source.Ranged.
func (s *Source) Range(ctx context.Context, off, n int64) (source.Range, error) {
	return s.open(ctx, off, n)
}

// A span is a range that is read in order, by one goroutine. It has a permit
// while its body is open: what its reader does between two steps is time in
// which the kernel takes in the next.
type span struct {
	s        *Source
	ctx      context.Context // the caller's, and the source's
	cancel   context.CancelCauseFunc
	unhook   func() bool
	off, end int64
	failed   int // in a row
	waited   [2]time.Duration

	// Of the body that is open, if one is.
	body  io.ReadCloser
	about context.Context
	drop  context.CancelCauseFunc
	dog   *time.Timer
	got   int64
}

func (s *Source) open(ctx context.Context, off, n int64) (*span, error) {
	if off < 0 || n < 0 || off > s.Size() || n > s.Size()-off {
		return nil, s.at(off, fault.New(fault.ErrCorrupt, "truncated: %d bytes wanted, the object has %d", n, s.Size()))
	}
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	if s.ctx.Err() != nil {
		return nil, s.at(off, context.Cause(s.ctx))
	}
	r := &span{s: s, off: off, end: off + n}
	r.ctx, r.cancel = context.WithCancelCause(ctx)
	r.unhook = context.AfterFunc(s.ctx, func() { r.cancel(s.at(off, context.Cause(s.ctx))) })
	return r, nil
}

// Close gives up what was not read.
func (r *span) Close() error {
	r.shut()
	r.unhook()
	r.cancel(nil)
	return nil
}

// Waited tells what was waited for; see source.Waiter.
func (r *span) Waited() (turn, answer time.Duration) {
	turn, answer = r.waited[0], r.waited[1]
	r.waited = [2]time.Duration{}
	return turn, answer
}

// Next fills p with what comes next.
func (r *span) Next(p []byte) error {
	s := r.s
	if r.ctx.Err() != nil {
		return context.Cause(r.ctx)
	}
	if int64(len(p)) > r.end-r.off {
		return s.at(r.off, fault.New(fault.ErrEngine, "%d bytes wanted of a range that has %d left", len(p), r.end-r.off))
	}
	for r.off < r.end {
		n, err := r.read(p)
		p, r.off = p[n:], r.off+int64(n)
		s.counts[2].Add(int64(n))
		if err == nil {
			return nil
		}
		got := r.got
		r.shut()
		if r.ctx.Err() != nil {
			return context.Cause(r.ctx)
		}
		if n > 0 && len(p) == 0 {
			return nil // every byte is here: what ails the connection is nobody's trouble
		}
		verdict, after := s.judge(err)
		switch {
		case verdict == Changed:
			return s.at(r.off, fault.New(fault.ErrCorrupt, "changed while it was read: %v", err))
		case verdict == Never:
			return s.at(r.off, classed(err))
		case got >= s.opt.Floor:
			r.failed = 0
		}
		if r.failed++; r.failed > s.opt.Retries {
			return s.at(r.off, fmt.Errorf("%w (after %d attempts)", classed(err), r.failed))
		}
		if after > 0 {
			s.limit.overloaded()
		}
		if err := pause(r.ctx, s.opt.base, r.failed, after); err != nil {
			return err
		}
		s.counts[1].Add(1)
	}
	return nil
}

// read reads on in the body, opening one if there is none, until p is full or
// the body breaks.
func (r *span) read(p []byte) (int, error) {
	s := r.s
	if r.body == nil {
		asked := time.Now()
		if err := s.limit.acquire(r.ctx); err != nil {
			return 0, err
		}
		begun := time.Now()
		r.waited[0] += begun.Sub(asked)
		r.got = 0
		r.about, r.drop = context.WithCancelCause(r.ctx)
		drop := r.drop
		r.dog = time.AfterFunc(s.opt.Timeout, func() { drop(errStalled) })
		s.counts[0].Add(1)
		body, err := s.f.Fetch(r.about, r.off, r.end-r.off)
		r.waited[1] += time.Since(begun)
		if err != nil {
			err = stalled(r.about, err)
			r.release()
			return 0, err
		}
		r.body = body
	}
	r.dog.Reset(s.opt.Timeout)
	got, mark := 0, 0
	for got < len(p) {
		n, err := r.body.Read(p[got:])
		got += n
		r.got += int64(n)
		s.limit.bytes.Add(int64(n))
		if err == io.EOF {
			if r.off+int64(got) < r.end {
				return got, fmt.Errorf("%w: %d bytes before its end", errShort, r.end-r.off-int64(got))
			}
			r.shut()
			return got, nil
		}
		if err != nil {
			return got, stalled(r.about, &broken{err})
		}
		if int64(got-mark) >= s.opt.Floor {
			mark = got
			r.dog.Reset(s.opt.Timeout)
		}
	}
	if r.off+int64(got) < r.end {
		r.dog.Stop()
		return got, nil
	}
	// A body says that it ends, so that its connection can serve again.
	var more [1]byte
	if n, _ := r.body.Read(more[:]); n > 0 {
		s.Wasted(1)
		return 0, errLong
	}
	r.shut()
	return got, nil
}

// shut closes the body, if one is open.
func (r *span) shut() {
	if r.body != nil {
		_ = r.body.Close()
		r.body = nil
		r.release()
	}
}

// release ends what belongs to one body.
func (r *span) release() {
	r.dog.Stop()
	r.drop(nil)
	r.s.limit.release()
}
