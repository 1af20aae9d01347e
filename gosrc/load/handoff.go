package load

// This file hands a GPU's queue from a load to the one that follows it.

import (
	"context"
	"sync"

	"github.com/overwire/overwire/gosrc/device/cuda/queue"
	"github.com/overwire/overwire/gosrc/plan"
)

// A queueHandoff is a load's queue, which the following load may take. The second load begins to read when the
// first has submitted everything, and fills slots while the first one's are copied and decoded, so the device's
// link has no pause in between.
type queueHandoff struct {
	submitted chan struct{} // closed when the following load may take the queue

	mu    sync.Mutex
	queue *queue.Queue // nil for the host, before it is made, and after the following load has taken it
}

// set stores the load's queue.
func (h *queueHandoff) set(q *queue.Queue) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.queue = q
}

// give returns the queue, which the caller then closes, or nil if there is none.
func (h *queueHandoff) give() *queue.Queue {
	h.mu.Lock()
	defer h.mu.Unlock()
	q := h.queue
	h.queue = nil
	return q
}

// follow makes the queue, if there is one, wait for the work queued on a stream.
func (h *queueHandoff) follow(stream uintptr) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.queue == nil {
		return nil
	}
	return h.queue.FollowStream(stream)
}

// handsOffQueue reports whether the following load may have the queue before this load has ended. This load must
// not need it to measure device times, to read by GPUDirect Storage, or for casts at its end, and its slots must
// have the usual size.
func handsOffQueue(l *Loading, p *plan.Plan, how string, trace bool) bool {
	return l.target.GPU != nil && !trace && how != "gds" && l.casts == nil && p.Slot <= l.machine.SlotBytes
}

// followLoad waits until the load before this one has submitted everything, and takes its queue if that exists
// and suits. If the load before ends first, in whatever way, followLoad returns without a queue.
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
