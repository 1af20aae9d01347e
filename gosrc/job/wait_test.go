package job

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/overwire/overwire/gosrc/errs"
)

// Wait reports a job that has ended, even with a wait of 0.
func TestWaitZero(t *testing.T) {
	want := errors.New("the operation failed")
	j := Start("x", func(context.Context, *Job) error { return want })
	<-j.Done()
	for i := range 2000 {
		if done, err := j.Wait(0); !done || !errors.Is(err, want) {
			t.Fatalf("wait %d: %v, %v", i, done, err)
		}
	}
	running := New("y")
	if done, _ := running.Wait(0); done {
		t.Error("Wait reports the end of a job that has not begun")
	}
}

// RunHere returns after the job has ended with its error or panic, and the job is no longer live.
func TestRunHere(t *testing.T) {
	want := errors.New("the operation failed")
	j := New("x")
	j.RunHere(func(_ context.Context, j *Job) error { j.SetReport(7); return want })
	if done, err := j.Wait(0); !done || !errors.Is(err, want) || j.Value() != 7 || j.RunContext().Err() == nil {
		t.Error(done, err, j.Value())
	}
	cancelled := New("y")
	cancelled.Cancel()
	cancelled.RunHere(func(ctx context.Context, _ *Job) error { return context.Cause(ctx) })
	if done, err := cancelled.Wait(0); !done || !errors.Is(err, errs.ErrCancelled) {
		t.Error(done, err)
	}
	for left := range live.Range {
		t.Errorf("%s is still live", left.(*Job).Name)
	}
}

// Failed ends a cancelled job for Wait, and only CancelAll waits for the cleanup. It has no effect on a job that is
// not cancelled.
func TestFailed(t *testing.T) {
	clean, begun := make(chan struct{}), make(chan struct{})
	end := sync.OnceFunc(func() { close(clean) })
	defer end()
	j := Start("x", func(ctx context.Context, j *Job) error {
		j.Failed(errors.New("too early"), func() {})
		close(begun)
		<-ctx.Done()
		j.Failed(context.Cause(ctx), func() {})
		<-clean
		return errors.New("this error comes too late")
	})
	<-begun
	if done, err := j.Wait(time.Millisecond); done {
		t.Fatal("the job has ended:", err)
	}
	j.Cancel()
	if done, err := j.Wait(time.Minute); !done || !errors.Is(err, errs.ErrCancelled) {
		t.Fatal(done, err)
	}
	if CancelAll(time.Millisecond) {
		t.Error("CancelAll did not wait for the cleanup")
	}
	end()
	if !CancelAll(time.Minute) {
		t.Error("the job is still running")
	}
	if !errors.Is(j.Err(), errs.ErrCancelled) {
		t.Error(j.Err())
	}
}
