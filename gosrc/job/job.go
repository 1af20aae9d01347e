// Package job runs a verb in the background: callers watch it, wait for it, cancel
// it, and take its result.
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

// A Job is one running verb.
type Job struct {
	Name string

	// The progress: bytes and tensors done, and their totals. Bytes are tensor
	// bytes, not stored bytes.
	Bytes, TotalBytes     atomic.Int64
	Tensors, TotalTensors atomic.Int64

	ctx    context.Context
	cancel context.CancelCauseFunc
	done   chan struct{} // closed when the job has ended, for those that wait
	gone   chan struct{} // closed when its verb has returned, after its clean-up
	end    sync.Once     // of done
	err    error         // set before done is closed

	mu     sync.Mutex
	report any
}

// errCancelled is the cause that Cancel gives to the job's context.
var errCancelled = errs.New(errs.ErrCancelled, "by the caller")

// New returns a job that has not begun; Go begins it. A panic anywhere in the engine
// cancels it.
func New(name string) *Job {
	j := &Job{Name: name, done: make(chan struct{}), gone: make(chan struct{})}
	j.ctx, j.cancel = context.WithCancelCause(spawn.Context())
	return j
}

// Go runs the verb in the background; call it once. If the job is cancelled, run's
// context ends, and run must release what it holds and return soon. A panic in run
// becomes the job's error (errs.ErrEngine).
func (j *Job) Go(run func(ctx context.Context, j *Job) error) {
	live.Store(j, nil)
	spawn.Go(j.Name, func() {
		growStack()
		j.runVerb(run)
	})
}

// RunHere is Go for a verb that is short: the caller's goroutine runs it, and the job has ended when
// RunHere returns. Waking another thread takes longer than such a verb.
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

// growStack makes space for a verb while the goroutine's stack is empty: grown step by step by the
// verb's calls, it would be copied several times, frame by frame.
//
//go:noinline
func growStack() {
	var space [12 << 10]byte
	runtime.KeepAlive(&space)
}

func (j *Job) finish(err error) {
	j.end.Do(func() {
		// A cancelled job reports that, whichever worker noticed first.
		if err != nil && errors.Is(err, context.Canceled) {
			if err = spawn.Poisoned(); err == nil {
				err = errCancelled
			}
		}
		j.err = err
		close(j.done)
	})
}

// Failed ends a cancelled job for those that wait, while its verb still cleans up:
// requests to a server may take long. letGo comes first: after it the verb may no longer
// use the caller's memory. CancelAll waits for the verb itself. Failed does nothing to a
// job that is not cancelled.
func (j *Job) Failed(err error, letGo func()) {
	if err != nil && j.ctx.Err() != nil {
		letGo()
		j.finish(err)
	}
}

// Start is New and Go.
func Start(name string, run func(ctx context.Context, j *Job) error) *Job {
	j := New(name)
	j.Go(run)
	return j
}

// Cancel asks the job to stop. It does not wait, and does nothing to a job
// that has ended.
func (j *Job) Cancel() { j.cancel(errCancelled) }

// RunContext ends when the job is asked to stop, and at its end.
func (j *Job) RunContext() context.Context { return j.ctx }

// Wait waits for the end of the job, at most for d (for ever if d is
// negative). It reports whether the job has ended, and if so its error.
func (j *Job) Wait(d time.Duration) (bool, error) {
	if !Within(j.done, d) {
		return false, nil
	}
	return true, j.err
}

// Within waits up to d, for ever if that is negative, until done is closed, and reports
// whether it is.
func Within(done <-chan struct{}, d time.Duration) bool {
	switch {
	case IsClosed(done): // a timer might win against it
		return true
	case d == 0:
		return false
	}
	var late <-chan time.Time // never sent to
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

// Done is closed when the job has ended.
func (j *Job) Done() <-chan struct{} { return j.done }

// Err is the job's error; it is valid once Done is closed.
func (j *Job) Err() error { return j.err }

// Progress returns the four counters.
func (j *Job) Progress() (bytes, totalBytes, tensors, totalTensors int64) {
	return j.Bytes.Load(), j.TotalBytes.Load(), j.Tensors.Load(), j.TotalTensors.Load()
}

// SetReport keeps a value for Report; the last one stays.
func (j *Job) SetReport(v any) {
	j.mu.Lock()
	j.report = v
	j.mu.Unlock()
}

// Value returns the last value given to SetReport.
func (j *Job) Value() any {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.report
}

// Report returns the last value given to SetReport as JSON, or "null".
func (j *Job) Report() ([]byte, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	b, err := rawjson.Marshal(j.report)
	if err != nil {
		return nil, errs.New(errs.ErrEngine, "report of %s: %v", j.Name, err)
	}
	return b, nil
}

// live has the running jobs, for CancelAll.
var live sync.Map

// CancelAll cancels every running job and waits for their end, at most for d. It
// reports whether all have ended. A process calls it before it exits.
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
