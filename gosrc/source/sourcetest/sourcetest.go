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
