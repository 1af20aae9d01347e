package job

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/overwire/overwire/gosrc/errs"
)

// A job that has ended reports so, however short the wait.
func TestWaitZero(t *testing.T) {
	want := errors.New("so it ended")
	j := Start("x", func(context.Context, *Job) error { return want })
	<-j.Done()
	for i := range 2000 {
		if done, err := j.Wait(0); !done || !errors.Is(err, want) {
			t.Fatalf("wait %d: %v, %v", i, done, err)
		}
	}
	running := New("y")
	if done, _ := running.Wait(0); done {
		t.Error("a job that has not begun has ended")
	}
}

// A job that runs on the caller's thread has ended when the call returns, with its error or its panic's, and nothing of
// it is left.
func TestRunHere(t *testing.T) {
	want := errors.New("so it ended")
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

// A cancelled job that cleans up keeps only CancelAll waiting. One that was not cancelled has not failed before its
// end.
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
		return errors.New("said too late")
	})
	<-begun
	if done, err := j.Wait(time.Millisecond); done {
		t.Fatal("has ended:", err)
	}
	j.Cancel()
	if done, err := j.Wait(time.Minute); !done || !errors.Is(err, errs.ErrCancelled) {
		t.Fatal(done, err)
	}
	if CancelAll(time.Millisecond) {
		t.Error("CancelAll did not wait for what cleans up")
	}
	end()
	if !CancelAll(time.Minute) {
		t.Error("still running")
	}
	if !errors.Is(j.Err(), errs.ErrCancelled) {
		t.Error(j.Err())
	}
}
