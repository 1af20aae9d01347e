package relay

// This file has the queue through which this rank's shares go to its GPU.

import (
	"cmp"
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/device/cuda"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/spawn"
)

// A feedQueue is the queue that fetches. The device writes what it submits only
// when the buffer's earlier piece was decoded. The readers do not wait for the driver,
// whose calls take turns: movePieces submits their slots, those that wait at the same time
// together, and asks for their ends, between all that else it asks the driver for.
type feedQueue struct {
	*cuda.Queue
	r       *Relay
	todo    chan submission
	waiting atomic.Int64 // submissions that have not gone up
	mu      sync.Mutex   // held in a step: movePieces takes them, also Drain and Close, when it has ended
	all     []submission // of a step
}

type submission struct {
	cuda.FilledSlot
	piece int
}

// GetFor waits for a slot by asking: movePieces, which frees them, has no time to wake readers.
func (q *feedQueue) GetFor(ctx context.Context, reader int) (device.Slot, error) {
	var slot *cuda.Slot
	err := askUntil(ctx, func() bool {
		slot = q.TryGetFor(reader)
		return slot != nil
	})
	if err != nil {
		return nil, err
	}
	return slot, nil
}

// submitAndFinish submits the slots that wait, finishes those that have landed, and reports whether there were any.
func (q *feedQueue) submitAndFinish() bool {
	if !q.mu.TryLock() {
		return false
	}
	defer q.mu.Unlock()
	q.all = q.all[:0]
	for range len(q.todo) { // no one else takes them
		q.all = append(q.all, <-q.todo)
	}
	if len(q.all) > 0 {
		q.submitSafely(q.all)
	}
	return q.FinishEnded() || len(q.all) > 0
}

// submitSafely submits slots together. After a panic each of their tasks gets its error, also those that
// have ended: an error ends the load once.
func (q *feedQueue) submitSafely(all []submission) {
	defer q.waiting.Add(int64(-len(all)))
	err := spawn.Guard("relay feed", func() error { q.submitSlots(all); return nil })
	for i := range all {
		for task := 0; err != nil && task < len(all[i].Tasks); task++ {
			all[i].Done(task, err)
		}
	}
}

// Submit takes tasks of the fetch's, and returns at once; what goes wrong later is an error of each task.
func (q *feedQueue) Submit(s device.Slot, n int64, tasks []device.DecodeTask, done func(task int, err error)) error {
	all := q.r.fetch.Tasks
	first := cap(all) - cap(tasks) // of those in all
	if len(tasks) == 0 || first < 0 || first >= len(all) || &all[first] != &tasks[0] {
		q.Put(s)
		return errs.New(errs.ErrEngine, "relay: tasks that are not the fetch's")
	}
	q.waiting.Add(1)
	q.r.countFlight(n)
	left := len(tasks)
	finish := func(task int, err error) {
		if left--; left == 0 {
			q.r.countFlight(-n)
		}
		done(task, err)
	}
	slot := cuda.FilledSlot{Slot: s.(*cuda.Slot), N: n, Tasks: tasks, Done: finish}
	q.todo <- submission{slot, q.r.pieceOfTask(int32(first))}
	return nil
}

// submitSlots submits slots together, those of the first pieces first: others wait for them.
func (q *feedQueue) submitSlots(all []submission) {
	r, isSubmitted := q.r, false
	defer r.countDriverTime(time.Now())
	defer func() {
		for i := 0; i < len(all) && !isSubmitted; i++ { // a panic: Close waits for every slot
			q.Put(all[i].Slot)
		}
	}()
	for i := range all {
		s := &all[i]
		s.Slot.FollowEvent(r.eventBeforeFill(s.piece, r.spec.Rank))
		s.Slot.AllowGapWrites() // a share has its chunks as they lie in the file
	}
	slices.SortStableFunc(all, func(a, b submission) int { return cmp.Compare(a.piece, b.piece) })
	slots := make([]cuda.FilledSlot, len(all))
	for i := range all {
		slots[i] = all[i].FilledSlot
	}
	isSubmitted = true
	q.SubmitAll(slots)
}

// Drain submits what waits, and waits until all has ended.
func (q *feedQueue) Drain(ctx context.Context) error {
	var pace pacer
	for q.waiting.Load() > 0 || q.CountFlying() > 0 {
		pace.restUnless(q.submitAndFinish())
	}
	return q.Queue.Drain(ctx)
}

// Close submits what waits, then closes the queue.
func (q *feedQueue) Close() {
	_ = q.Drain(context.Background()) // a broken queue was reported
	q.Queue.Close()
}
