//go:build owfake

package load

import (
	"context"
	"testing"
	"time"

	"github.com/overwire/overwire/gosrc/device/cuda"
	"github.com/overwire/overwire/gosrc/job"
)

// On a GPU, a load with Options.After starts after the earlier load.
func TestAfterFake(t *testing.T) {
	end := cuda.Fake(1 << 30)
	path, want := write(t, "m", []int64{3000, 70}, []int64{0}, []int64{5})
	m := opened(t, Spec{URIs: []string{path}})
	follows(t, m, want, "cuda:0")
	m.Close()
	if left := end(); left != "" {
		t.Errorf("left behind: %s", left)
	}
}

// On a GPU, a load with Options.After gets the first load's queue as soon as the first load has submitted everything.
// It does not wait for the first load's end, except if it is traced or casts to another dtype.
func TestAfterTakesTheQueueFake(t *testing.T) {
	end := cuda.Fake(1 << 30)
	path, want := write(t, "m", []int64{3000, 70}, []int64{0}, []int64{5})
	m := opened(t, Spec{URIs: []string{path}})
	for _, opt := range []Options{{}, {Trace: t.TempDir() + "/trace"}, {Cast: "F32"}} {
		target, err := TargetOf("cuda:0")
		if err != nil {
			t.Fatal(err)
		}
		over := make(chan struct{})
		first := newLoading(m, target, nil)
		first.machine = m.Machine(true, 0, true)
		if first.queue.queue, err = target.Queue(0, first.machine); err != nil {
			t.Fatal(err)
		}
		queue := first.queue.queue
		first.job.Go(func(context.Context, *job.Job) error { <-over; return nil })
		close(first.queue.submitted)
		opt.Device, opt.After = "cuda:0", first
		l, err := m.Start(nil, opt)
		if err != nil {
			t.Fatal(err)
		}
		if waits := opt.Trace != "" || opt.Cast != ""; waits {
			if ended, _ := l.Job().Wait(20 * time.Millisecond); ended || first.queue.queue != queue {
				t.Errorf("%+v: the second load began before the first load ended", opt)
			}
			close(over)
			first.queue.give().Close()
			takeAll(t, l, want, false)
			continue
		}
		takeAll(t, l, want, false)
		if again, err := target.Queue(0, first.machine); err != nil || first.queue.give() != nil || again != queue {
			t.Errorf("the second load did not take the queue, or did not return it: %v", err)
		} else {
			again.Close()
		}
		close(over)
	}
	m.Close()
	if left := end(); left != "" {
		t.Errorf("left behind: %s", left)
	}
}
