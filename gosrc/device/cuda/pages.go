//go:build cgo

package cuda

/*
#include "lane.h"
*/
import "C"

import (
	"runtime"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/overwire/overwire/gosrc/fault"
	"github.com/overwire/overwire/gosrc/internal/spawn"
)

const huge = 2 << 20

// pages is host memory on huge pages, all of it touched: registering memory
// that is there takes a thirtieth of the time of the driver's own allocation.
type pages struct {
	raw    unsafe.Pointer
	mapped uintptr
	p      unsafe.Pointer // on a huge page's boundary
	n      int64
}

func newPages(n int64) (pages, error) {
	n = (n + huge - 1) &^ (huge - 1)
	if n <= 0 || n > 1<<40 {
		return pages{}, fault.New(fault.ErrArgument, "%d bytes of pinned memory", n)
	}
	mapped := uintptr(n + huge)
	raw, err := unix.MmapPtr(-1, 0, nil, mapped, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		return pages{}, &fault.Memory{Where: "host", Asked: n, Free: -1, Total: -1, For: "a pinned ring", Err: err.Error()}
	}
	up := (huge - int64(uintptr(raw)&(huge-1))) & (huge - 1)
	m := pages{raw: raw, mapped: mapped, p: unsafe.Add(raw, up), n: n}
	b := unsafe.Slice((*byte)(m.p), n)
	_ = unix.Madvise(b, unix.MADV_HUGEPAGE)
	// A forked child must not copy pages that the GPU writes or reads.
	_ = unix.Madvise(b, unix.MADV_DONTFORK)
	threads := int64(max(1, min(16, runtime.GOMAXPROCS(0))))
	part := (n/huge + threads - 1) / threads * huge
	var wg sync.WaitGroup
	for lo := int64(0); lo < n; lo += part {
		wg.Add(1)
		spawn.Go("cuda touch", func() {
			defer wg.Done()
			for i := lo; i < min(n, lo+part); i += 4096 {
				b[i] = 0
			}
		})
	}
	wg.Wait()
	return m, nil
}

// Register pins memory of the caller's, which begins on a page: the device then
// copies from it without a step between. It holds for every device of the
// process, until Unregister; the memory is not the child's after a fork.
func (d *Device) Register(b []byte) error {
	_ = unix.Madvise(b, unix.MADV_DONTFORK)
	var e C.struct_owcu_error
	if C.owcu_register(d.ctx, unsafe.Pointer(&b[0]), C.uint64_t(len(b)), &e) != 0 {
		_ = unix.Madvise(b, unix.MADV_DOFORK)
		return d.sized(failure(d.index, &e), int64(len(b)), "pinned memory")
	}
	return nil
}

// Unregister undoes Register, when no copy is under way, and then calls `then`:
// soon, and not before it returns, since the driver may wait there for work of
// others. Until then the memory is the driver's.
func (d *Device) Unregister(b []byte, then func()) {
	d.later(func() bool {
		var e C.struct_owcu_error
		if C.owcu_unregister(d.ctx, unsafe.Pointer(&b[0]), &e) > 0 {
			return false
		}
		then() // a lost device has let go already
		return true
	})
}

func (m pages) free() {
	if m.raw != nil {
		_ = unix.MunmapPtr(m.raw, m.mapped)
	}
}
