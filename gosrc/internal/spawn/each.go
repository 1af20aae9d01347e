package spawn

import (
	"sync"
	"sync/atomic"
)

// Each calls fn for 0 to n-1, at most so many at once, until one fails, and
// waits for all that were begun. It returns the error of the first by number
// among those that failed.
func Each(name string, together, n int, fn func(i int) error) error {
	errs := make([]error, n)
	var next atomic.Int64
	var failed atomic.Bool
	work := func() {
		for !failed.Load() {
			i := int(next.Add(1)) - 1
			if i >= n {
				return
			}
			if errs[i] = Guard(name, func() error { return fn(i) }); errs[i] != nil {
				failed.Store(true)
			}
		}
	}
	var wg sync.WaitGroup
	for range min(together, n) - 1 {
		wg.Add(1)
		Go(name, func() { defer wg.Done(); work() })
	}
	work()
	wg.Wait()
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}
