// Package sourcetest is the suite that every source passes, a source in memory,
// and a source that fails on demand.
package sourcetest

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/overwire/overwire/gosrc/fault"
	"github.com/overwire/overwire/gosrc/source"
)

// Mem is a source in memory.
type Mem struct {
	Name string
	Data []byte
}

// URI is the name.
func (m *Mem) URI() string { return m.Name }

// Size is the length of the data.
func (m *Mem) Size() int64 { return int64(len(m.Data)) }

// ReadAt copies.
func (m *Mem) ReadAt(ctx context.Context, p []byte, off int64) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if off < 0 || off > m.Size() || int64(len(p)) > m.Size()-off {
		return &fault.At{Verb: "read", Source: m.Name, Chunk: -1, Offset: off, Err: fault.New(fault.ErrCorrupt, "truncated")}
	}
	copy(p, m.Data[off:])
	return nil
}

// Close does nothing.
func (m *Mem) Close() error { return nil }

// Faulty passes calls on to a source and fails the nth read, counted from 1,
// with Err; or blocks it until its context ends if Err is nil.
type Faulty struct {
	source.Source
	N    int64
	Err  error
	seen atomic.Int64
}

// ReadAt fails or blocks when its turn has come.
func (f *Faulty) ReadAt(ctx context.Context, p []byte, off int64) error {
	if f.seen.Add(1) == f.N {
		if f.Err != nil {
			return &fault.At{Verb: "read", Source: f.URI(), Chunk: -1, Offset: off, Err: f.Err}
		}
		<-ctx.Done()
		return context.Cause(ctx)
	}
	return f.Source.ReadAt(ctx, p, off)
}

// Reads counts the reads so far.
func (f *Faulty) Reads() int64 { return f.seen.Load() }

// Steps makes a source one that hands ranges over in steps.
type Steps struct {
	source.Source
	ranges, open atomic.Int64
}

// Ranged is any number: how much a range has is the caller's to say.
func (s *Steps) Ranged() int64 { return 1 << 20 }

// AtOnce is some number.
func (s *Steps) AtOnce() int { return 4 }

// Turn gives a range at once.
func (s *Steps) Turn(context.Context) (source.Range, error) {
	s.open.Add(1)
	return &steps{s: s}, nil
}

// Ranges counts the ranges so far, and those that were not closed.
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
		return fault.New(fault.ErrEngine, "%d bytes of a range that has %d left", len(p), r.end-r.at)
	}
	r.at += int64(len(p))
	return r.s.ReadAt(r.ctx, p, r.at-int64(len(p)))
}

func (r *steps) Close() error {
	r.s.open.Add(-1)
	return nil
}

// Begin gives a range that has begun.
func Begin(ctx context.Context, s source.Ranged, off, n int64) (source.Range, error) {
	g, err := s.Turn(ctx)
	if err != nil {
		return nil, err
	}
	if err := g.Begin(ctx, off, n); err != nil {
		_ = g.Close()
		return nil, err
	}
	return g, nil
}

