package stream

/*
#include "batch.h"
*/
import "C"

import (
	"math"
	"sync"
	"unsafe"

	"github.com/overwire/overwire/gosrc/device/cuda/driver"
	"github.com/overwire/overwire/gosrc/device/cuda/memory"
	"github.com/overwire/overwire/gosrc/internal/sizes"
)

// Kernels of the second module, in the order of their numbers.
const (
	residentNames  = "ow_digest\x00ow_digest_keyed\x00ow_delta_apply\x00ow_delta_measure\x00ow_delta_write\x00"
	residentDigest = iota - 1
	residentDigestKeyed
	residentDeltaApply
	residentDeltaMeasure
	residentDeltaWrite
)

// Resident runs kernels of the second module, for weights that stay on the device.
type Resident struct {
	on      *Streams
	kernels *driver.Kernels
	tables  [residentTables]residentTable
}

// NewResident returns a Resident. The module is loaded at first use.
func NewResident(on *Streams, resident *driver.Module) *Resident {
	return &Resident{on: on, kernels: resident.Kernels(residentNames)}
}

// residentTables is the maximum number of kernels in flight. While one runs, the host fills the table of the next.
const residentTables = 2

// A residentTable is the memory of a kernel's table.
type residentTable struct {
	mu    sync.Mutex // held while a kernel runs
	arena *arena     // holds one pad
}

// A residentLaunch is a kernel launch. The table has `room` bytes (0 means `bytes`), of which the first `bytes` are
// copied to the device. The `back` bytes from backAt on are results and are copied back. fill writes the table to host
// memory. fill and args receive its device address.
type residentLaunch struct {
	kernel, grid, block int
	tableIndex          int
	blocks              int // maximum per multiprocessor; 0 means unlimited
	bytes, room         int
	back, backAt        int
	fill                func(table unsafe.Pointer, dev uint64)
	args                func(table uint64) []uint64
	take                func(answers unsafe.Pointer)
}

// ensurePad returns memory of a table with at least the given size. The caller holds the table's lock.
func (table *residentTable) ensurePad(on *Streams, bytes int) (*pad, error) {
	if table.arena != nil && table.arena.pads[0].bytes >= bytes {
		return table.arena.pads[0], nil
	}
	if table.arena != nil {
		old := table.arena
		table.arena = nil
		if err := on.mem.FreeNow(old.tryFree); err != nil {
			return nil, err
		}
	}
	n := sizes.RoundUp(bytes+bytes/4, memory.HugePage)
	s, err := newPads(on, 1, n, n)
	if err != nil {
		return nil, err
	}
	table.arena = s
	return s.pads[0], nil
}

// run runs a kernel of the second module on the caller's stream and waits for it.
func (r *Resident) run(on Order, launch residentLaunch) error {
	kernels, err := r.kernels.Get()
	if err != nil {
		return err
	}
	if err := r.on.MakeStreamWait(on.Stream, on.After...); err != nil {
		return err
	}
	table := &r.tables[launch.tableIndex]
	table.mu.Lock()
	defer table.mu.Unlock()
	p, err := table.ensurePad(r.on, max(launch.bytes, launch.room))
	if err != nil {
		return err
	}
	launch.fill(p.host, uint64(p.dev))
	blocks := math.MaxInt32
	if launch.blocks > 0 {
		blocks = r.on.ctx.Processors() * launch.blocks
	}
	request := C.struct_owcu_batch{
		ctx: r.on.c, stream: C.uint64_t(on.Stream), done: p.done, to: p.dev, table: p.host,
		bytes: C.uint64_t(launch.bytes), back: C.uint64_t(launch.back), back_at: C.uint64_t(launch.backAt),
		wait: 1, nsteps: 1,
	}
	request.steps[0] = C.struct_owcu_step{kernel: C.owcu_handle(kernels[launch.kernel]),
		grid: C.uint32_t(min(launch.grid, blocks)), block: C.uint32_t(launch.block)}
	for i, v := range launch.args(uint64(p.dev)) {
		request.steps[0].args[i] = C.uint64_t(v)
	}
	if err := r.on.call(func(e *C.struct_owcu_error) C.int { return C.owcu_submit_batch(&request, e) }); err != nil {
		return err
	}
	if launch.take != nil {
		launch.take(unsafe.Add(p.host, launch.backAt))
	}
	return nil
}

// reserve allocates memory of the given size for each of the first count tables.
func (r *Resident) reserve(bytes, count int) error {
	if _, err := r.kernels.Get(); err != nil || bytes == 0 {
		return err
	}
	for i := range min(count, residentTables) {
		table := &r.tables[i]
		table.mu.Lock()
		_, err := table.ensurePad(r.on, bytes)
		table.mu.Unlock()
		if err != nil {
			return err
		}
	}
	return nil
}

// Trim frees the memory of tables. The module stays loaded.
func (r *Resident) Trim() error {
	var first error
	for i := range r.tables {
		table := &r.tables[i]
		table.mu.Lock()
		s := table.arena
		table.arena = nil
		if s != nil {
			if err := r.on.mem.FreeNow(s.tryFree); first == nil {
				first = err
			}
		}
		table.mu.Unlock()
	}
	return first
}
