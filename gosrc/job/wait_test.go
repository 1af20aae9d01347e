package job

import (
	"context"
	"errors"
	"testing"
)

// A job that has ended has ended, however short the wait.
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
