package relay

// This file queues this rank's shares for its GPU. moveOnce drives the queue.

import (
	"cmp"
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/device/cuda/queue"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/spawn"
	"github.com/overwire/overwire/gosrc/peers"
)

// mostGroups is the maximum number of groups of slots in flight to the GPU. Slots that readers fill in the meantime
// form the next group. A group costs the driver little more than a single slot, and with two groups the link always
// has one to copy.
const mostGroups = 2

// A feedQueue copies the slots that readers have filled to this rank's buffers on the GPU. Each copy waits until the
// piece that used the buffer before has been decoded. Readers do not wait for the driver, which serves one thread at a
// time: moveOnce has feeder submit all waiting slots as one group, and polls for its end.
type feedQueue struct {
	*queue.Queue
	feeder *feeder
	ask    func(ctx context.Context, ready func() bool) error // mover.askUntil
}

// A feeder submits the filled slots of a queue in groups.
type feeder struct {
	queue   *queue.Queue
	lay     *layout
	prog    *progress
	counts  *profile
	todo    chan submission // has space for all slots, so readers never wait
	waiting atomic.Int64    // filled slots not yet submitted to the driver
	mu      sync.Mutex      // held in submitAndFinish
	all     []submission    // slots that submitAndFinish submits; guarded by mu
}

// A submission is a filled slot and the piece that it belongs to.
type submission struct {
	queue.FilledSlot
	piece int
}

// GetFor waits for a slot by polling, because moveOnce, which frees the slots, has no time to wake readers.
func (q *feedQueue) GetFor(ctx context.Context, reader int) (device.Slot, error) {
	var slot *queue.Slot
	err := q.ask(ctx, func() bool {
		slot = q.TryGetFor(reader)
		return slot != nil
	})
	if err != nil {
		return nil, err
	}
	return slot, nil
}

// submitAndFinish submits the waiting slots unless mostGroups are in flight, and finishes the slots that the GPU has
// copied. It reports whether it did either. It returns immediately if another goroutine is running it.
func (f *feeder) submitAndFinish() bool {
	if !f.mu.TryLock() {
		return false
	}
	defer f.mu.Unlock()
	f.all = f.all[:0]
	for f.queue.CountFlying() < mostGroups && len(f.todo) > 0 { // only the holder of mu receives from todo
		f.all = append(f.all, <-f.todo)
	}
	if len(f.all) > 0 {
		f.submitSafely(f.all)
	}
	return f.queue.FinishEnded() || len(f.all) > 0
}

// submitSafely submits slots together. After a panic, each of their tasks is reported with its error. That may include
// finished tasks, which does no harm, because only the first error counts.
func (f *feeder) submitSafely(all []submission) {
	defer f.waiting.Add(int64(-len(all)))
	err := spawn.Guard("relay feed", func() error { f.submitSlots(all); return nil })
	for i := range all {
		for task := 0; err != nil && task < len(all[i].Tasks); task++ {
			all[i].Done(task, err)
		}
	}
}

// Submit hands a filled slot to moveOnce and returns immediately. Later failures are reported for each task. tasks is
// a subslice of lay.fetch.Tasks, and its position there determines the piece.
func (q *feedQueue) Submit(s device.Slot, n int64, tasks []device.DecodeTask, done func(task int, err error)) error {
	f := q.feeder
	all := f.lay.fetch.Tasks
	first := cap(all) - cap(tasks) // position of tasks in all
	if len(tasks) == 0 || first < 0 || first >= len(all) || &all[first] != &tasks[0] {
		q.Put(s)
		return errs.New(errs.ErrEngine, "group load: the submitted tasks are not part of the fetch plan")
	}
	f.waiting.Add(1)
	f.counts.countFlight(n)
	left := len(tasks)
	finish := func(task int, err error) {
		if left--; left == 0 {
			f.counts.countFlight(-n)
		}
		done(task, err)
	}
	slot := queue.FilledSlot{Slot: s.(*queue.Slot), N: n, Tasks: tasks, Done: finish}
	f.todo <- submission{slot, f.lay.pieceOfTask(int32(first))}
	return nil
}

// submitSlots submits slots together. The slots of the first pieces come first, because other ranks wait for them.
func (f *feeder) submitSlots(all []submission) {
	isSubmitted := false
	defer f.counts.countDriverTime(time.Now())
	defer func() {
		// a panic came before Submit: return the slots, because Close waits for every slot
		for i := 0; i < len(all) && !isSubmitted; i++ {
			f.queue.Put(all[i].Slot)
		}
	}()
	for i := range all {
		s := &all[i]
		s.Slot.FollowEvent(f.prog.eventBeforeFill(s.piece, f.lay.spec.Rank))
		s.Slot.AllowGapWrites() // a share has the same gaps as the file, and no rank needs the bytes in them
	}
	slices.SortStableFunc(all, func(a, b submission) int { return cmp.Compare(a.piece, b.piece) })
	slots := make([]queue.FilledSlot, len(all))
	for i := range all {
		slots[i] = all[i].FilledSlot
	}
	isSubmitted = true
	f.queue.SubmitAll(slots)
}

// Drain submits the waiting slots and waits until all slots have finished.
func (q *feedQueue) Drain(ctx context.Context) error {
	var pace peers.Pacer
	for q.feeder.waiting.Load() > 0 || q.CountFlying() > 0 {
		pace.RestUnless(q.feeder.submitAndFinish())
	}
	return q.Queue.Drain(ctx)
}

// Close submits the waiting slots, then closes the queue.
func (q *feedQueue) Close() {
	_ = q.Drain(context.Background()) // a broken queue was reported already
	q.Queue.Close()
}
