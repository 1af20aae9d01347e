package load

// This file hands a GPU's queue from one load to the next.

import (
	"context"
	"sync"

	"github.com/overwire/overwire/gosrc/device/cuda/queue"
	"github.com/overwire/overwire/gosrc/plan"
)

// A queueHandoff holds a load's queue, which the next load may take. The next load begins to read when this load has
// submitted everything. It fills slots while this load's slots are copied and decoded, so the device's link is not
// idle in between.
type queueHandoff struct {
	submitted chan struct{} // closed when the next load may take the queue

	mu    sync.Mutex
	queue *queue.Queue // nil on the host, before it exists, and after the next load has taken it
}

// set stores the load's queue.
func (h *queueHandoff) set(q *queue.Queue) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.queue = q
}

// give returns the queue, or nil if there is none. The caller must close it.
func (h *queueHandoff) give() *queue.Queue {
	h.mu.Lock()
	defer h.mu.Unlock()
	q := h.queue
	h.queue = nil
	return q
}

// follow makes the queue, if there is one, wait for the work that is now queued on a stream.
func (h *queueHandoff) follow(stream uintptr) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.queue == nil {
		return nil
	}
	return h.queue.FollowStream(stream)
}

// handsOffQueue reports whether the next load may take the queue before this load has ended. This load must not need
// the queue to measure device times, to read with GPUDirect Storage, or for casts at its end. The queue's slots must
// have the usual size.
func handsOffQueue(l *Loading, p *plan.Plan, how string, trace bool) bool {
	return l.target.GPU != nil && !trace && how != "gds" && l.casts == nil && p.Slot <= l.machine.SlotBytes
}

// followLoad waits until the previous load has submitted everything, and takes its queue if there is one and it fits.
// If the previous load ends first, for any reason, followLoad returns without a queue.
func followLoad(ctx context.Context, l, before *Loading, p *plan.Plan, how string, trace bool) error {
	if handsOffQueue(l, p, how, trace) && before.target == l.target && before.machine.SlotBytes == l.machine.SlotBytes {
		select {
		case <-before.queue.submitted:
			if q := before.queue.give(); q != nil {
				l.queue.set(q)
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
