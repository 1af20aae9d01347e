package load

// This file selects the device that a load lands on, and makes its queue.

import (
	"cmp"
	"fmt"
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

// Prepare prepares a device for a load in the background while the load's files are being opened. exchange says that
// ranks will exchange what they read. Prepare reports no errors, because the load will report them.
func Prepare(name string, exchange bool) {
	spawn.GoFor(&preparing, "load prepare", func() {
		_ = spawn.Guard("load prepare", func() error {
			t, err := TargetOf(name)
			if err == nil && t.GPU != nil {
				t.GPU.PrepareQueue(Ring(plan.Machine{InGroup: exchange}))
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
// steps and for ranks that exchange what they read. They are smallest if m.OwnSlots() is true.
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
	if largest > size {
		slots, size = int(max(2, int64(slots)*size/largest)), largest
	}
	return slots, size
}
