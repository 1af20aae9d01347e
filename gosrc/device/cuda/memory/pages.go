package memory

// This file makes host memory that will be pinned.

import (
	"runtime"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/nodes"
	"github.com/overwire/overwire/gosrc/internal/sizes"
	"github.com/overwire/overwire/gosrc/internal/spawn"
)

// HugePage is the size of the pages of pinned memory.
const HugePage = 2 << 20

// registerAlignment is RegisterAlignment's value. Tests make it smaller.
var registerAlignment int64 = 32 << 20

// RegisterAlignment divides memory that is registered in several parts: their ends are multiples of it, and no
// copy of package cuda crosses one.
func RegisterAlignment() int64 { return registerAlignment }

// Pages are host memory on huge pages, with all pages present. Registering such memory takes a thirtieth of the
// time of the driver's own allocation.
type Pages struct {
	raw    unsafe.Pointer
	mapped uintptr
	P      unsafe.Pointer // aligned to a huge page; nil if there are none
	N      int64
}

// NewPages makes pages near a device, or anywhere for nil. If a container refuses that, the pages are near the
// threads that touch them.
func NewPages(n int64, near *nodes.Place) (Pages, error) {
	if n <= 0 || n > 1<<40 {
		return Pages{}, errs.New(errs.ErrArgument, "invalid size %d of pinned memory: expected 1 to %d", n,
			int64(1)<<40)
	}
	n = sizes.RoundUp(n, HugePage)
	length := uintptr(n + HugePage)
	raw, err := unix.MmapPtr(-1, 0, nil, length, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		return Pages{}, &errs.Memory{Where: "host", Asked: n, Free: -1, Total: -1, For: "a pinned ring",
			Err: err.Error()}
	}
	up := (HugePage - int64(uintptr(raw)&(HugePage-1))) & (HugePage - 1)
	pages := Pages{raw: raw, mapped: length, P: unsafe.Add(raw, up), N: n}
	bytes := unsafe.Slice((*byte)(pages.P), n)
	_ = unix.Madvise(bytes, unix.MADV_HUGEPAGE)
	// A forked child must not copy pages that the GPU reads or writes.
	_ = unix.Madvise(bytes, unix.MADV_DONTFORK)
	_ = near.Bind(bytes)
	FaultIn(bytes, near, 0)
	return pages, nil
}

// ShrinkTo returns all but the first n bytes to the system.
func (h *Pages) ShrinkTo(n int64) {
	n = sizes.RoundUp(n, HugePage)
	if h.P == nil || h.N <= n {
		return
	}
	end := unsafe.Add(h.P, n)
	rest := uintptr(h.raw) + h.mapped - uintptr(end)
	if unix.MunmapPtr(end, rest) == nil {
		h.mapped, h.N = h.mapped-rest, n
	}
}

// Free unmaps the pages. They must not be registered any more.
func (h Pages) Free() {
	if h.P != nil {
		_ = unix.MunmapPtr(h.raw, h.mapped)
	}
}

// Spare holds pages that are made in the background, for the first caller that takes them.
type Spare struct {
	ready chan Pages
	mu    sync.Mutex
	taken bool
}

// PrepareSpare starts to make pages.
func PrepareSpare(n int64, near *nodes.Place) *Spare {
	s := &Spare{ready: make(chan Pages, 1)}
	spawn.Go("cuda ring", func() {
		p, _ := NewPages(n, near) // none if it failed: a queue tries again
		s.ready <- p
	})
	return s
}

// Take returns the pages, when they are ready, to the first caller. Others get none.
func (s *Spare) Take() Pages {
	s.mu.Lock()
	again := s.taken
	s.taken = true
	s.mu.Unlock()
	if again {
		return Pages{}
	}
	return <-s.ready
}

// FaultIn makes the pages of b present, by at most that many threads (0 means as many as help) near a device (nil
// means anywhere). It writes a zero into each page, so b must be fresh memory.
//
// It does not use MADV_POPULATE_WRITE, in which threads wait for each other: on a machine with an H200, 16
// threads touch 37 GB/s but populate 6.
func FaultIn(b []byte, near *nodes.Place, threads int) {
	const page = 4096
	if threads <= 0 {
		threads = max(1, min(16, runtime.GOMAXPROCS(0)))
	}
	part := (sizes.CeilDiv(len(b), HugePage) + threads - 1) / threads * HugePage
	var wg sync.WaitGroup
	for from := 0; from < len(b); from += part {
		spawn.GoFor(&wg, "cuda touch", func() {
			_ = near.Run(func() error {
				for i := from; i < min(len(b), from+part); i += page {
					b[i] = 0
				}
				return nil
			})
		})
	}
	wg.Wait()
}

// CopyTable copies a table to p+off and returns its length in bytes.
func CopyTable[T any](p unsafe.Pointer, off int, table []T) int {
	copy(unsafe.Slice((*T)(unsafe.Add(p, off)), len(table)), table)
	return len(table) * int(unsafe.Sizeof(*new(T)))
}
