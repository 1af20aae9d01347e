package cuda

/*
#include "queue.h"
*/
import "C"

import (
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/nodes"
)

// hugePages is host memory on huge pages, all of it touched: registering such memory
// takes a thirtieth of the time of the driver's own allocation.
type hugePages struct {
	raw    unsafe.Pointer
	mapped uintptr
	p      unsafe.Pointer // aligned to a huge page
	n      int64
}

// newHugePages makes some near a device; nil: anywhere. Where a container refuses that, they
// lie where the threads that touch them run.
func newHugePages(n int64, near *nodes.Place) (hugePages, error) {
	n = (n + huge - 1) &^ (huge - 1)
	if n <= 0 || n > 1<<40 {
		return hugePages{}, errs.New(errs.ErrArgument, "%d bytes of pinned memory", n)
	}
	length := uintptr(n + huge)
	raw, err := unix.MmapPtr(-1, 0, nil, length, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		return hugePages{}, &errs.Memory{Where: "host", Asked: n, Free: -1, Total: -1, For: "a pinned ring",
			Err: err.Error()}
	}
	up := (huge - int64(uintptr(raw)&(huge-1))) & (huge - 1)
	pages := hugePages{raw: raw, mapped: length, p: unsafe.Add(raw, up), n: n}
	bytes := unsafe.Slice((*byte)(pages.p), n)
	_ = unix.Madvise(bytes, unix.MADV_HUGEPAGE)
	// A forked child must not copy pages that the GPU reads or writes.
	_ = unix.Madvise(bytes, unix.MADV_DONTFORK)
	_ = near.Bind(bytes)
	FaultInFreshPages(bytes, near, 0)
	return pages, nil
}

// Register pins the caller's memory, which must begin on a page: the device then
// copies straight from it. It holds for every device of the process until
// Unregister; a forked child does not get the memory.
func (d *Device) Register(b []byte) error {
	_ = unix.Madvise(b, unix.MADV_DONTFORK)
	err := d.call(func(e *C.struct_owcu_error) C.int {
		return C.owcu_register(d.ctx, unsafe.Pointer(&b[0]), C.uint64_t(len(b)), e)
	})
	if err != nil {
		_ = unix.Madvise(b, unix.MADV_DOFORK)
	}
	return d.addSizesToError(err, int64(len(b)), "pinned memory")
}

// Unregister undoes Register, after the last copy, and then calls `then`. That may
// happen after it returns, since the driver may wait for other work; the memory
// must stay allocated until then.
func (d *Device) Unregister(b []byte, then func()) {
	d.deferFree(func() bool {
		isGone := d.tryFreeThing(C.OWCU_PINNED, unsafe.Pointer(&b[0]))
		if isGone {
			then()
		}
		return isGone
	})
}

// shrinkTo gives back what is more than the first n bytes.
func (h *hugePages) shrinkTo(n int64) {
	n = (n + huge - 1) &^ (huge - 1)
	if h.raw == nil || h.n <= n {
		return
	}
	end := unsafe.Add(h.p, n)
	rest := uintptr(h.raw) + h.mapped - uintptr(end)
	if unix.MunmapPtr(end, rest) == nil {
		h.mapped, h.n = h.mapped-rest, n
	}
}

func (h hugePages) free() {
	if h.raw != nil {
		_ = unix.MunmapPtr(h.raw, h.mapped)
	}
}
