package sourcetest

// Tests the contract that every source must satisfy.

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/source"
)

// Is lists the facts that a source must state.
type Is struct {
	Remote   bool
	InOrder  bool // one read at a time; other remote sources allow several
	Stepped  bool // has ranges that are read in steps
	File     bool
	Resident bool
	Known    bool // has an Identity
}

// A suite tests a source that open returns.
type suite struct {
	is   Is
	data []byte
	open func(t *testing.T, data []byte) source.Source
}

// Suite tests the contract of source.Source and the facts of a source. open returns a new source of the given
// bytes.
func Suite(t *testing.T, is Is, open func(t *testing.T, data []byte) source.Source) {
	data := make([]byte, 300_001)
	r := rand.New(rand.NewPCG(1, 2))
	for i := range data {
		data[i] = byte(r.Uint32())
	}
	s := &suite{is, data, open}
	t.Run("reads what was written, at any offset and length", s.reads)
	t.Run("refuses to read past the end", s.refuses)
	t.Run("reads in parallel", s.parallel)
	t.Run("obeys a cancelled context", s.cancelled)
	t.Run("reads ranges in steps of any size", s.steps)
	t.Run("states its facts", s.facts)
	t.Run("returns the same bytes from every kind of read", s.ways)
	t.Run("distinguishes its state from others", s.states)
	t.Run("fails after Close, which may be repeated", s.closed)
}

func (s *suite) reads(t *testing.T) {
	src := s.open(t, s.data)
	defer src.Close()
	n := len(s.data)
	if src.Size() != int64(n) {
		t.Fatalf("size %d, want %d", src.Size(), n)
	}
	for _, c := range []struct{ off, n int }{{0, 0}, {0, 1}, {0, n}, {n, 0}, {n - 1, 1}, {4095, 4098},
		{65537, 131071}} {
		p := make([]byte, c.n)
		if err := src.ReadAt(context.Background(), p, int64(c.off)); err != nil {
			t.Fatalf("%d bytes at %d: %v", c.n, c.off, err)
		}
		if !bytes.Equal(p, s.data[c.off:c.off+c.n]) {
			t.Fatalf("%d bytes at %d differ", c.n, c.off)
		}
	}
}

func (s *suite) refuses(t *testing.T) {
	src := s.open(t, s.data)
	defer src.Close()
	for _, off := range []int64{-1, int64(len(s.data)), int64(len(s.data)) - 1, 1 << 62} {
		if err := src.ReadAt(context.Background(), make([]byte, 2), off); !errors.Is(err, errs.ErrCorrupt) {
			t.Errorf("2 bytes at %d: %v, want ErrCorrupt", off, err)
		}
	}
}

func (s *suite) parallel(t *testing.T) {
	src := s.open(t, s.data)
	defer src.Close()
	var wg sync.WaitGroup
	for g := range 8 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			p := make([]byte, 1000)
			for i := range 50 {
				off := (g*7919 + i*4999) % (len(s.data) - len(p))
				if err := src.ReadAt(context.Background(), p, int64(off)); err != nil ||
					!bytes.Equal(p, s.data[off:off+len(p)]) {
					t.Errorf("at %d: %v", off, err)
				}
			}
		}()
	}
	wg.Wait()
}

func (s *suite) cancelled(t *testing.T) {
	src := s.open(t, s.data)
	defer src.Close()
	ctx, cancel := context.WithCancelCause(context.Background())
	cancel(errs.ErrCancelled)
	if err := src.ReadAt(ctx, make([]byte, 10), 0); !errors.Is(err, errs.ErrCancelled) {
		t.Errorf("%v, want ErrCancelled", err)
	}
}

