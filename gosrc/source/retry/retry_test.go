package retry

import (
	"bytes"
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/spawn/spawntest"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/source/sourcetest"
)

var (
	errNever   = errors.New("never")
	errAgain   = errors.New("again")
	errChanged = errors.New("changed")
)

// store is a fetcher of bytes in memory. fault, if set, returns the body of the nth request.
type store struct {
	data  []byte
	n     atomic.Int64
	fault func(n int64, off int64, body []byte) (io.Reader, error)
	open  atomic.Int64
	peak  atomic.Int64
}

func (s *store) URI() string  { return "mem://x?secret" }
func (s *store) Size() int64  { return int64(len(s.data)) }
func (s *store) Close() error { return nil }

func (s *store) Judge(err error) (Verdict, time.Duration) {
	switch {
	case errors.Is(err, errNever):
		return Never, 0
	case errors.Is(err, errChanged):
		return Changed, 0
	}
	return Again, 0
}

func (s *store) Fetch(ctx context.Context, off, n int64) (io.ReadCloser, error) {
	var r io.Reader = bytes.NewReader(s.data[off : off+n])
	nth := s.n.Add(1)
	if s.fault != nil {
		var err error
		if r, err = s.fault(nth, off, s.data[off:off+n]); err != nil {
			return nil, err
		}
	}
	now := s.open.Add(1)
	for p := s.peak.Load(); now > p && !s.peak.CompareAndSwap(p, now); p = s.peak.Load() {
	}
	return &body{ctx, r, s, sync.Once{}}, nil
}

type body struct {
	ctx  context.Context
	r    io.Reader
	s    *store
	once sync.Once
}

func (b *body) Read(p []byte) (int, error) {
	if b.ctx.Err() != nil {
		return 0, b.ctx.Err()
	}
	return b.r.Read(p)
}

func (b *body) Close() error {
	b.once.Do(func() { b.s.open.Add(-1) })
	return nil
}

// hang is a reader that waits until its request ends.
type hang struct{ ctx context.Context }

func (h hang) Read([]byte) (int, error) {
	<-h.ctx.Done()
	return 0, h.ctx.Err()
}

type failing struct{ err error }

func (f failing) Read([]byte) (int, error) { return 0, f.err }

func random(n int) []byte {
	b := make([]byte, n)
	r := rand.New(rand.NewPCG(3, 4))
	for i := range b {
		b[i] = byte(r.Uint32())
	}
	return b
}

// timeout is Parse's default.
const timeout = 30 * time.Second

func TestSuite(t *testing.T) {
	sourcetest.Suite(t, sourcetest.Is{Remote: true, Stepped: true}, func(t *testing.T, data []byte) source.Source {
		return New(&store{data: data}, Options{Retries: 8, Timeout: timeout, Range: 1})
	})
	if n := spawntest.Left(); len(n) != 0 {
		t.Errorf("left: %v", n)
	}
}

// After any kind of failure at any offset, the bytes are correct and no byte is received twice.
func TestResumes(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 1))
	var mu sync.Mutex
	s := &store{data: random(1 << 20)}
	var asked atomic.Int64
	s.fault = func(n, off int64, b []byte) (io.Reader, error) {
		mu.Lock()
		kind, cut := r.IntN(5), r.IntN(len(b)+1)
		mu.Unlock()
		switch kind {
		case 0:
			return nil, errAgain
		case 1: // cut
			asked.Add(int64(cut))
			return io.MultiReader(bytes.NewReader(b[:cut]), failing{io.ErrUnexpectedEOF}), nil
		case 2: // ends early, and says so
			asked.Add(int64(cut))
			return bytes.NewReader(b[:cut]), nil
		}
		asked.Add(int64(len(b)))
		return bytes.NewReader(b), nil
	}
	src := New(s, Options{Retries: 40, Timeout: timeout, base: time.Millisecond})
	defer src.Close()
	total := int64(0)
	for range 40 {
		n := 1 + r.IntN(60_000)
		off := r.IntN(len(s.data) - n)
		p := make([]byte, n)
		if err := src.ReadAt(context.Background(), p, int64(off)); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(p, s.data[off:off+n]) {
			t.Fatalf("%d bytes at %d differ", n, off)
		}
		total += int64(n)
	}
	if asked.Load() != total {
		t.Errorf("received %d bytes, but %d were requested", asked.Load(), total)
	}
}

