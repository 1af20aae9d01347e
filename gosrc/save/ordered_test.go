package save

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/overwire/overwire/gosrc/fault"
	"github.com/overwire/overwire/gosrc/internal/spawn"
)

func TestOrdered(t *testing.T) {
	// Promise: every task is worked, has its turn in order and is flushed, each
	// once; never more than the window are under way.
	r := newRand(t)
	for range 200 {
		n, workers := r.IntN(200), 1+r.IntN(8)
		window := 1 + r.IntN(3*workers)
		var mu sync.Mutex
		did := make([]int, n)
		step := func(k, from int) error {
			mu.Lock()
			defer mu.Unlock()
			if did[k] != from {
				t.Errorf("task %d is at step %d, not %d", k, did[k], from)
			}
			did[k]++
			return nil
		}
		var under, next atomic.Int64
		o := ordered{n: n, window: window, workers: workers,
			work: func(_, k int) error {
				if under.Add(1) > int64(window) {
					t.Errorf("more than %d at once", window)
				}
				if k%7 == 0 {
					time.Sleep(time.Microsecond)
				}
				return step(k, 0)
			},
			turn: func(k int) error {
				if next.Add(1) != int64(k)+1 {
					t.Errorf("turn of %d too early", k)
				}
				return step(k, 1)
			},
			flush: func(k int) error { defer under.Add(-1); return step(k, 2) },
		}
		if err := o.run(bg, "test"); err != nil {
			t.Fatal(err)
		}
		for k, d := range did {
			if d != 3 {
				t.Fatalf("task %d ended at step %d", k, d)
			}
		}
	}
}

func TestOrderedErrors(t *testing.T) {
	// Promise: an error of any step ends the run with it; so do a cancel and a
	// panic; no worker is left.
	r := newRand(t)
	before := spawn.Running()
	bad := errors.New("bad")
	for i := range 300 {
		at := r.IntN(50)
		fail := func(step int) func(k int) error {
			return func(k int) error {
				if k == at && step == i%3 {
					return bad
				}
				return nil
			}
		}
		w := fail(0)
		o := ordered{n: 50, window: 1 + r.IntN(9), workers: 1 + r.IntN(4),
			work: func(_, k int) error { return w(k) }, turn: fail(1), flush: fail(2)}
		if err := o.run(bg, "test"); err != bad {
			t.Fatal(err)
		}
	}
	ctx, cancel := context.WithCancel(bg)
	o := ordered{n: 1 << 30, window: 9, workers: 3, work: func(_, k int) error {
		if k == 100 {
			cancel()
		}
		return nil
	}}
	if err := o.run(ctx, "test"); !errors.Is(err, fault.ErrCancelled) {
		t.Fatal(err)
	}
	if spawn.Running() > before {
		// A worker leaves the count a moment after it is waited for.
		time.Sleep(50 * time.Millisecond)
		if spawn.Running() > before {
			t.Fatal(spawn.Names())
		}
	}
}
