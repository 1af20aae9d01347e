package load

import (
	"bytes"
	"context"
	"errors"
	"testing"
	"time"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/job"
)

// A load with Options.After reads nothing before the first load has ended, even if the first load fails. A cancelled
// load does not wait.
func TestAfter(t *testing.T) {
	path, want := write(t, "m", []int64{3000, 70}, []int64{0}, []int64{5})
	follows(t, opened(t, Spec{URIs: []string{path}, Map: new(bool)}), want, "")
}

func follows(t *testing.T, m *Model, want [][]byte, device string) {
	for _, failure := range []error{nil, errors.New("the first load failed")} {
		end := make(chan struct{})
		first := newLoading(m, Target{}, nil)
		first.job.Go(func(context.Context, *job.Job) error { <-end; return failure })
		l, err := m.Start(nil, Options{Device: device, After: first})
		if err != nil {
			t.Fatal(err)
		}
		gone, err := m.Start(nil, Options{Device: device, After: first})
		if err != nil {
			t.Fatal(err)
		}
		gone.Close()
		if _, err := gone.Job().Wait(-1); !errors.Is(err, errs.ErrCancelled) {
			t.Error("cancelled while it waits:", err)
		}
		at, more := l.Ready(10, 20*time.Millisecond)
		for _, i := range at {
			if len(want[i]) > 0 {
				t.Errorf("request %d landed before the first load ended", i)
			}
		}
		if !more || l.queue.queue != nil {
			t.Error("the second load began before the first load ended")
		}
		close(end)
		takeAll(t, l, want, device == "")
	}
}

// takeAll waits for a load and takes its tensors. With compare it also compares their bytes, which must be on the host.
func takeAll(t *testing.T, l *Loading, want [][]byte, compare bool) {
	t.Helper()
	if _, err := l.Job().Wait(-1); err != nil {
		t.Fatal(err)
	}
	for i := range want {
		mem, _, _, ok := l.Take(i)
		if !ok || compare && !bytes.Equal(mem.Slice(), want[i]) {
			t.Errorf("tensor %d: %v", i, ok)
		}
		mem.Release()
	}
	l.Close()
}