// A body that stops, or delivers almost nothing, is closed after Timeout and resumed on another connection. If
// no attempt makes progress, the read ends with ErrTimeout.
func TestStall(t *testing.T) { synctest.Test(t, stall) }

func stall(t *testing.T) {
	s := &store{data: random(500_000)}
	var first sync.Once
	src := New(s, Options{Retries: 8, Timeout: timeout})
	ctx := context.Background()
	s.fault = func(n, off int64, b []byte) (io.Reader, error) {
		out := io.Reader(bytes.NewReader(b))
		first.Do(func() { out = io.MultiReader(bytes.NewReader(b[:100_000]), slow{}) })
		return out, nil
	}
	p := make([]byte, len(s.data))
	if err := src.ReadAt(ctx, p, 0); err != nil || !bytes.Equal(p, s.data) {
		t.Fatal(err)
	}
	if n := s.n.Load(); n != 2 {
		t.Errorf("%d requests", n)
	}
	src.Close()

	src = New(s, Options{Retries: 2, Timeout: timeout})
	s.fault = func(n, off int64, b []byte) (io.Reader, error) { return slow{}, nil }
	if err := src.ReadAt(ctx, p, 0); !errors.Is(err, errs.ErrTimeout) || strings.Contains(err.Error(), "secret") {
		t.Errorf("%v, want ErrTimeout", err)
	}
	src.Close()
}

// slow waits and returns no bytes.
type slow struct{}

func (slow) Read(p []byte) (int, error) {
	time.Sleep(time.Second)
	return 0, nil
}

func TestVerdicts(t *testing.T) {
	for _, c := range []struct {
		err      error
		class    error
		requests int64
	}{
		{errNever, errs.ErrIO, 1},
		{errs.New(errs.ErrPermission, "no"), errs.ErrPermission, 3},
		{errChanged, errs.ErrCorrupt, 1},
		{errAgain, errs.ErrIO, 3},
	} {
		s := &store{data: random(100)}
		s.fault = func(n, off int64, b []byte) (io.Reader, error) { return nil, c.err }
		src := New(s, Options{Retries: 2, Timeout: timeout, base: time.Millisecond})
		if err := src.ReadAt(context.Background(), make([]byte, 10), 5); !errors.Is(err, c.class) {
			t.Errorf("%v: %v, want %v", c.err, err, c.class)
		}
		if n := s.n.Load(); n != c.requests {
			t.Errorf("%v: %d requests, want %d", c.err, n, c.requests)
		}
		src.Close()
	}
}

