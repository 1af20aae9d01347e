// Package spawn starts every goroutine of the engine and guards every call into it,
// because an unrecovered Go panic would end the Python process.
//
// A recovered panic prints its stack once to standard error. It also poisons the engine, because it may leave
// state inconsistent: Context ends, which stops running work, and the binding calls Poisoned before each call
// and refuses new work. Panics that Go cannot recover (concurrent map writes, a crash in C) still end the
// process.
package spawn

import (
	"context"
	"fmt"
	"io"
	"os"
	"runtime/debug"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/spawn/internal/health"
)

var (
	mu    sync.Mutex
	names = map[string]int{} // running goroutines, by name

	out io.Writer = os.Stderr // replaced in tests
)

// Go runs fn in a new goroutine. A panic in fn poisons the engine and ends only that goroutine: fn must use
// defer to release callers that wait for its result.
func Go(name string, fn func()) {
	enterCall(name)
	go func() {
		defer leaveCall(name)
		_ = Guard(name, func() error { fn(); return nil })
	}()
}

// GoFor is Go for callers that wait for fn through wg.
func GoFor(wg *sync.WaitGroup, name string, fn func()) {
	wg.Add(1)
	Go(name, func() { defer wg.Done(); fn() })
}

// Guard runs fn in the calling goroutine and returns its error. A panic in fn becomes an errs.ErrEngine and
// poisons the engine.
func Guard(name string, fn func() error) (err error) {
	defer func() {
		if v := recover(); v != nil {
			err = panicError(name, v)
		}
	}()
	return fn()
}

// Poisoned returns the errs.ErrEngine of the first panic, or nil. Every later call into the engine should
// return this error.
func Poisoned() error {
	if err := health.Panic.Load(); err != nil {
		return *err
	}
	return nil
}

// Context returns a context that ends with the first panic, which is its cause. Background work derives its
// context from it, so that no work continues to write after a panic.
func Context() context.Context {
	if l := health.Engine.Load(); l != nil {
		return l.Ctx
	}
	l := new(health.Life)
	l.Ctx, l.End = context.WithCancelCause(context.Background())
	if !health.Engine.CompareAndSwap(nil, l) {
		return health.Engine.Load().Ctx
	}
	if err := Poisoned(); err != nil { // the panic may have occurred before the context was created
		l.End(err)
	}
	return l.Ctx
}

// Running returns how many goroutines started by Go have not ended. Leak tests compare it before and after.
func Running() (n int) {
	mu.Lock()
	defer mu.Unlock()
	for _, k := range names {
		n += k
	}
	return n
}

// Names returns the sorted names of the goroutines that Running counts.
func Names() []string {
	mu.Lock()
	defer mu.Unlock()
	var all []string
	for n, k := range names {
		for range k {
			all = append(all, n)
		}
	}
	slices.Sort(all)
	return all
}

func panicError(name string, v any) error {
	err := errs.New(errs.ErrEngine,
		"panic in %s: %v (a bug in overwire: please report the stack on stderr; this process must be restarted)", name,
		v)
	if health.Panic.CompareAndSwap(nil, &err) {
		if l := health.Engine.Load(); l != nil {
			l.End(err)
		}
		fmt.Fprintf(out, "overwire: panic in %s: %v\n\n%s\n", name, v, debug.Stack())
	}
	return err
}

func enterCall(name string) {
	mu.Lock()
	defer mu.Unlock()
	names[name]++
}

func leaveCall(name string) {
	mu.Lock()
	defer mu.Unlock()
	if names[name]--; names[name] == 0 {
		delete(names, name)
	}
}

// Workers runs fn for workers 0 to n-1 in parallel, at least for worker 0, and waits for all of them. Worker 0
// runs in the caller's goroutine. failed is called with each error immediately, by several goroutines, and
// should stop the other workers.
func Workers(name string, n int, failed func(error), fn func(worker int) error) {
	work := func(w int) {
		if err := Guard(name, func() error { return fn(w) }); err != nil {
			failed(err)
		}
	}
	var wg sync.WaitGroup
	for w := 1; w < n; w++ {
		GoFor(&wg, name, func() { work(w) })
	}
	work(0)
	wg.Wait()
}

// Each calls fn for 0 to n-1 on several workers, until a call fails or ctx ends, and waits for every call that
// began. It returns the error of the failed call with the lowest number. All calls with lower numbers are made,
// so the returned error does not depend on timing.
func Each(ctx context.Context, name string, workers, n int, fn func(i int) error) error {
	var (
		next  atomic.Int64
		least atomic.Int64 // number of the failed call, or n
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
			var e error
			if ctx.Err() == nil {
				e = Guard(name, func() error { return fn(i) })
			} else {
				e = errs.FromOS(context.Cause(ctx))
			}
			if e != nil {
				note(i, e)
			}
		}
		return nil
	})
	return err
}
