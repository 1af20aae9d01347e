// Package sourcetest has the test suite that every source must pass. It also has a source in memory and a
// source that fails on demand.
package sourcetest

import (
	"context"
	"sync/atomic"
	"time"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/source"
)

// Mem is a source in memory.
type Mem struct {
	Name string
	Data []byte
}

// URI returns the name.
func (m *Mem) URI() string { return m.Name }

// Size returns the length of the data.
func (m *Mem) Size() int64 { return int64(len(m.Data)) }

// ReadAt copies from the data.
func (m *Mem) ReadAt(ctx context.Context, p []byte, off int64) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if off < 0 || off > m.Size() || int64(len(p)) > m.Size()-off {
		return &errs.At{Verb: "read", Source: m.Name, Chunk: -1, Offset: off, Err: errs.New(errs.ErrCorrupt, "truncated")}
	}
	copy(p, m.Data[off:])
	return nil
}

// Facts returns no facts, so that callers only use ReadAt.
func (m *Mem) Facts() source.Facts { return source.Facts{} }

// Close does nothing.
func (m *Mem) Close() error { return nil }

// Faulty forwards calls to a source and fails the nth read, counted from 1, with Err. If Err is nil, that read
// blocks until its context ends.
type Faulty struct {
	source.Source
	N    int64
	Err  error
	seen atomic.Int64
}

// Facts permit only ReadAt, because other reads would not fail.
func (f *Faulty) Facts() source.Facts { return f.Source.Facts().ReadAtOnly() }

// ReadAt fails or blocks the nth read.
func (f *Faulty) ReadAt(ctx context.Context, p []byte, off int64) error {
	if f.seen.Add(1) == f.N {
		if f.Err != nil {
			return &errs.At{Verb: "read", Source: f.URI(), Chunk: -1, Offset: off, Err: f.Err}
		}
		<-ctx.Done()
		return context.Cause(ctx)
	}
	return f.Source.ReadAt(ctx, p, off)
}

// Reads counts the reads so far.
func (f *Faulty) Reads() int64 { return f.seen.Load() }

// Steps wraps a source and adds ranges that are read in steps.
type Steps struct {
	source.Source
	ranges, open atomic.Int64
}

// Facts returns facts with ranges of 1 MiB.
func (s *Steps) Facts() source.Facts {
	f := s.Source.Facts().ReadAtOnly()
	f.RangeBytes, f.Ranges = 1<<20, s
	return f
}

// AtOnce returns an arbitrary number.
func (s *Steps) AtOnce() int { return 4 }

// OpenRange returns a range immediately.
func (s *Steps) OpenRange(context.Context) (source.Range, error) {
	s.open.Add(1)
	return &steps{s: s}, nil
}

// Ranges returns the number of ranges so far and of those that were not closed.
func (s *Steps) Ranges() (all, open int64) { return s.ranges.Load(), s.open.Load() }

type steps struct {
	s       *Steps
	ctx     context.Context
	at, end int64
}

func (r *steps) Begin(ctx context.Context, off, n int64) error {
	r.s.ranges.Add(1)
	r.ctx, r.at, r.end = ctx, off, off+n
	return nil
}

func (r *steps) Next(p []byte) error {
	if int64(len(p)) > r.end-r.at {
		return errs.New(errs.ErrEngine, "%d bytes requested from a range with %d left", len(p), r.end-r.at)
	}
	r.at += int64(len(p))
	return r.s.ReadAt(r.ctx, p, r.at-int64(len(p)))
}

func (r *steps) Waited() (permit, answer time.Duration) { return 0, 0 }

func (r *steps) Close() error {
	r.s.open.Add(-1)
	return nil
}

// Begin opens and begins a range.
func Begin(ctx context.Context, s source.Ranges, off, n int64) (source.Range, error) {
	g, err := s.OpenRange(ctx)
	if err != nil {
		return nil, err
	}
	if err := g.Begin(ctx, off, n); err != nil {
		_ = g.Close()
		return nil, err
	}
	return g, nil
}
