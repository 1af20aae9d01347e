package save

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"

	"github.com/overwire/overwire/gosrc/fault"
	"github.com/overwire/overwire/gosrc/internal/spawn"
	"github.com/overwire/overwire/gosrc/knob"
)

// ordered runs n tasks on several workers, and lets a middle part of each run
// strictly in order:
//
//	work(w, k)  in parallel: read and encode task k
//	turn(k)     one at a time, k = 0, 1, 2 …: hash it, give it its place
//	flush(k)    in parallel: write it
//
// At most window tasks are between work and the end of flush, so what belongs
// to task k may lie in slot k mod window: that bounds the memory. The first
// error ends everything; so does the context.
type ordered struct {
	n, window   int
	workers     int
	work        func(worker, k int) error
	turn, flush func(k int) error // may be nil
}

type slotState uint8

const (
	idle slotState = iota
	working
	worked  // waits for its turn
	placed  // waits for its flush
	flushed // waits for the tasks before it, that the window may move on
)

// run returns when every worker has ended: nothing of a task is in use after.
func (o *ordered) run(ctx context.Context, name string) error {
	r := &orderedRun{ordered: o, state: make([]slotState, o.window)}
	r.wake.L = &r.mu
	stop := context.AfterFunc(ctx, func() { r.fail(cancelled(ctx)) })
	defer stop()
	workers := max(1, min(o.workers, o.n))
	var wg sync.WaitGroup
	wg.Add(workers)
	for w := range workers {
		spawn.Go(name, func() {
			defer wg.Done()
			if err := spawn.Guard(name, func() error { return r.loop(w) }); err != nil {
				r.fail(err)
			}
		})
	}
	wg.Wait()
	r.mu.Lock() // a cancel may still be saying so
	defer r.mu.Unlock()
	return r.err
}

type orderedRun struct {
	*ordered
	mu    sync.Mutex
	wake  sync.Cond
	state []slotState
	// Tasks below base are over, those below next have been taken; front is
	// the first that has not had its turn. base <= front <= next <= base+window.
	base, front, next int
	turning           bool // a worker has the turn
	unflushed         int  // placed slots that no worker has taken
	err               error
}

func (r *orderedRun) fail(err error) {
	r.mu.Lock()
	if r.err == nil {
		r.err = err
	}
	r.mu.Unlock()
	r.wake.Broadcast()
}

// loop is one worker. It prefers what frees slots: flush, then turn, then work.
func (r *orderedRun) loop(w int) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	// do runs f without the lock.
	do := func(f func() error) error {
		r.mu.Unlock()
		defer r.mu.Lock()
		return f()
	}
	for {
		switch {
		case r.err != nil || r.base == r.n:
			r.wake.Broadcast()
			return nil
		case r.unflushed > 0:
			k := r.base
			for r.state[k%r.window] != placed {
				k++
			}
			r.unflushed--
			r.state[k%r.window] = working // nobody else takes it
			if err := do(func() error { return r.flush(k) }); err != nil {
				return err
			}
			r.over(k)
		case !r.turning && r.front < r.next && r.state[r.front%r.window] == worked:
			k := r.front
			r.turning = true
			var err error
			if r.turn != nil {
				err = do(func() error { return r.turn(k) })
			}
			r.turning = false
			if err != nil {
				return err
			}
			r.front++
			if r.flush == nil {
				r.over(k)
				break
			}
			r.state[k%r.window] = placed
			r.unflushed++
			r.wake.Broadcast()
		case r.next < r.n && r.next < r.base+r.window:
			k := r.next
			r.next++
			r.state[k%r.window] = working
			if err := do(func() error { return r.work(w, k) }); err != nil {
				return err
			}
			r.state[k%r.window] = worked
			r.wake.Broadcast()
		default:
			r.wake.Wait()
		}
	}
}

// over ends task k and moves the window.
func (r *orderedRun) over(k int) {
	r.state[k%r.window] = flushed
	for r.base < r.front && r.state[r.base%r.window] == flushed {
		r.state[r.base%r.window] = idle
		r.base++
	}
	r.wake.Broadcast()
}

// each runs work over 0..n-1 on several workers, in no order.
func each(ctx context.Context, name string, workers, n int, work func(k int) error) error {
	o := ordered{n: n, window: 4 * workers, workers: workers,
		work: func(_, k int) error { return work(k) }}
	return o.run(ctx, name)
}

// threads is how many workers there are: as asked, as the environment says, or
// one a core.
func threads(asked int) int {
	if asked <= 0 {
		asked = knob.Threads.Get()
	}
	if asked <= 0 {
		asked = runtime.GOMAXPROCS(0)
	}
	return min(asked, 256)
}

// classed gives the bare errors of an ended context their class, wherever in a
// verb they were noticed.
func classed(ctx context.Context, err error) error {
	if err != nil && (errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded)) &&
		!errors.Is(err, fault.ErrCancelled) && !errors.Is(err, fault.ErrTimeout) {
		return cancelled(ctx)
	}
	return err
}

// cancelled is why ctx ended, in one of our classes.
func cancelled(ctx context.Context) error {
	err := context.Cause(ctx)
	switch {
	case err == nil || errors.Is(err, fault.ErrCancelled):
		return err
	case errors.Is(err, context.DeadlineExceeded):
		return fmt.Errorf("%w: %w", fault.ErrTimeout, err)
	}
	return fmt.Errorf("%w: %w", fault.ErrCancelled, err)
}
