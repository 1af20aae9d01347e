package cuda

/*
#include <stdlib.h>
#include "queue.h"
*/
import "C"

import (
	"errors"
	"fmt"
	"slices"
	"unsafe"

	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/errs"
)

const (
	// Align is the alignment of every tensor.
	Align = 256

	// The driver allocates memory above 1 MiB in units of 2 MiB. A tensor that
	// would waste more than a sixteenth of its size that way shares a slab.
	unit      = 2 << 20
	slabBytes = 32 << 20
)

// isAllocatedAlone reports whether a tensor of n bytes gets an allocation of its own.
func isAllocatedAlone(n int64) bool {
	return n >= slabBytes || n >= 1<<20 && ((n+unit-1)&^(unit-1)-n)*16 <= n
}

// A sharedAllocation is one allocation and the tensors in it.
type sharedAllocation struct {
	bytes  int64
	member []int
	at     []int64
}

// layOutRegions assigns tensors to regions.
func layOutRegions(sizes []int64) ([]sharedAllocation, error) {
	var all []sharedAllocation
	slab := -1
	for i, n := range sizes {
		switch {
		case n < 0 || n > 1<<46:
			return nil, errs.New(errs.ErrArgument, "size %d", n)
		case n == 0:
			continue
		case isAllocatedAlone(n):
			all = append(all, sharedAllocation{bytes: n, member: []int{i}, at: []int64{0}})
			continue
		}
		room := (n + Align - 1) &^ (Align - 1)
		if slab < 0 || all[slab].bytes+room > slabBytes {
			slab = len(all)
			all = append(all, sharedAllocation{})
		}
		region := &all[slab]
		region.member, region.at = append(region.member, i), append(region.at, region.bytes)
		region.bytes += room
	}
	return all, nil
}

// Alloc returns device memory for tensors of the given sizes, each exact and
// aligned to Align and with one holder, the caller: all of it or none; its contents
// are undefined. Work that reads it may still be queued when the last holder
// releases it: it is freed after that work, if its stream is the default one or was
// passed to NoteStream.
func (d *Device) Alloc(sizes []int64) ([]device.Memory, error) {
	regions, err := layOutRegions(sizes)
	if err != nil {
		return nil, err
	}
	mem := make([]device.Memory, len(sizes))
	for i := range mem {
		mem[i].CUDA = int32(d.index + 1)
	}
	if len(regions) == 0 {
		return mem, nil
	}
	want := make([]C.uint64_t, len(regions))
	for i := range regions {
		want[i] = C.uint64_t(regions[i].bytes)
	}
	blocks, err := d.takeBlocks(want, sizes)
	if err != nil {
		return nil, err
	}
	for i := range regions {
		region := &regions[i]
		header := C.calloc(1, C.size_t(unsafe.Sizeof(device.Listed{})))
		if header == nil {
			panic("out of memory for a header of 64 bytes")
		}
		base := devicePointer(blocks[i])
		b := device.NewListed(header, int64(len(region.member)), base, uint64(want[i]), device.KindCUDA,
			unsafe.Pointer(d.list))
		for k, n := range region.member {
			mem[n].Ptr, mem[n].Bytes, mem[n].Block = unsafe.Add(base, region.at[k]), sizes[n], &b.Block
		}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.live += len(regions)
	d.startReaper()
	return mem, nil
}

// takeBlocks returns memory for regions of the wanted sizes, from what is kept and from
// the driver, and overwrites want with the length of each.
func (d *Device) takeBlocks(want []C.uint64_t, sizes []int64) ([]C.owcu_ptr, error) {
	pointers := make([]C.owcu_ptr, len(want))
	var need []C.uint64_t
	var at []int
	d.mu.Lock()
	for i, n := range want {
		if p, ok := d.takeKeptBlock(n); ok {
			pointers[i], want[i] = p.at, p.bytes
		} else {
			need, at = append(need, n), append(at, i)
		}
	}
	d.mu.Unlock()
	fresh := make([]C.owcu_ptr, len(need))
	err := d.allocateBlocks(need, fresh, sizes)
	for k, i := range at {
		pointers[i] = fresh[k]
	}
	if err == nil {
		return pointers, nil
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	for i := range pointers {
		if pointers[i] != 0 {
			d.kept = append(d.kept, keptBlock{pointers[i], want[i]})
		}
	}
	return nil, err
}

// allocateBlocks asks the driver. When that has no more memory, it tries again after
// freeing memory without a holder, which waits for the work that uses it, and once
// more after freeing everything that is kept.
func (d *Device) allocateBlocks(want []C.uint64_t, got []C.owcu_ptr, sizes []int64) error {
	try := func() error {
		err := d.call(func(e *C.struct_owcu_error) C.int {
			return C.owcu_alloc(d.ctx, C.int64_t(len(want)), &want[0], &got[0], e)
		})
		if err != nil {
			_ = d.freeBlocks(slices.Clone(got)) // what the driver refused to free
			clear(got)
		}
		return err
	}
	if len(want) == 0 {
		return nil
	}
	err := try()
	if errors.Is(err, errs.ErrMemory) && d.reapAndFreeKept() == nil {
		err = try()
	}
	if !errors.Is(err, errs.ErrMemory) {
		return err
	}
	if err := d.Trim(); err != nil {
		return err
	}
	if err = try(); !errors.Is(err, errs.ErrMemory) {
		return err
	}
	var all, most int64
	for _, n := range sizes {
		all += n
		most = max(most, n)
	}
	return d.addSizesToError(err, all, fmt.Sprintf("%d tensors, the largest of %d", len(sizes), most))
}

// addSizesToError adds to an out-of-memory error how much was asked for, for what, and how
// much there was. Other errors stay as they are.
func (d *Device) addSizesToError(err error, asked int64, what string) error {
	var mem *errs.Memory
	if !errors.As(err, &mem) {
		return err
	}
	full := *mem
	full.Asked, full.For = asked, what
	if free, total, e := d.MemoryInfo(); e == nil {
		full.Free, full.Total = free, total
	}
	return &full
}
