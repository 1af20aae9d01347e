package load

// The handoff of a GPU's queue from a load to the one that follows it.

import (
	"context"
	"sync"

	"github.com/overwire/overwire/gosrc/device/cuda/queue"
	"github.com/overwire/overwire/gosrc/plan"
)

// A queueHandoff is a load's queue, which the load that follows it may take. The second begins to read when the first
// has submitted everything, and fills slots while those of the first are being copied and decoded: the device's link
// has no pause in between.
type queueHandoff struct {
	submitted chan struct{} // closed when the load that follows may take the queue

	mu    sync.Mutex
	queue *queue.Queue // nil: the host, not there yet, or the following load's
}

// set makes the queue that of the load.
func (h *queueHandoff) set(q *queue.Queue) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.queue = q
}

// give returns the queue, which is the caller's to close then; nil: there is none.
func (h *queueHandoff) give() *queue.Queue {
	h.mu.Lock()
	defer h.mu.Unlock()
	q := h.queue
	h.queue = nil
	return q
}

// follow has the queue, if there is one, wait for what is queued on a stream.
func (h *queueHandoff) follow(stream uintptr) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.queue == nil {
		return nil
	}
	return h.queue.FollowStream(stream)
}

// handsOffQueue reports whether the load that follows may have the queue before this one has ended: if this one needs
// it neither for times of the device, nor to read by GPUDirect Storage, nor for casts at its end, and it has slots of
// the usual size.
func handsOffQueue(l *Loading, p *plan.Plan, how string, trace bool) bool {
	return l.target.GPU != nil && !trace && how != "gds" && l.casts == nil && p.Slot <= l.machine.SlotBytes
}

// followLoad waits until the load before this one has submitted everything, and takes its queue if it suits and is
// there, or until it has ended, however that was.
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
