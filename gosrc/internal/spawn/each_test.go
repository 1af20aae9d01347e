package spawn_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/spawn"
	"github.com/overwire/overwire/gosrc/internal/spawn/spawntest"
)

// Each makes one call per number, at most as many in parallel as there are workers, and returns the error of
// the lowest number that failed. No call runs after it returns.
func TestEach(t *testing.T) {
	ctx := context.Background()
	var now, most, calls atomic.Int64
	if err := spawn.Each(ctx, "test", 3, 100, func(int) error {
		n := now.Add(1)
		defer now.Add(-1)
		for m := most.Load(); n > m && !most.CompareAndSwap(m, n); m = most.Load() {
		}
		calls.Add(1)
		return nil
	}); err != nil || calls.Load() != 100 || most.Load() > 3 {
		t.Fatalf("%v, %d calls, %d in parallel", err, calls.Load(), most.Load())
	}
	bad := errors.New("bad")
	for range 50 {
		if err := spawn.Each(ctx, "test", 4, 40, func(i int) error {
			if i >= 2 {
				return errors.New("later")
			}
			if i == 1 {
				return bad
			}
			return nil
		}); !errors.Is(err, bad) {
			t.Fatal(err)
		}
	}
	if err := spawn.Each(ctx, "test", 4, 0, func(int) error { return bad }); err != nil {
		t.Fatal(err)
	}
}

// Each ends with its context or a panic, and no worker remains.
func TestEachEnds(t *testing.T) {
	quiet(t)
	ctx, cancel := context.WithCancelCause(context.Background())
	why := errs.New(errs.ErrCancelled, "enough")
	var calls, before atomic.Int64
	err := spawn.Each(ctx, "test", 3, 1<<30, func(i int) error {
		if calls.Add(1) == 100 {
			cancel(why)
			before.Store(calls.Load())
		}
		return nil
	})
	// The other two workers may have checked ctx before it ended.
	if late := calls.Load() - before.Load(); !errors.Is(err, why) || late > 2 {
		t.Errorf("%v after %d calls, %d of them late", err, calls.Load(), late)
	}
	if err := spawn.Each(context.Background(), "test", 3, 1<<30, func(i int) error {
		if i == 100 {
			panic("planted")
		}
		return nil
	}); !errors.Is(err, errs.ErrEngine) {
		t.Errorf("%v", err)
	}
	if n := spawntest.Left(); len(n) != 0 {
		t.Error(n)
	}
}

// Every worker has a different number. An error of a worker is reported while the others run.
func TestWorkers(t *testing.T) {
	for _, n := range []int{0, 1, 5} {
		var all, at atomic.Int64
		failed := make(chan error, 1)
		bad := errors.New("bad")
		spawn.Workers("test", n, func(err error) { failed <- err }, func(w int) error {
			all.Add(1)
			at.Add(1 << (4 * w))
			if w == max(0, n-1) {
				return bad
			}
			if w == 0 {
				failed <- <-failed // waits for the last worker's error
			}
			return nil
		})
		if want := int64(max(1, n)); all.Load() != want || at.Load() != (1<<(4*want)-1)/15 || <-failed != bad {
			t.Errorf("%d workers: %d, %#x", n, all.Load(), at.Load())
		}
	}
}