func (s *suite) steps(t *testing.T) {
	src := s.open(t, s.data)
	defer src.Close()
	from := src.Facts().Ranges
	if from == nil {
		return // facts tests whether ranges are expected
	}
	ctx := context.Background()
	r := rand.New(rand.NewPCG(3, 4))
	for range 30 {
		off := r.IntN(len(s.data))
		n := r.IntN(len(s.data) - off + 1)
		keep := n // some are closed early
		if r.IntN(3) == 0 {
			keep = r.IntN(n + 1)
		}
		s.step(t, r, from, off, n, keep)
	}
	for _, c := range []struct{ off, n int64 }{{-1, 2}, {0, int64(len(s.data)) + 1}, {1 << 62, 2}, {5, -1}} {
		if g, err := Begin(ctx, from, c.off, c.n); !errors.Is(err, errs.ErrCorrupt) {
			t.Errorf("a range of %d bytes from %d: %v, %v", c.n, c.off, g, err)
		}
	}
	c, cancel := context.WithCancelCause(ctx)
	g, err := Begin(c, from, 0, 200_000)
	if err != nil || g.Next(make([]byte, 100_000)) != nil {
		t.Fatal(err)
	}
	cancel(errs.ErrCancelled)
	if err := g.Next(make([]byte, 100_000)); !errors.Is(err, errs.ErrCancelled) {
		t.Errorf("%v, want ErrCancelled", err)
	}
	g.Close()
}

// step reads keep bytes of a range of n bytes from off in steps, and closes the range.
func (s *suite) step(t *testing.T, r *rand.Rand, from source.Ranges, off, n, keep int) {
	g, err := Begin(context.Background(), from, int64(off), int64(n))
	if err != nil {
		t.Fatal(err)
	}
	for at := 0; at < keep; {
		if err := g.Next(nil); err != nil { // this must not consume any bytes
			t.Fatal(err)
		}
		p := make([]byte, min(1+r.IntN(100_000), keep-at))
		if err := g.Next(p); err != nil || !bytes.Equal(p, s.data[off+at:off+at+len(p)]) {
			t.Fatalf("%d bytes, %d after %d: %v, or wrong bytes", len(p), at, off, err)
		}
		at += len(p)
	}
	if err := g.Next(nil); err != nil {
		t.Errorf("reading no bytes after %d of %d: %v", keep, n, err)
	}
	if err := g.Next(make([]byte, n-keep+1)); err == nil {
		t.Errorf("no error for a read of more than the remaining %d bytes", n-keep)
	}
	if err := g.Close(); err != nil {
		t.Error(err)
	}
}

func (s *suite) facts(t *testing.T) {
	src := s.open(t, s.data)
	defer src.Close()
	f := src.Facts()
	got := Is{f.Remote, f.Concurrency == 1, f.Ranges != nil, f.File != nil, f.View != nil, f.Identity.Known()}
	if got != s.is {
		t.Errorf("the facts are %+v, want %+v", got, s.is)
	}
	if (f.Ranges != nil) != (f.RangeBytes > 0) ||
		f.Ranges != nil && (f.Ranges.AtOnce() < 1 || f.Ranges.AtOnce() > f.Concurrency) {
		t.Errorf("ranges of %d bytes, %v, concurrency %d", f.RangeBytes, f.Ranges, f.Concurrency)
	}
	if f.Concurrency < 0 || f.Remote && f.File == nil && f.Concurrency == 0 || f.Settled && !f.Identity.Known() {
		t.Errorf("concurrency %d, settled %v, identity %+v", f.Concurrency, f.Settled, f.Identity)
	}
	if again := src.Facts(); again.Identity != f.Identity || again.Concurrency != f.Concurrency ||
		again.RangeBytes != f.RangeBytes || again.Remote != f.Remote {
		t.Errorf("first facts %+v, later facts %+v", f, again)
	}
	only := f.ReadAtOnly()
	if only.File != nil || only.View != nil || only.Ranges != nil || only.RangeBytes != 0 || only.Remote != f.Remote ||
		only.Identity != f.Identity {
		t.Errorf("ReadAtOnly returned %+v", only)
	}
}

