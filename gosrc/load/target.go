package load

// This file selects the device that a load lands on, makes its queue, and hands the queue from one load to the next.

import (
	"cmp"
	"context"
	"fmt"
	"runtime"
	"sync"

	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/device/cpu"
	"github.com/overwire/overwire/gosrc/device/cuda"
	"github.com/overwire/overwire/gosrc/device/cuda/queue"
	"github.com/overwire/overwire/gosrc/internal/spawn"
	"github.com/overwire/overwire/gosrc/plan"
)

// A Target is the device that a load lands on.
type Target struct {
	GPU     *cuda.Device // nil means the host
	inPlace bool         // see Options.InPlace
}

// TargetOf opens a device by name; "" is the host.
func TargetOf(name string) (Target, error) {
	number, err := device.Number(cmp.Or(name, "cpu"))
	if err != nil || number == device.Host {
		return Target{}, err
	}
	gpu, err := cuda.Open(int(max(0, number)))
	if err != nil {
		err = fmt.Errorf("device %q: %w", name, err)
	}
	return Target{GPU: gpu}, err
}

var preparing sync.WaitGroup

// AwaitPreparations waits until the work that Prepare has started is done. Call it before the process exits.
func AwaitPreparations() { preparing.Wait() }

// ExchangeBatches is how many batches of shares a GPU decodes or checksums at a time in a group load.
const ExchangeBatches = 10

// Prepare prepares a device for a load in the background while the load's files are being opened. exchange means that
// ranks will exchange what they read. Prepare reports no errors, because the load will report them.
func Prepare(name string, exchange bool) {
	spawn.GoFor(&preparing, "load prepare", func() {
		_ = spawn.Guard("load prepare", func() error {
			t, err := TargetOf(name)
			if err == nil && t.GPU != nil {
				m := plan.Machine{InGroup: exchange}
				if !exchange { // see Machine.HasFewCores
					m.Cores = runtime.GOMAXPROCS(0)
				}
				t.GPU.PrepareQueue(Ring(m))
				if exchange {
					t.GPU.PrepareQueue(ExchangeBatches, queue.TablesOnly)
				}
			}
			return err
		})
	})
}

func (t Target) allocateFor(sizes []int64) ([]device.Memory, error) {
	if t.GPU != nil {
		return t.GPU.Alloc(sizes)
	}
	return cpu.Alloc(sizes)
}

// Ring returns the number of slots of a GPU's queue and their size. Slots are smaller for ranges that are read in
// steps and for ranks that exchange what they read. They are smallest if m.OwnSlots() is true. On few
// cores, there are fewer slots.
func Ring(m plan.Machine) (slots int, bytes int64) {
	switch {
	case m.OwnSlots():
		readers := plan.Feeders
		if m.Cores > 0 {
			readers = m.Workers(1)
		}
		return queue.ExchangeRing(readers)
	case m.RangeBytes > 0 || m.InGroup:
		return queue.RemoteRing()
	case m.HasFewCores():
		return queue.HalfRing()
	}
	return queue.DefaultRing()
}

// Queue makes the GPU's queue for pieces of at most `largest` bytes. For the host it returns nil, because the pipeline
// makes its own queue.
func (t Target) Queue(largest int64, m plan.Machine) (*queue.Queue, error) {
	if t.GPU == nil {
		return nil, nil
	}
	slots, size := ringFor(largest, m)
	q, err := t.GPU.Queue(slots, size)
	if err == nil && t.inPlace {
		q.ReadInPlace()
	}
	return q, err
}

// ringFor is like Ring, for pieces of at most `largest` bytes.
func ringFor(largest int64, m plan.Machine) (slots int, size int64) {
	slots, size = Ring(m)
	if largest > size && m.HasFewCores() { // half a ring would have too few slots of this size
		slots, size = queue.DefaultRing()
	}
	if largest > size {
		slots, size = int(max(2, int64(slots)*size/largest)), largest
	}
	return slots, size
}

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