// A body with one byte too many is an invalid response and does not count as progress. This holds for any length and
// for any number of steps.
func TestTooLong(t *testing.T) {
	s := &store{data: random(4 * Progress)}
	s.fault = func(n, off int64, b []byte) (io.Reader, error) {
		if n > 100 {
			return nil, errNever
		}
		return bytes.NewReader(append(b[:len(b):len(b)], 1)), nil
	}
	for _, size := range []int64{10, Progress, 4 * Progress} {
		for _, steps := range []int64{1, 2} {
			s.n.Store(0)
			src := New(s, Options{Retries: 2, Timeout: timeout, Range: 1, base: time.Millisecond})
			r, err := src.OpenRange(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			err = r.Begin(t.Context(), 0, size)
			for range steps {
				if err == nil {
					err = r.Next(make([]byte, size/steps))
				}
			}
			if n := s.n.Load(); !errors.Is(err, errs.ErrIO) || n != 3 {
				t.Errorf("%d bytes in %d steps: %v after %d requests", size, steps, err, n)
			}
			_, _ = r.Close(), src.Close()
		}
	}
}

// Cancel and Close immediately end a read that hangs.
func TestEnds(t *testing.T) {
	s := &store{data: random(100)}
	s.fault = func(n, off int64, b []byte) (io.Reader, error) { return nil, nil }
	for _, end := range []string{"cancel", "close"} {
		hung := &hangs{store: s, in: make(chan struct{})}
		src := New(hung, Options{Retries: 8, Timeout: timeout})
		ctx, cancel := context.WithCancelCause(context.Background())
		got := make(chan error, 1)
		go func() { got <- src.ReadAt(ctx, make([]byte, 10), 0) }()
		<-hung.in
		want := errs.ErrCancelled
		if end == "close" {
			want = errs.ErrArgument
			src.Close()
		} else {
			cancel(errs.ErrCancelled)
		}
		select {
		case err := <-got:
			if !errors.Is(err, want) {
				t.Errorf("%s: %v, want %v", end, err, want)
			}
		case <-time.After(time.Minute):
			t.Fatal(end, "hangs")
		}
		src.Close()
		cancel(nil)
	}
}

type hangs struct {
	*store
	in chan struct{}
}

func (h *hangs) Fetch(ctx context.Context, off, n int64) (io.ReadCloser, error) {
	close(h.in)
	return io.NopCloser(hang{ctx}), nil
}

// The number of open ranges is limited, an overloaded store gets fewer, and no permit is lost.
func TestLimiter(t *testing.T) {
	s := &store{data: random(1 << 20)}
	src := New(s, Options{Retries: 8, Timeout: timeout, Connections: 3})
	var wg sync.WaitGroup
	for off := range int64(10) {
		wg.Add(1)
		go func() {
			defer wg.Done()
			if err := src.ReadAt(context.Background(), make([]byte, 100_000), off*100_000); err != nil {
				t.Error(err)
			}
		}()
	}
	wg.Wait()
	if p := s.peak.Load(); p > 3 || p < 1 {
		t.Errorf("%d open ranges, want 1 to 3", p)
	}
	src.limit.halveLimit()
	if src.limit.limit != 1 || src.limit.open != 0 {
		t.Errorf("%d of %d open", src.limit.open, src.limit.limit)
	}
	// A waiter leaves the queue when its context ends.
	if err := src.limit.acquire(context.Background()); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Millisecond)
	defer cancel()
	if err := src.limit.acquire(ctx); err == nil {
		t.Error("granted two permits, but the limit is 1")
	}
	src.limit.releasePermit()
	if err := src.limit.acquire(context.Background()); err != nil {
		t.Error(err)
	}
	src.limit.releasePermit()
	src.Close()
}

// A broken range resumes before ranges that wait for a permit, because its reader may hold resources that they
// need. A range without a response queues after them.
func TestTurns(t *testing.T) {
	s := &store{data: random(100)}
	refuse := false
	s.fault = func(n, off int64, b []byte) (io.Reader, error) {
		switch {
		case refuse && off == 0:
			return nil, errAgain
		case n == 1:
			return bytes.NewReader(b[:20]), nil
		}
		return bytes.NewReader(b), nil
	}
	src := New(s, Options{Retries: 8, Timeout: timeout, Connections: 1, base: time.Millisecond})
	defer src.Close()
	one, err := sourcetest.Begin(t.Context(), src, 0, 50)
	if err != nil {
		t.Fatal(err)
	}
	p := make([]byte, 50)
	if err := one.Next(p[:10]); err != nil {
		t.Fatal(err)
	}
	second := make(chan error)
	go func() { second <- src.ReadAt(t.Context(), make([]byte, 50), 50) }()
	for src.limit.queued() == 0 {
		time.Sleep(time.Millisecond)
	}
	if err := one.Next(p[10:]); err != nil || !bytes.Equal(p, s.data[:50]) {
		t.Errorf("%v, or wrong bytes", err)
	}
	if err := <-second; err != nil || s.n.Load() != 3 {
		t.Errorf("%v after %d requests, 1 of them a resume", err, s.n.Load())
	}
	_ = one.Close()

	refuse = true
	go func() { second <- src.ReadAt(t.Context(), p, 0) }()
	for s.n.Load() < 5 {
		time.Sleep(time.Millisecond)
	}
	if err := src.ReadAt(t.Context(), make([]byte, 50), 50); err != nil {
		t.Error(err)
	}
	if err := <-second; !errors.Is(err, errs.ErrIO) || src.limit.open != 0 {
		t.Errorf("%v, %d open", err, src.limit.open)
	}
}

