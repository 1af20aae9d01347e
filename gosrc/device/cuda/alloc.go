//go:build cgo

package cuda

/*
#include <stdlib.h>
#include "lane.h"
*/
import "C"

import (
	"errors"
	"fmt"
	"time"
	"unsafe"

	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/fault"
	"github.com/overwire/overwire/gosrc/internal/spawn"
)

const (
	// Align is the alignment of every tensor.
	Align = 256

	// The driver hands out memory above 1 MiB in units of 2 MiB. A tensor that
	// would waste more than a sixteenth of itself that way shares a slab.
	unit      = 2 << 20
	slabBytes = 32 << 20
)

// alone says whether a tensor of n bytes gets an allocation of its own.
func alone(n int64) bool {
	return n >= slabBytes || n >= 1<<20 && ((n+unit-1)&^(unit-1)-n)*16 <= n
}

// A region is one allocation and the tensors that lie in it.
type region struct {
	bytes  int64
	member []int
	at     []int64
}

// lay places tensors in regions.
func lay(sizes []int64) ([]region, error) {
	var all []region
	slab := -1
	for i, n := range sizes {
		switch {
		case n < 0 || n > 1<<46:
			return nil, fault.New(fault.ErrArgument, "size %d", n)
		case n == 0:
			continue
		case alone(n):
			all = append(all, region{bytes: n, member: []int{i}, at: []int64{0}})
			continue
		}
		room := (n + Align - 1) &^ (Align - 1)
		if slab < 0 || all[slab].bytes+room > slabBytes {
			slab = len(all)
			all = append(all, region{})
		}
		r := &all[slab]
		r.member, r.at = append(r.member, i), append(r.at, r.bytes)
		r.bytes += room
	}
	return all, nil
}

// Alloc returns device memory for tensors of the given sizes, each exact and
// aligned to Align and with one holder, the caller. All or nothing; what is in
// the memory is not defined. Work that reads it may still be queued when its
// last holder lets go: it is freed after that, by the device.
func (d *Device) Alloc(sizes []int64) ([]device.Memory, error) {
	regions, err := lay(sizes)
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
	got := make([]C.owcu_ptr, len(regions))
	if err := d.allocate(want, got, sizes); err != nil {
		return nil, err
	}
	for i := range regions {
		r := &regions[i]
		p := C.calloc(1, C.size_t(unsafe.Sizeof(device.Listed{})))
		if p == nil {
			panic("out of memory for a header of 64 bytes")
		}
		b := device.NewListed(p, int64(len(r.member)), pointer(got[i]), uint64(r.bytes), unsafe.Pointer(d.list))
		for k, n := range r.member {
			mem[n].Ptr, mem[n].Bytes, mem[n].Block = pointer(got[i]+C.owcu_ptr(r.at[k])), sizes[n], &b.Block
		}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.live += len(regions)
	if !d.reaping {
		d.reaping = true
		spawn.Go("cuda reaper", d.reaper)
	}
	return mem, nil
}

// allocate asks the driver, and once more after everything that is only kept
// was given back.
func (d *Device) allocate(want []C.uint64_t, got []C.owcu_ptr, sizes []int64) error {
	try := func() error {
		var e C.struct_owcu_error
		if C.owcu_alloc(d.ctx, C.int64_t(len(want)), &want[0], &got[0], &e) != 0 {
			return failure(d.index, &e)
		}
		return nil
	}
	err := d.reap()
	if err == nil {
		err = try()
	}
	if !errors.Is(err, fault.ErrMemory) {
		return err
	}
	if err := d.Trim(); err != nil {
		return err
	}
	if err = try(); !errors.Is(err, fault.ErrMemory) {
		return err
	}
	var all, most int64
	for _, n := range sizes {
		all += n
		most = max(most, n)
	}
	return d.sized(err, all, fmt.Sprintf("%d tensors, the largest of %d", len(sizes), most))
}

// sized says in an error of memory how much was asked for, for what, and how
// much there was. Other errors stay as they are.
func (d *Device) sized(err error, asked int64, what string) error {
	var mem *fault.Memory
	if !errors.As(err, &mem) {
		return err
	}
	full := *mem
	full.Asked, full.For = asked, what
	if unused, total, e := d.Free(); e == nil {
		full.Free, full.Total = unused, total
	}
	return &full
}

// reap frees the memory of blocks that nobody holds any more. When it returns,
// nobody else is still at it.
func (d *Device) reap() error {
	d.freeing.Lock()
	defer d.freeing.Unlock()
	first := (*device.Listed)(C.owcu_list_take((*unsafe.Pointer)(unsafe.Pointer(d.list))))
	if first == nil {
		return nil
	}
	var gone []C.owcu_ptr
	for b := first; b != nil; {
		next := b.Next()
		base, _ := b.Base()
		gone = append(gone, address(base))
		C.free(unsafe.Pointer(b))
		b = next
	}
	var e C.struct_owcu_error
	rc := C.owcu_free(d.ctx, C.int64_t(len(gone)), &gone[0], &e)
	d.mu.Lock()
	d.live -= len(gone)
	d.mu.Unlock()
	if rc != 0 {
		return failure(d.index, &e)
	}
	return nil
}

// reaper frees memory soon after it is let go, as long as there is any: the
// deleters that list it must not wake anybody.
func (d *Device) reaper() {
	const least, most = 5 * time.Millisecond, 100 * time.Millisecond
	pause := least
	for {
		time.Sleep(pause)
		d.mu.Lock()
		before := d.live
		if before == 0 {
			d.reaping = false
			d.mu.Unlock()
			return
		}
		d.mu.Unlock()
		_ = d.reap() // a lost device; the next call that matters says so
		d.mu.Lock()
		same := d.live == before
		d.mu.Unlock()
		pause = least
		if same {
			pause = min(most, 2*pause+least)
		}
	}
}
