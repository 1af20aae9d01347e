package load

// This file passes a GPU's queue from a load to the one that follows it.

import (
	"context"

	"github.com/overwire/overwire/gosrc/device/cuda/queue"
	"github.com/overwire/overwire/gosrc/plan"
)

// Two loads of which one follows the other have one queue. The second begins to read when
// the first has submitted everything, and fills slots while those of the first are being
// copied and decoded: the device's link has no pause in between.

// passesQueue reports whether the load that follows may have the queue before this one has
// ended: if this one needs it neither for times of the device, nor to read by GPUDirect
// Storage, nor for casts at its end, and it has slots of the usual size.
func (l *Loading) passesQueue(p *plan.Plan, how string, trace bool) bool {
	return l.target.GPU != nil && !trace && how != "gds" && l.casts == nil && p.Slot <= l.machine.SlotBytes
}

// followLoad waits until the load before this one has submitted everything, and takes its
// queue if it suits and is there, or until it has ended, however that was.
func (l *Loading) followLoad(ctx context.Context, before *Loading, p *plan.Plan, how string, trace bool) error {
	if l.passesQueue(p, how, trace) && before.target == l.target && before.machine.SlotBytes == l.machine.SlotBytes {
		select {
		case <-before.submitted:
			if l.takeQueue(before) {
				return nil
			}
		case <-before.job.Done():
		case <-ctx.Done():
		}
	}
	select {
	case <-before.job.Done():
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// takeQueue takes the queue of a load that has submitted everything, unless it is gone.
func (l *Loading) takeQueue(before *Loading) bool {
	queue := before.giveQueue()
	if queue == nil {
		return false
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.queue = queue
	return true
}

// giveQueue returns the load's queue, which is the caller's to close then; nil: it has none.
func (l *Loading) giveQueue() *queue.Queue {
	l.mu.Lock()
	defer l.mu.Unlock()
	queue := l.queue
	l.queue = nil
	return queue
}
