package spool

import (
	"bytes"
	"context"
	"errors"
	"testing"
	"time"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/spawn"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/source/sourcetest"
)

func made(t *testing.T) *File {
	t.Helper()
	f, err := New("x", source.Outline{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}

// A spool passes the common suite while it is being filled.
func TestSuite(t *testing.T) {
	sourcetest.Suite(t, sourcetest.Is{Remote: true, InOrder: true}, func(t *testing.T, data []byte) source.Source {
		f := made(t)
		f.Expect(int64(len(data)))
		done := make(chan struct{})
		t.Cleanup(func() { <-done })
		spawn.Go("test", func() {
			defer close(done)
			for _, part := range [][]byte{data[:1], data[1:100_000], data[100_000:]} {
				if f.Append(part) != nil {
					return // closed in the meantime
				}
			}
			f.End(nil)
		})
		return f
	})
}

// Reads of missing bytes fail, and the bytes before them can be read. A waiting reader returns after End, Close
// or the end of its context.
func TestEnds(t *testing.T) {
	ctx := context.Background()
	f := made(t)
	if err := errors.Join(f.Append([]byte("abc"))); err != nil {
		t.Fatal(err)
	}
	f.Expect(10)
	f.End(nil)
	p := make([]byte, 3)
	if err := f.ReadAt(ctx, p, 0); err != nil || !bytes.Equal(p, []byte("abc")) {
		t.Error(err)
	}
	if err := f.ReadAt(ctx, p, 2); !errors.Is(err, errs.ErrCorrupt) {
		t.Errorf("%v", err)
	}
	f = made(t)
	soon, cancel := context.WithTimeoutCause(ctx, 20*time.Millisecond, errs.ErrCancelled)
	defer cancel()
	if err := f.Sized(soon); !errors.Is(err, errs.ErrCancelled) {
		t.Errorf("%v", err)
	}
	time.AfterFunc(20*time.Millisecond, func() { f.End(errs.ErrIO) })
	if err := f.Sized(ctx); !errors.Is(err, errs.ErrIO) {
		t.Errorf("%v", err)
	}
	f = made(t)
	time.AfterFunc(20*time.Millisecond, func() { f.Close() })
	if err := f.Sized(ctx); !errors.Is(err, errs.ErrArgument) {
		t.Errorf("%v", err)
	}
}

// An object larger than the free space is refused immediately. An object without a stated size may use half of
// the free space and at most the outline's limit.
func TestBounds(t *testing.T) {
	block := make([]byte, 1000)
	f := made(t)
	if f.free <= 0 {
		t.Error("the temporary folder has no free space:", f.free)
	}
	f.free = 3000
	if err := f.Append(block); err != nil {
		t.Fatal(err)
	}
	if err := f.Append(block); !errors.Is(err, errs.ErrIO) || f.Have() != 1000 {
		t.Error(err, f.Have())
	}
	f.Expect(2000) // now the size is stated
	if err := f.Append(block); err != nil {
		t.Error(err)
	}
	f = made(t)
	f.free = 1500
	f.Expect(2000)
	if err := f.Append(block[:1]); !errors.Is(err, errs.ErrIO) || f.Have() != 0 {
		t.Error(err, f.Have())
	}
	g, err := New("x", source.Outline{Most: 1500})
	if err != nil {
		t.Fatal(err)
	}
	defer g.Close()
	if err := g.Append(block); err != nil {
		t.Fatal(err)
	}
	if err := g.Append(block); !errors.Is(err, errs.ErrFormat) || g.Have() != 1000 {
		t.Error(err, g.Have())
	}
}
