package spawn

// This file runs a function on several workers, or for many numbers.

import (
	"context"
	"sync"
	"sync/atomic"

	"github.com/overwire/overwire/gosrc/errs"
)

// Workers runs fn for workers 0 to n-1 at the same time, at least for one, and waits
// for all of them; the caller's goroutine is worker 0. It calls failed with each
// error, at once and from several goroutines: failed should stop the other workers.
func Workers(name string, n int, failed func(error), fn func(worker int) error) {
	work := func(w int) {
		if err := Guard(name, func() error { return fn(w) }); err != nil {
			failed(err)
		}
	}
	var wg sync.WaitGroup
	for w := 1; w < n; w++ {
		wg.Add(1)
		Go(name, func() { defer wg.Done(); work(w) })
	}
	work(0)
	wg.Wait()
}

// Each calls fn for 0 to n-1 on several workers, until a call fails or ctx ends, and
// waits for every call that began. It returns the error of the failed call with the
// lowest number. All calls with lower numbers are made, so that other workers' timing
// does not decide which error that is.
func Each(ctx context.Context, name string, workers, n int, fn func(i int) error) error {
	var (
		next  atomic.Int64
		least atomic.Int64 // number that failed, n if none
		mu    sync.Mutex
		err   error
	)
	if n == 0 {
		return nil
	}
	least.Store(int64(n))
	note := func(i int, e error) {
		mu.Lock()
		defer mu.Unlock()
		if int64(i) < least.Load() {
			least.Store(int64(i))
			err = e
		}
	}
	Workers(name, min(workers, n), func(e error) { note(0, e) }, func(int) error {
		for i := int(next.Add(1)) - 1; i < int(least.Load()); i = int(next.Add(1)) - 1 {
			e := ctx.Err()
			if e != nil {
				e = errs.FromOS(context.Cause(ctx))
			} else {
				e = Guard(name, func() error { return fn(i) })
			}
			if e != nil {
				note(i, e)
			}
		}
		return nil
	})
	return err
}
