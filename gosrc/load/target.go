package load

import (
	"fmt"
	"strconv"
	"strings"
	"sync"

	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/device/cpu"
	"github.com/overwire/overwire/gosrc/device/cuda"
	"github.com/overwire/overwire/gosrc/fault"
	"github.com/overwire/overwire/gosrc/internal/spawn"
	"github.com/overwire/overwire/gosrc/plan"
)

// A target is the device that a load lands on.
type target struct {
	gpu *cuda.Device // nil: the host
}

// targetOf opens a device by torch's name for it: "cpu", "cuda", "cuda:1".
func targetOf(name string) (target, error) {
	kind, number, numbered := strings.Cut(name, ":")
	index := 0
	if numbered {
		n, err := strconv.ParseUint(number, 10, 16)
		if err != nil {
			return target{}, fault.New(fault.ErrArgument, "device %q: expected \"cpu\", \"cuda\" or \"cuda:N\"", name)
		}
		index = int(n)
	}
	switch kind {
	case "", "cpu":
		return target{}, nil
	case "cuda":
		gpu, err := cuda.Open(index)
		if err != nil {
			err = fmt.Errorf("device %q: %w", name, err)
		}
		return target{gpu}, err
	}
	return target{}, fault.New(fault.ErrArgument, "device %q: expected \"cpu\", \"cuda\" or \"cuda:N\"", name)
}

var preparing sync.WaitGroup

// Prepared waits until no Prepare is under way: before a process ends.
func Prepared() { preparing.Wait() }

// Prepare makes a device ready for a load that is about to begin, while its files
// are opened. It does not wait; the load tells what is wrong.
func Prepare(name string) {
	preparing.Add(1)
	spawn.Go("load prepare", func() {
		defer preparing.Done()
		_ = spawn.Guard("load prepare", func() error {
			t, err := targetOf(name)
			if err == nil && t.gpu != nil {
				t.gpu.Prepare()
			}
			return err
		})
	})
}

func (t target) alloc(sizes []int64) ([]device.Memory, error) {
	if t.gpu != nil {
		return t.gpu.Alloc(sizes)
	}
	return cpu.Alloc(sizes)
}

// ring is the slots of a GPU's queue, and their bytes, for ranges that are read in
// steps, or for anything else.
func ring(m plan.Machine) (slots int, bytes int64) {
	if m.RangeBytes > 0 {
		return cuda.RemoteRing()
	}
	return cuda.Ring()
}

// queue makes the GPU's queue for pieces of at most `largest` bytes; nil lets the
// pipeline make its own, on the host.
func (t target) queue(largest int64, m plan.Machine) (*cuda.Queue, error) {
	if t.gpu == nil {
		return nil, nil
	}
	slots, size := ring(m)
	if largest > size {
		slots, size = int(max(2, int64(slots)*size/largest)), largest
	}
	return t.gpu.Queue(slots, size)
}
