package ordered

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/spawn/spawntest"
)

var bg = context.Background()

// newRand logs its seed, so that a failure can be reproduced.
func newRand(t testing.TB) *rand.Rand {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	return rand.New(rand.NewPCG(seed, 1))
}

func TestOrdered(t *testing.T) {
	// Every task runs Work, then Turn in order, then Flush, each exactly once. At most Window tasks are in
	// progress.
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
				t.Errorf("task %d is at step %d, want %d", k, did[k], from)
			}
			did[k]++
			return nil
		}
		var under, next atomic.Int64
		o := Tasks{N: n, Window: window, Workers: workers,
			Work: func(_, k int) error {
				if under.Add(1) > int64(window) {
					t.Errorf("more than %d tasks in progress", window)
				}
				if k%7 == 0 {
					time.Sleep(time.Microsecond)
				}
				return step(k, 0)
			},
			Turn: func(k int) error {
				if next.Add(1) != int64(k)+1 {
					t.Errorf("Turn of task %d is out of order", k)
				}
				return step(k, 1)
			},
			Flush: func(k int) error { defer under.Add(-1); return step(k, 2) },
		}
		if err := o.Run(bg, "test"); err != nil {
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
	// An error in any step ends the run with that error. A cancellation also ends the run. No worker remains.
	r := newRand(t)
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
		o := Tasks{N: 50, Window: 1 + r.IntN(9), Workers: 1 + r.IntN(4),
			Work: func(_, k int) error { return w(k) }, Turn: fail(1), Flush: fail(2)}
		if err := o.Run(bg, "test"); err != bad {
			t.Fatal(err)
		}
	}
	ctx, cancel := context.WithCancel(bg)
	o := Tasks{N: 1 << 30, Window: 9, Workers: 3, Work: func(_, k int) error {
		if k == 100 {
			cancel()
		}
		return nil
	}}
	if err := o.Run(ctx, "test"); !errors.Is(err, errs.ErrCancelled) {
		t.Fatal(err)
	}
	if n := spawntest.Left(); len(n) != 0 {
		t.Fatal(n)
	}
}

func TestTurnsOnce(t *testing.T) {
	// After a Turn fails, no worker runs Turn again.
	broken := errors.New("broken")
	for range 2000 {
		var turns atomic.Int64
		o := Tasks{
			N: 8, Window: 8, Workers: 4,
			Work: func(int, int) error { return nil },
			Turn: func(int) error { turns.Add(1); return broken },
		}
		if err := o.Run(bg, "test"); !errors.Is(err, broken) || turns.Load() != 1 {
			t.Fatalf("%d turns, %v", turns.Load(), err)
		}
	}
}
