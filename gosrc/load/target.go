package load

import (
	"context"
	"fmt"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"unsafe"

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

// feeders is how many readers keep a fast disk, or a GPU, busy.
const feeders = 16

// readers is how many workers a load has at least, unless the caller says: on the
// host one a core. For a GPU it is as many as feed it, however many cores there
// are: they wait for the disk and for free slots more than they work, and 32 of
// them were slower than 16.
func (t target) readers() int {
	if t.gpu != nil {
		return feeders
	}
	return runtime.GOMAXPROCS(0)
}

func (t target) alloc(sizes []int64) ([]device.Memory, error) {
	if t.gpu != nil {
		return t.gpu.Alloc(sizes)
	}
	return cpu.Alloc(sizes)
}

// readAlign is the block that reads past the page cache begin and end at; other
// sources are asked for just what is wanted.
const readAlign = 4096

// limits is what the pipeline reads at once: on the host about one compressed
// chunk, so that it is still in the second-level cache when it is decoded; for
// a GPU what fills a slot, by several workers, so that few slots are being
// filled and most are on their way. From far away it is as much as hides a round
// trip, and a gap costs less than another one; unless ranges are read in steps,
// which are as small as local reads.
func (t target) limits(far, stepped bool) plan.Limits {
	if t.gpu != nil {
		_, size := ring(stepped)
		if far && !stepped {
			return plan.Limits{Piece: size, Gap: 512 << 10, Part: farPiece}
		}
		return plan.Limits{Piece: size, Gap: 256 << 10, Part: stepPiece}
	}
	if far && stepped {
		return plan.Limits{Piece: stepPiece, Gap: 64 << 10, Direct: true}
	}
	if far {
		return plan.Limits{Piece: farPiece, Gap: 512 << 10, Direct: true}
	}
	return plan.Limits{Piece: stepPiece, Gap: 64 << 10, Direct: true}
}

// stepPiece is what the second-level cache holds.
const stepPiece = 1 << 20

// farRange is what a connection to a GPU's slots brings before it is asked again:
// of 4 MiB at a time its workers waited for answers 30 % of the time, of so many
// 5 %, and more of them gained nothing.
const farRange = 32 << 20

// farPiece takes 3 ms on a link of 10 Gbit/s: an answer's overhead is lost in
// it, and sixteen of them are all the memory that a load needs.
const farPiece = 4 << 20

// ring is the slots of a lane, and their bytes, for ranges that are read in steps,
// or for anything else.
func ring(stepped bool) (slots int, bytes int64) {
	if stepped {
		return cuda.FarRing()
	}
	return cuda.Ring()
}

// lane makes the device's lane for a plan; nil lets the pipeline make its own,
// on the host.
func (t target) lane(largest int64, stepped bool) (device.Lane, error) {
	if t.gpu == nil {
		return nil, nil
	}
	slots, size := ring(stepped)
	if largest > size {
		slots, size = int(max(2, int64(slots)*size/largest)), largest
	}
	l, err := t.gpu.Lane(slots, size)
	if err != nil {
		return nil, err
	}
	return gpuLane{l}, nil
}

// gpuLane is a cuda.Lane as a device.Lane.
type gpuLane struct{ *cuda.Lane }

func (l gpuLane) Get(ctx context.Context) (device.Slot, error) {
	s, err := l.Lane.Get(ctx)
	if err != nil {
		return nil, err
	}
	return gpuSlot{s}, nil
}

func (l gpuLane) Put(s device.Slot) { l.Lane.Put(s.(gpuSlot).Slot) }

func (l gpuLane) Submit(s device.Slot, n int64, jobs []device.Job, done func(job int, err error)) error {
	return l.Lane.Submit(s.(gpuSlot).Slot, n, jobs, done)
}

type gpuSlot struct{ *cuda.Slot }

func (s gpuSlot) Memory() []byte { return s.Bytes }

func (s gpuSlot) Twin() unsafe.Pointer { return s.Slot.Twin() }

func (s gpuSlot) Borrow(b []byte) { s.Lend(b) }
