// Package ordered runs tasks on several workers, with one step of each task in task order.
package ordered

import (
	"context"
	"sync"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/spawn"
)

// Tasks are N tasks for several workers. Each has three steps:
//
// Work(w, k) in parallel: read and encode task k Turn(k) one at a time, k = 0, 1, 2 …: hash it, assign its offset
// Flush(k) in parallel: write it
//
// At most Window tasks are between Work and the end of Flush, which limits memory: task k may use slot k mod
// Window. All tasks end at the first error, or when the context ends.
type Tasks struct {
	N, Window   int
	Workers     int
	Work        func(worker, k int) error
	Turn, Flush func(k int) error // may be nil
}

type slotState uint8

const (
	idle slotState = iota
	working
	worked  // waits for Turn
	placed  // waits for Flush
	flushed // waits for earlier tasks to end, which advances the window
)

// Run runs all tasks. It returns when all workers have ended.
func (o *Tasks) Run(ctx context.Context, name string) error {
	r := &run{Tasks: o, state: make([]slotState, o.Window)}
	r.wake.L = &r.mu
	stop := context.AfterFunc(ctx, func() { r.recordError(errs.FromOS(context.Cause(ctx))) })
	defer stop()
	spawn.Workers(name, min(o.Workers, o.N), r.recordError, r.runWorker)
	r.mu.Lock() // after a cancellation, recordError may still be running
	defer r.mu.Unlock()
	return r.err
}

type run struct {
	*Tasks
	mu    sync.Mutex
	wake  sync.Cond
	state []slotState
	// Tasks below base have ended, and tasks below next have begun. front is the first task that has not had
	// its Turn. base <= front <= next <= base+Window.
	base, front, next int
	turning           bool // a worker is running Turn
	unflushed         int  // number of tasks that wait for Flush
	err               error
}

func (r *run) recordError(err error) {
	r.mu.Lock()
	if r.err == nil {
		r.err = err
	}
	r.mu.Unlock()
	r.wake.Broadcast()
}

// runWorker runs one worker. It prefers the step that frees slots: Flush, then Turn, then Work.
func (r *run) runWorker(w int) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	withoutLock := func(f func() error) error {
		r.mu.Unlock()
		defer r.mu.Lock()
		return f()
	}
	// do runs f without the lock. It records an error before another worker can look for a task, because that
	// worker would otherwise run the same Turn again.
	do := func(f func() error) error {
		err := withoutLock(f)
		if r.err == nil {
			r.err = err
		}
		return err
	}
	for {
		switch {
		case r.err != nil || r.base == r.N:
			r.wake.Broadcast()
			return nil
		case r.unflushed > 0:
			k := r.base
			for r.state[k%r.Window] != placed {
				k++
			}
			r.unflushed--
			r.state[k%r.Window] = working // so that no other worker takes it
			if err := do(func() error { return r.Flush(k) }); err != nil {
				return err
			}
			r.endTask(k)
		case !r.turning && r.front < r.next && r.state[r.front%r.Window] == worked:
			k := r.front
			r.turning = true
			var err error
			if r.Turn != nil {
				err = do(func() error { return r.Turn(k) })
			}
			r.turning = false
			if err != nil {
				return err
			}
			r.front++
			if r.Flush == nil {
				r.endTask(k)
				break
			}
			r.state[k%r.Window] = placed
			r.unflushed++
			r.wake.Broadcast()
		case r.next < r.N && r.next < r.base+r.Window:
			k := r.next
			r.next++
			r.state[k%r.Window] = working
			if err := do(func() error { return r.Work(w, k) }); err != nil {
				return err
			}
			r.state[k%r.Window] = worked
			r.wake.Broadcast()
		default:
			r.wake.Wait()
		}
	}
}

// endTask marks task k as ended and advances the window.
func (r *run) endTask(k int) {
	r.state[k%r.Window] = flushed
	for r.base < r.front && r.state[r.base%r.Window] == flushed {
		r.state[r.base%r.Window] = idle
		r.base++
	}
	r.wake.Broadcast()
}
