package cuda

// This file has the second module of kernels, for weights that stay on the device, and
// how one of them is run.

/*
#include "batch.h"
#include "../../../cuda/abi_digest.h"
*/
import "C"

import (
	"math"
	"sync"
	"unsafe"

	"github.com/overwire/overwire/cuda/built"
)

// Kernels of the second module, in the order of their numbers.
const (
	residentNames  = "ow_digest\x00ow_delta_apply\x00ow_delta_measure\x00ow_delta_write\x00"
	residentDigest = iota - 1
	residentDeltaApply
	residentDeltaMeasure
	residentDeltaWrite
)

// residentModule is the second module of a Device, loaded at its first use.
type residentModule struct {
	module  *C.struct_owcu_module
	kernels []C.owcu_handle // nil: not yet looked up
	tables  [residentTables]residentTable
}

// residentTables is how many kernels may be on the way at once: while one runs, the host
// fills the table of the next.
const residentTables = 2

// A residentTable is the memory of a kernel's table.
type residentTable struct {
	mu   sync.Mutex // held while a kernel runs
	slab *slab      // of one pad
}

// A residentLaunch is a launch. The table has `room` bytes (0: `bytes`), the first `bytes` of
// which are copied to the device; then `back` bytes from backAt on are answers that are
// copied back. fill gets the table in host memory, and both it and args its address on
// the device.
type residentLaunch struct {
	kernel, grid, block int
	tableIndex          int
	blocks              int // of a processor at most, 0: any
	bytes, room         int
	back, backAt        int
	fill                func(table unsafe.Pointer, dev uint64)
	args                func(table uint64) []uint64
	take                func(answers unsafe.Pointer)
}

// residentKernels are the kernels of the second module.
func (d *Device) residentKernels() ([]C.owcu_handle, error) {
	return d.loadKernels(&d.resident.kernels, d.resident.module, built.Resident, residentNames)
}

// ensurePad returns the memory of a table of that many bytes. Its lock is held.
func (d *Device) ensurePad(table *residentTable, bytes int) (*pad, error) {
	if table.slab != nil && table.slab.pads[0].bytes >= bytes {
		return table.slab.pads[0], nil
	}
	if table.slab != nil {
		old := table.slab
		table.slab = nil
		if err := d.drainAndFreeSlab(old); err != nil {
			return nil, err
		}
	}
	n := (bytes + bytes/4 + huge - 1) &^ (huge - 1)
	s, err := d.newSlabOfPads(1, n, n)
	if err != nil {
		return nil, err
	}
	table.slab = s
	return s.pads[0], nil
}

// runResidentKernel runs a kernel of the second module on the caller's stream and waits for it.
func (d *Device) runResidentKernel(on Order, run residentLaunch) error {
	kernels, err := d.residentKernels()
	if err != nil {
		return err
	}
	if err := d.MakeStreamWait(on.Stream, on.After...); err != nil {
		return err
	}
	table := &d.resident.tables[run.tableIndex]
	table.mu.Lock()
	defer table.mu.Unlock()
	p, err := d.ensurePad(table, max(run.bytes, run.room))
	if err != nil {
		return err
	}
	run.fill(p.host, uint64(p.dev))
	blocks := math.MaxInt32
	if run.blocks > 0 {
		blocks = d.sms * run.blocks
	}
	request := C.struct_owcu_batch{
		ctx: d.ctx, stream: C.uint64_t(on.Stream), done: p.done, to: p.dev, table: p.host,
		bytes: C.uint64_t(run.bytes), back: C.uint64_t(run.back), back_at: C.uint64_t(run.backAt), wait: 1, nsteps: 1,
	}
	request.steps[0] = C.struct_owcu_step{kernel: kernels[run.kernel], grid: C.uint32_t(min(run.grid, blocks)),
		block: C.uint32_t(run.block)}
	for i, v := range run.args(uint64(p.dev)) {
		request.steps[0].args[i] = C.uint64_t(v)
	}
	if err := d.call(func(e *C.struct_owcu_error) C.int { return C.owcu_submit_batch(&request, e) }); err != nil {
		return err
	}
	if run.take != nil {
		run.take(unsafe.Add(p.host, run.backAt))
	}
	return nil
}

// reserveTables gets memory for tables of that size in the first of them.
func (d *Device) reserveTables(bytes, count int) error {
	if _, err := d.residentKernels(); err != nil || bytes == 0 {
		return err
	}
	for i := range min(count, residentTables) {
		table := &d.resident.tables[i]
		table.mu.Lock()
		_, err := d.ensurePad(table, bytes)
		table.mu.Unlock()
		if err != nil {
			return err
		}
	}
	return nil
}

// trimTables frees the memory of tables; the module stays.
func (d *Device) trimTables() error {
	var first error
	for i := range d.resident.tables {
		table := &d.resident.tables[i]
		table.mu.Lock()
		s := table.slab
		table.slab = nil
		if s != nil {
			if err := d.drainAndFreeSlab(s); first == nil {
				first = err
			}
		}
		table.mu.Unlock()
	}
	return first
}