// ways compares the bytes from every other kind of read, and requests bytes outside the source.
func (s *suite) ways(t *testing.T) {
	src := s.open(t, s.data)
	f := src.Facts()
	n := int64(len(s.data))
	if f.Prefetch != nil {
		f.Prefetch(0, n) // a hint that affects only speed
		f.Prefetch(n-1, 1)
	}
	if f.View != nil {
		if b, err := f.View(100, n-100); err != nil || !bytes.Equal(b, s.data[100:]) {
			t.Errorf("a view: %v, or wrong bytes", err)
		}
		for _, c := range []struct{ off, n int64 }{{-1, 2}, {n, 1}, {0, n + 1}, {1 << 62, 1 << 62}, {5, -1}} {
			if _, err := f.View(c.off, c.n); !errors.Is(err, errs.ErrCorrupt) {
				t.Errorf("a view of %d bytes from %d: %v, want ErrCorrupt", c.n, c.off, err)
			}
		}
	}
	whole := func(fd int) error {
		p := make([]byte, n+1)
		if k, err := unix.Pread(fd, p, 0); err != nil || int64(k) != n || !bytes.Equal(p[:n], s.data) {
			t.Errorf("the file gives %d bytes, or wrong bytes: %v", k, err)
		}
		return nil
	}
	if f.File != nil {
		if err := f.File.WithFD(whole); err != nil {
			t.Error(err)
		}
		for _, how := range []string{"direct", "buffered", "auto"} {
			depth := f.File.Expect(1<<50, true, how)
			p := make([]byte, n)
			if err := src.ReadAt(context.Background(), p, 0); err != nil || !bytes.Equal(p, s.data) {
				t.Errorf("%s: %v, or wrong bytes", how, err)
			}
			if direct := f.File.DirectBytes(); depth < 0 || direct < 0 || direct > n ||
				how == "buffered" && (depth != 0 || direct != 0) {
				t.Errorf("%s: %d reads in flight, %d bytes by direct I/O", how, depth, direct)
			}
		}
	}
	if err := src.Close(); err != nil {
		t.Fatal(err)
	}
	if f.View != nil {
		if _, err := f.View(0, 1); err == nil {
			t.Error("no error for a view of a closed source")
		}
	}
	if f.File != nil && f.File.WithFD(whole) == nil {
		t.Error("no error for the descriptor of a closed source")
	}
	if f.Now != nil {
		if _, err := f.Now(); err == nil || f.Unchanged(f.Identity) {
			t.Error("a closed source reports its identity")
		}
	}
	if f.Ranges != nil {
		if g, err := Begin(context.Background(), f.Ranges, 0, 1); err == nil {
			_ = g.Close()
			t.Error("no error for a range of a closed source")
		}
	}
}

func (s *suite) states(t *testing.T) {
	src := s.open(t, s.data)
	defer src.Close()
	f := src.Facts()
	if f.Unchanged(f.Identity) != s.is.Known {
		t.Errorf("after opening, Unchanged is %v for %+v", !s.is.Known, f.Identity)
	}
	if f.Unchanged(source.Identity{}) || f.Unchanged(source.Identity{Size: 5, Object: "another", Pin: "pin"}) {
		t.Error("Unchanged is true for a different identity")
	}
	if !s.is.Known {
		return
	}
	if id := f.Identity; id.Size != src.Size() || (id.Object == "") != (id.Pin == "") ||
		(id.Object == "") != (id.Inode != 0) || f.File != nil && id.Inode == 0 {
		t.Errorf("%+v of %d bytes", f.Identity, src.Size())
	}
	other := s.open(t, append([]byte{'x'}, s.data...))
	defer other.Close()
	if id := other.Facts().Identity; id == f.Identity {
		t.Errorf("two states have the same identity %+v", id)
	}
}

func (s *suite) closed(t *testing.T) {
	src := s.open(t, s.data)
	for range 2 {
		if err := src.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if err := src.ReadAt(context.Background(), make([]byte, 10), 0); err == nil {
		t.Error("no error for a read of a closed source")
	}
}