// An unused permit passes to the next range, and a closed source grants none.
func TestPermitUnused(t *testing.T) {
	s := &store{data: random(100)}
	src := New(s, Options{Retries: 8, Timeout: timeout, Connections: 1})
	one, err := src.OpenRange(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	done := make(chan error)
	wait := func(ctx context.Context) {
		_, err := src.OpenRange(ctx)
		done <- err
	}
	go wait(ctx)
	for src.limit.queued() == 0 {
		time.Sleep(time.Millisecond)
	}
	cancel(errs.ErrCancelled)
	if err := <-done; !errors.Is(err, errs.ErrCancelled) {
		t.Errorf("%v, want ErrCancelled", err)
	}
	_ = one.Close()
	_ = one.Close()
	if one, err = src.OpenRange(t.Context()); err != nil || src.limit.open != 1 || s.n.Load() != 0 {
		t.Errorf("%v, %d open, %d requests", err, src.limit.open, s.n.Load())
	}
	go wait(t.Context())
	for src.limit.queued() == 0 {
		time.Sleep(time.Millisecond)
	}
	src.Close()
	if err := <-done; !errors.Is(err, errs.ErrArgument) {
		t.Errorf("%v, want ErrArgument", err)
	}
	_ = one.Close()
}

// A range reports once how long it waited for its permit and for its response.
func TestWaited(t *testing.T) { synctest.Test(t, waited) }

func waited(t *testing.T) {
	const pause = time.Second
	s := New(&store{data: random(100), fault: func(_, _ int64, b []byte) (io.Reader, error) {
		time.Sleep(pause)
		return bytes.NewReader(b), nil
	}}, Options{Retries: 8, Timeout: timeout, Connections: 1})
	defer s.Close()
	one, err := sourcetest.Begin(t.Context(), s, 0, 50) // takes the only permit
	if err != nil {
		t.Fatal(err)
	}
	if permit, answer := one.Waited(); permit != 0 || answer != pause {
		t.Errorf("first range: waited %v for its permit, %v for its response", permit, answer)
	}
	var two source.Range
	done := make(chan error, 1)
	go func() {
		var err error
		two, err = sourcetest.Begin(t.Context(), s, 50, 50)
		done <- err
	}()
	for s.limit.queued() == 0 {
		time.Sleep(time.Millisecond)
	}
	time.Sleep(pause)
	_ = one.Close()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	defer two.Close()
	if permit, answer := two.Waited(); permit < pause || answer != pause {
		t.Errorf("second range: waited %v for its permit, %v for its response", permit, answer)
	}
	if permit, answer := two.Waited(); permit != 0 || answer != 0 {
		t.Errorf("second call of Waited: %v, %v", permit, answer)
	}
}

func (l *limiter) queued() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.waiting)
}

// A store that never responds is asked OpenTries times. A store that reports that it is busy is asked as often
// as retries permit. No store is asked more often.
func TestOpenTries(t *testing.T) { synctest.Test(t, openTries) }

func openTries(t *testing.T) {
	silent, busy := errors.New("connection refused"), errors.New("503")
	judge := func(err error) (Verdict, time.Duration) {
		if errors.Is(err, busy) {
			return Busy, 0
		}
		return Again, 0
	}
	hang := func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }
	answer := func(err error) func(context.Context) error {
		return func(context.Context) error { return err }
	}
	for _, c := range []struct {
		name    string
		retries int
		answers []func(context.Context) error // the last one repeats
		want    int
		class   error
	}{
		{"hangs", 8, []func(context.Context) error{hang}, OpenTries, errs.ErrTimeout},
		{"refuses", 8, []func(context.Context) error{answer(silent)}, OpenTries, errs.ErrIO},
		{"hangs and refuses", 8, []func(context.Context) error{hang, answer(silent), hang, hang}, OpenTries, errs.ErrTimeout},
		{"is busy", 8, []func(context.Context) error{answer(busy)}, 9, errs.ErrIO},
		{"is busy and hangs", 8, []func(context.Context) error{answer(busy), hang, answer(busy), hang}, 5, errs.ErrTimeout},
		{"no retries", 0, []func(context.Context) error{hang}, 1, errs.ErrTimeout},
		{"one retry", 1, []func(context.Context) error{hang}, 2, errs.ErrTimeout},
	} {
		asked := 0
		err := Do(t.Context(), Options{Retries: c.retries, Timeout: timeout}, judge, func(ctx context.Context) error {
			asked++
			return c.answers[min(asked, len(c.answers))-1](ctx)
		})
		if asked != c.want || !errors.Is(err, c.class) {
			t.Errorf("%s: asked %d times, want %d; %v", c.name, asked, c.want, err)
		}
	}
}
