package relay

// This file has the queue through which this rank's shares go to its GPU.

import (
	"cmp"
	"context"
	"runtime"
	"slices"
	"sync"
	"time"
	"unsafe"

	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/device/cuda"
	"github.com/overwire/overwire/gosrc/internal/spawn"
	"github.com/overwire/overwire/gosrc/load"
)

// A feedQueue is the queue that fetches. The device writes what it submits only
// when the buffer's earlier piece was decoded. The readers do not wait for the driver,
// whose calls take turns: a goroutine submits their slots, those that wait at the same time
// together, and asks for their ends.
type feedQueue struct {
	*cuda.Queue
	r    *Relay
	todo chan submission
	left sync.WaitGroup // submissions
	stop chan struct{}
	over sync.WaitGroup // the goroutine
}

type submission struct {
	cuda.FilledSlot
	to int // the piece of the relay
}

func newFeedQueue(feed *cuda.Queue, r *Relay) *feedQueue {
	slots, _ := load.Ring(r.machine)
	q := &feedQueue{Queue: feed, r: r, todo: make(chan submission, slots), stop: make(chan struct{})}
	feed.UsePolling()
	spawn.GoFor(&q.over, "relay feed", q.submitAndFinish)
	return q
}

// submitAndFinish submits slots and finishes those that have landed, until Close.
func (q *feedQueue) submitAndFinish() {
	runtime.LockOSThread() // it makes most of the driver's calls
	defer runtime.UnlockOSThread()
	var pace pacer
	var all []submission
	for !isClosed(q.stop) {
		all = all[:0]
		for range len(q.todo) { // this goroutine alone takes them
			all = append(all, <-q.todo)
		}
		if len(all) > 0 {
			q.submitSafely(all)
		}
		pace.restUnless(q.FinishEnded() || len(all) > 0)
	}
}

// submitSafely submits slots together. After a panic each of their tasks gets its error, also those that
// have ended: an error ends the load once.
func (q *feedQueue) submitSafely(all []submission) {
	defer q.left.Add(-len(all))
	err := spawn.Guard("relay feed", func() error { q.submitSlots(all); return nil })
	for i := range all {
		for task := 0; err != nil && task < len(all[i].Tasks); task++ {
			all[i].Done(task, err)
		}
	}
}

// Submit returns at once; what goes wrong later is an error of each task.
func (q *feedQueue) Submit(s device.Slot, n int64, tasks []device.DecodeTask, done func(task int, err error)) error {
	q.left.Add(1)
	q.r.countFlight(n)
	left := len(tasks)
	finish := func(task int, err error) {
		if left--; left == 0 {
			q.r.countFlight(-n)
		}
		done(task, err)
	}
	q.todo <- submission{cuda.FilledSlot{Slot: s.(*cuda.Slot), N: n, Tasks: tasks, Done: finish}, 0}
	return nil
}

// submitSlots submits slots together, those of the first pieces first: others wait for them.
func (q *feedQueue) submitSlots(all []submission) {
	r := q.r
	defer r.countDriverTime(time.Now())
	for i := range all {
		s := &all[i]
		s.to = r.pieceToFill(s.Tasks[0].Dst)
		s.Slot.FollowEvent(r.eventBeforeFill(s.to, r.spec.Rank))
		s.Slot.AllowGapWrites() // a share has its chunks as they lie in the file
	}
	slices.SortStableFunc(all, func(a, b submission) int { return cmp.Compare(a.to, b.to) })
	pieces := make([]cuda.FilledSlot, len(all))
	for i := range all {
		pieces[i] = all[i].FilledSlot
	}
	q.SubmitAll(pieces)
}

// Drain waits until all is submitted, then drains the queue.
func (q *feedQueue) Drain(ctx context.Context) error {
	q.left.Wait()
	return q.Queue.Drain(ctx)
}

// Close submits what waits, then closes the queue.
func (q *feedQueue) Close() {
	q.left.Wait()
	close(q.stop)
	q.over.Wait()
	q.Queue.Close()
}

// pieceToFill is the piece that is being copied to the buffer at dst.
func (r *Relay) pieceToFill(dst unsafe.Pointer) int {
	n, at := r.ringOf(0, r.spec.Rank).count, 0
	for at < n-1 {
		b := r.ringOf(at, r.spec.Rank)
		lo, size := uintptr(b.base), b.bytes
		if b.step > 0 {
			lo, size = lo+uintptr(b.offsetOf(at)), b.step
		}
		if uintptr(dst) >= lo && uintptr(dst) < lo+uintptr(size) {
			break
		}
		at++
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.free + (at-r.free%n+n)%n
}
