package relay

// This file has the queue through which this rank's shares go to its GPU.

import (
	"context"
	"sync"
	"unsafe"

	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/device/cuda"
	"github.com/overwire/overwire/gosrc/internal/spawn"
	"github.com/overwire/overwire/gosrc/load"
)

// A feedQueue is the queue that fetches. The device writes what it submits only
// when the buffer's earlier piece was decoded. The readers do not wait for the driver,
// whose calls take turns: a goroutine submits their slots.
type feedQueue struct {
	*cuda.Queue
	r    *Relay
	todo chan submission
	left sync.WaitGroup // submissions
}

type submission struct {
	slot  *cuda.Slot
	n     int64
	tasks []device.DecodeTask
	done  func(task int, err error)
}

func newFeedQueue(feed *cuda.Queue, r *Relay) *feedQueue {
	slots, _ := load.Ring(r.machine)
	q := &feedQueue{Queue: feed, r: r, todo: make(chan submission, slots)}
	spawn.Go("relay feed", func() {
		for s := range q.todo {
			if err := spawn.Guard("relay feed", func() error { return q.submit(s) }); err != nil {
				for i := range s.tasks {
					s.done(i, err)
				}
			}
			q.left.Done()
		}
	})
	return q
}

// Submit returns at once; what goes wrong later is an error of each task.
func (q *feedQueue) Submit(s device.Slot, n int64, tasks []device.DecodeTask, done func(task int, err error)) error {
	q.left.Add(1)
	q.todo <- submission{s.(*cuda.Slot), n, tasks, done}
	return nil
}

func (q *feedQueue) submit(s submission) error {
	r := q.r
	k := r.filling(s.tasks[0].Dst)
	b := k % len(r.spec.Ring)
	s.slot.Order(r.idle[b], r.full[b])
	s.slot.Loose() // a share has its chunks as they lie in the file
	if err := q.Queue.Submit(s.slot, s.n, s.tasks, s.done); err != nil {
		return err
	}
	r.landed(k, len(s.tasks))
	return nil
}

// Checks is the queue's where the engine exchanges the shares: it publishes one when all
// of it was found right. Another exchange begins before.
func (q *feedQueue) Checks() bool { return q.r.carrier != nil && q.Queue.Checks() }

// Drain is the queue's, when all is submitted.
func (q *feedQueue) Drain(ctx context.Context) error {
	q.left.Wait()
	return q.Queue.Drain(ctx)
}

// Close is the queue's, likewise.
func (q *feedQueue) Close() {
	q.left.Wait()
	close(q.todo)
	q.Queue.Close()
}

// filling is the piece that is being copied to the buffer at dst.
func (r *Relay) filling(dst unsafe.Pointer) int {
	b := 0
	for b < len(r.spec.Ring)-1 {
		if at := uintptr(r.spec.Ring[b]); uintptr(dst) >= at && uintptr(dst) < at+uintptr(r.spec.Size) {
			break
		}
		b++
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	n := len(r.spec.Ring)
	return r.free + (b-r.free%n+n)%n
}
