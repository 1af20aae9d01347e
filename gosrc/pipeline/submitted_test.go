package pipeline

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/device/cpu"
	"github.com/overwire/overwire/gosrc/plan"
)

// A lateQueue delays done calls until release is called. Like a queue with other users, it never drains.
type lateQueue struct {
	device.Queue
	fails error

	mu    sync.Mutex
	calls []func()
}

func (q *lateQueue) Submit(s device.Slot, n int64, tasks []device.DecodeTask, done func(int, error)) error {
	return q.Queue.Submit(s, n, tasks, func(i int, err error) {
		q.mu.Lock()
		defer q.mu.Unlock()
		q.calls = append(q.calls, func() { done(i, errors.Join(err, q.fails)) })
	})
}

func (q *lateQueue) Drain(ctx context.Context) error {
	<-ctx.Done()
	return context.Cause(ctx)
}

func (q *lateQueue) release() {
	q.mu.Lock()
	defer q.mu.Unlock()
	for _, call := range q.calls {
		call()
	}
}

// Submitted is called when everything has been submitted. Run then waits only for its own done calls, because the
// queue may have other users, and returns the error of those calls.
func TestSubmitted(t *testing.T) {
	m := build(rand.New(rand.NewPCG(4, 4)))
	for _, fails := range []error{nil, errors.New("the device failed")} {
		wants, err := plan.Check(m.ix, m.requests(rand.New(rand.NewPCG(5, 5))))
		if err != nil {
			t.Fatal(err)
		}
		var sizes []int64
		for i := range wants {
			sizes = append(sizes, wants[i].Bytes)
		}
		mem, err := cpu.Alloc(sizes)
		if err != nil {
			t.Fatal(err)
		}
		task := &Task{Index: m.ix, Sources: m.srcs, Wants: wants, Workers: 3,
			Plan: plan.Make(m.ix, wants, pointers(mem), plan.Limits{Piece: 4096, Share: 1000})}
		host, err := cpu.NewQueue(3, task.Plan.Slot)
		if err != nil {
			t.Fatal(err)
		}
		queue := &lateQueue{Queue: host, fails: fails}
		task.Queue = queue
		called, returned := make(chan struct{}), make(chan error, 1)
		task.Submitted = func() { close(called) }
		go func() {
			_, err := Run(t.Context(), task)
			returned <- err
		}()
		<-called
		select {
		case err := <-returned:
			t.Error("Run returned before its last done call:", err)
		default:
		}
		queue.release()
		if err := <-returned; !errors.Is(err, fails) {
			t.Errorf("Run returned %v, want %v", err, fails)
		}
		host.Close()
		cpu.Release(mem)
	}
}
