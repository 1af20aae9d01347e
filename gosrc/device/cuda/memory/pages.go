package memory

// This file allocates host memory to be pinned.

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

// HugePage is the page size of pinned memory.
const HugePage = 2 << 20

// registerAlignment is the result of RegisterAlignment. Tests make it smaller.
var registerAlignment int64 = 32 << 20

// RegisterAlignment returns the alignment of the parts in which memory is registered. No copy of package cuda crosses a
// multiple of this alignment.
func RegisterAlignment() int64 { return registerAlignment }

// Pages is resident host memory on huge pages. Registering it takes a thirtieth of the time of an allocation by the
// driver.
type Pages struct {
	raw    unsafe.Pointer
	mapped uintptr
	P      unsafe.Pointer // aligned to a huge page; nil if there is no memory
	N      int64
}

// NewPages allocates pages near a device, or anywhere if near is nil. If a container forbids that, the pages are near
// the threads that touch them first.
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

// Free unmaps the pages. They must not be registered.
func (h Pages) Free() {
	if h.P != nil {
		_ = unix.MunmapPtr(h.raw, h.mapped)
	}
}

// Spare holds pages that are allocated in the background, for the first caller of Take.
type Spare struct {
	ready chan Pages
	mu    sync.Mutex
	taken bool
}

// PrepareSpare starts to allocate pages.
func PrepareSpare(n int64, near *nodes.Place) *Spare {
	s := &Spare{ready: make(chan Pages, 1)}
	spawn.Go("cuda ring", func() {
		p, _ := NewPages(n, near) // empty after an error; the first queue then allocates its own pages
		s.ready <- p
	})
	return s
}

// Take waits for the pages and returns them to the first caller. Other callers get none.
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

// FaultIn faults in the pages of b, with up to a number of threads (0 means automatic) near a device (nil means
// anywhere). It writes a zero to each page, so b must be new memory.
//
// It does not use MADV_POPULATE_WRITE, in which threads wait for each other: on a machine with an H200, 16
// threads fault in 37 GB/s, but only 6 GB/s with that call.
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