// Suite holds a source to the contract of source.Source. open returns a fresh
// source of the given bytes.
func Suite(t *testing.T, open func(t *testing.T, data []byte) source.Source) {
	data := make([]byte, 300_001)
	r := rand.New(rand.NewPCG(1, 2))
	for i := range data {
		data[i] = byte(r.Uint32())
	}
	ctx := context.Background()

	t.Run("reads what was written, at any offset and length", func(t *testing.T) {
		s := open(t, data)
		defer s.Close()
		if s.Size() != int64(len(data)) {
			t.Fatalf("size %d, want %d", s.Size(), len(data))
		}
		for _, c := range []struct{ off, n int }{{0, 0}, {0, 1}, {0, len(data)}, {len(data), 0}, {len(data) - 1, 1}, {4095, 4098}, {65537, 131071}} {
			p := make([]byte, c.n)
			if err := s.ReadAt(ctx, p, int64(c.off)); err != nil {
				t.Fatalf("%d bytes at %d: %v", c.n, c.off, err)
			}
			if !bytes.Equal(p, data[c.off:c.off+c.n]) {
				t.Fatalf("%d bytes at %d differ", c.n, c.off)
			}
		}
	})
	t.Run("refuses to read past the end", func(t *testing.T) {
		s := open(t, data)
		defer s.Close()
		for _, off := range []int64{-1, int64(len(data)), int64(len(data)) - 1, 1 << 62} {
			if err := s.ReadAt(ctx, make([]byte, 2), off); !errors.Is(err, fault.ErrCorrupt) {
				t.Errorf("2 bytes at %d: %v, want ErrCorrupt", off, err)
			}
		}
	})
	t.Run("reads in parallel", func(t *testing.T) {
		s := open(t, data)
		defer s.Close()
		var wg sync.WaitGroup
		for g := range 8 {
			wg.Add(1)
			go func() {
				defer wg.Done()
				p := make([]byte, 1000)
				for i := range 50 {
					off := (g*7919 + i*4999) % (len(data) - len(p))
					if err := s.ReadAt(ctx, p, int64(off)); err != nil || !bytes.Equal(p, data[off:off+len(p)]) {
						t.Errorf("at %d: %v", off, err)
					}
				}
			}()
		}
		wg.Wait()
	})
	t.Run("obeys a cancelled context", func(t *testing.T) {
		s := open(t, data)
		defer s.Close()
		c, cancel := context.WithCancelCause(ctx)
		cancel(fault.ErrCancelled)
		if err := s.ReadAt(c, make([]byte, 10), 0); !errors.Is(err, fault.ErrCancelled) {
			t.Errorf("%v, want ErrCancelled", err)
		}
	})
	t.Run("gives ranges in steps of any size", func(t *testing.T) {
		src := open(t, data)
		defer src.Close()
		s, ok := src.(source.Ranged)
		if !ok || s.Ranged() == 0 {
			t.Skip("it has no use for steps")
		}
		r := rand.New(rand.NewPCG(3, 4))
		for range 30 {
			off := r.IntN(len(data))
			n := r.IntN(len(data) - off + 1)
			keep := n // some are given up
			if r.IntN(3) == 0 {
				keep = r.IntN(n + 1)
			}
			g, err := Begin(ctx, s, int64(off), int64(n))
			if err != nil {
				t.Fatal(err)
			}
			for at := 0; at < keep; {
				if err := g.Next(nil); err != nil { // more is on its way: nothing else
					t.Fatal(err)
				}
				p := make([]byte, min(1+r.IntN(100_000), keep-at))
				if err := g.Next(p); err != nil || !bytes.Equal(p, data[off+at:off+at+len(p)]) {
					t.Fatalf("%d bytes, %d after %d: %v, or other ones", len(p), at, off, err)
				}
				at += len(p)
			}
			if err := g.Next(nil); err != nil {
				t.Errorf("no bytes after %d of %d: %v", keep, n, err)
			}
			if err := g.Next(make([]byte, n-keep+1)); err == nil {
				t.Errorf("more than the %d bytes that are left", n-keep)
			}
			if err := g.Close(); err != nil {
				t.Error(err)
			}
		}
		for _, c := range []struct{ off, n int64 }{{-1, 2}, {0, int64(len(data)) + 1}, {1 << 62, 2}, {5, -1}} {
			if g, err := Begin(ctx, s, c.off, c.n); !errors.Is(err, fault.ErrCorrupt) {
				t.Errorf("a range of %d from %d: %v, %v", c.n, c.off, g, err)
			}
		}
		c, cancel := context.WithCancelCause(ctx)
		g, err := Begin(c, s, 0, 200_000)
		if err != nil || g.Next(make([]byte, 100_000)) != nil {
			t.Fatal(err)
		}
		cancel(fault.ErrCancelled)
		if err := g.Next(make([]byte, 100_000)); !errors.Is(err, fault.ErrCancelled) {
			t.Errorf("%v, want ErrCancelled", err)
		}
		g.Close()
	})
	t.Run("fails after Close, which may be repeated", func(t *testing.T) {
		s := open(t, data)
		for range 2 {
			if err := s.Close(); err != nil {
				t.Fatal(err)
			}
		}
		if err := s.ReadAt(ctx, make([]byte, 10), 0); err == nil {
			t.Error("a closed source reads")
		}
	})
}
