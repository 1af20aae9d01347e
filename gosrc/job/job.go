// Package job runs operations in the background. Callers can observe, await and cancel
// an operation, and get its result.
//
// A Job is safe for concurrent use. Its counters only rise.
package job

import (
	"context"
	"errors"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/rawjson"
	"github.com/overwire/overwire/gosrc/internal/spawn"
)

// A Job is one running operation.
type Job struct {
	Name string

	// Bytes and tensors that have been processed, and their totals. Bytes are tensor bytes, not stored bytes.
	Bytes, TotalBytes     atomic.Int64
	Tensors, TotalTensors atomic.Int64

	ctx    context.Context
	cancel context.CancelCauseFunc
	done   chan struct{} // closed when callers see the job as ended
	gone   chan struct{} // closed when the operation has returned, after its cleanup
	end    sync.Once     // guards closing of done
	err    error         // set before done is closed

	mu     sync.Mutex
	report any
}

// errCancelled is the cause with which Cancel ends the job's context.
var errCancelled = errs.New(errs.ErrCancelled, "by the caller")

// New returns a job that has not begun. Go begins it. A panic anywhere in the engine cancels it.
func New(name string) *Job {
	j := &Job{Name: name, done: make(chan struct{}), gone: make(chan struct{})}
	j.ctx, j.cancel = context.WithCancelCause(spawn.Context())
	return j
}

// Go runs the operation in the background. Call it once. If the job is cancelled, run's context ends, and run must
// release its resources and return soon. A panic in run becomes the job's error (errs.ErrEngine).
func (j *Job) Go(run func(ctx context.Context, j *Job) error) {
	live.Store(j, nil)
	spawn.Go(j.Name, func() {
		growStack()
		j.runVerb(run)
	})
}

// RunHere is like Go for a short operation. It runs the operation on the caller's goroutine and returns when the job
// has ended, because waking another thread would take longer than the operation.
func (j *Job) RunHere(run func(ctx context.Context, j *Job) error) {
	live.Store(j, nil)
	j.runVerb(run)
}

func (j *Job) runVerb(run func(ctx context.Context, j *Job) error) {
	defer func() {
		j.cancel(nil)
		live.Delete(j)
		if !IsClosed(j.done) {
			j.finish(errs.New(errs.ErrEngine, "%s ended without a result", j.Name))
		}
		close(j.gone)
	}()
	j.finish(spawn.Guard(j.Name, func() error { return run(j.ctx, j) }))
}

// growStack makes the goroutine's stack large while it is still empty. Otherwise the runtime would
// grow and copy it several times as calls nest.
//
//go:noinline
func growStack() {
	var space [12 << 10]byte
	runtime.KeepAlive(&space)
}

func (j *Job) finish(err error) {
	j.end.Do(func() {
		// A cancelled job reports the cancellation, regardless of which worker noticed it first.
		if err != nil && errors.Is(err, context.Canceled) {
			if err = spawn.Poisoned(); err == nil {
				err = errCancelled
			}
		}
		j.err = err
		close(j.done)
	})
}

// Failed reports a cancelled job as ended while the operation still cleans up, because cleaning up may need slow
// requests to a server. It first calls letGo, after which the operation may no longer use the caller's memory.
// CancelAll still waits for the operation to return. Failed does nothing if the job is not cancelled.
func (j *Job) Failed(err error, letGo func()) {
	if err != nil && j.ctx.Err() != nil {
		letGo()
		j.finish(err)
	}
}

// Start calls New and Go.
func Start(name string, run func(ctx context.Context, j *Job) error) *Job {
	j := New(name)
	j.Go(run)
	return j
}

// Cancel asks the job to stop. It does not wait, and has no effect on a job that has ended.
func (j *Job) Cancel() { j.cancel(errCancelled) }

// RunContext returns a context that ends when the job is cancelled or has ended.
func (j *Job) RunContext() context.Context { return j.ctx }

// Wait waits for the job to end, but no longer than d. A negative d means no limit. Wait
// reports whether the job has ended and, if so, its error.
func (j *Job) Wait(d time.Duration) (bool, error) {
	if !Within(j.done, d) {
		return false, nil
	}
	return true, j.err
}

// Within waits until done is closed, but no longer than d. A negative d means no limit.
// It reports whether done is closed.
func Within(done <-chan struct{}, d time.Duration) bool {
	switch {
	case IsClosed(done): // if done is closed, select could still choose the timer
		return true
	case d == 0:
		return false
	}
	var late <-chan time.Time // a nil channel never receives
	if d >= 0 {
		t := time.NewTimer(d)
		defer t.Stop()
		late = t.C
	}
	select {
	case <-done:
		return true
	case <-late:
		return false
	}
}

// IsClosed reports whether done is closed, without waiting.
func IsClosed(done <-chan struct{}) bool {
	select {
	case <-done:
		return true
	default:
		return false
	}
}

// Done returns a channel that is closed when the job has ended.
func (j *Job) Done() <-chan struct{} { return j.done }

// Err returns the job's error. It is valid once Done is closed.
func (j *Job) Err() error { return j.err }

// Progress returns the four counters.
func (j *Job) Progress() (bytes, totalBytes, tensors, totalTensors int64) {
	return j.Bytes.Load(), j.TotalBytes.Load(), j.Tensors.Load(), j.TotalTensors.Load()
}

// SetReport sets the value that Report returns. It replaces an earlier value.
func (j *Job) SetReport(v any) {
	j.mu.Lock()
	j.report = v
	j.mu.Unlock()
}

// Value returns the last value passed to SetReport.
func (j *Job) Value() any {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.report
}

// Report returns the last value passed to SetReport as JSON, or "null" if there is none.
func (j *Job) Report() ([]byte, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	b, err := rawjson.Marshal(j.report)
	if err != nil {
		return nil, errs.New(errs.ErrEngine, "report of %s: %v", j.Name, err)
	}
	return b, nil
}

// live holds the running jobs, for CancelAll and AwaitAll.
var live sync.Map

// AwaitAll waits up to d for all running jobs to end, and returns the names of those that have not.
func AwaitAll(d time.Duration) (names []string) {
	end := time.Now().Add(d)
	for each := range live.Range {
		if j := each.(*Job); !Within(j.gone, max(0, time.Until(end))) {
			names = append(names, j.Name)
		}
	}
	return names
}

// CancelAll cancels all running jobs and waits up to d for them to end. It reports
// whether all have ended. A process calls it before it exits.
func CancelAll(d time.Duration) bool {
	var jobs []*Job
	for j := range live.Range {
		j.(*Job).Cancel()
		jobs = append(jobs, j.(*Job))
	}
	end := time.Now().Add(d)
	for _, j := range jobs {
		if !Within(j.gone, max(0, time.Until(end))) {
			return false
		}
	}
	return true
}
