package memory

// Pinned memory of the host, before it is registered.

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

// HugePage is the size of the pages that pinned memory lies on.
const HugePage = 2 << 20

// registerAlignment: see RegisterAlignment. Tests make it smaller.
var registerAlignment int64 = 32 << 20

// RegisterAlignment divides memory that was registered in several parts: their ends are multiples of it, and
// no copy of package cuda's crosses one.
func RegisterAlignment() int64 { return registerAlignment }

// Pages are host memory on huge pages, all of it touched: registering such memory takes a thirtieth of the
// time of the driver's own allocation.
type Pages struct {
	raw    unsafe.Pointer
	mapped uintptr
	P      unsafe.Pointer // aligned to a huge page; nil: none
	N      int64
}

// NewPages makes pages near a device; nil: anywhere. Where a container refuses that, they lie where the
// threads that touch them run.
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

// ShrinkTo gives back what is more than the first n bytes.
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

// Free unmaps the pages, which are no longer registered.
func (h Pages) Free() {
	if h.P != nil {
		_ = unix.MunmapPtr(h.raw, h.mapped)
	}
}

// Spare are pages that get ready in the background, for the first who takes them.
type Spare struct {
	ready chan Pages
	mu    sync.Mutex
	taken bool
}

// PrepareSpare begins to make pages.
func PrepareSpare(n int64, near *nodes.Place) *Spare {
	s := &Spare{ready: make(chan Pages, 1)}
	spawn.Go("cuda ring", func() {
		p, _ := NewPages(n, near) // none if it failed: a queue tries again
		s.ready <- p
	})
	return s
}

// Take returns the pages, when they are ready, to the first caller, and none to others.
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

// FaultIn has the pages of b made by up to that many threads near a device (0: as many as gain something);
// nil: anywhere. It writes a zero into each page: b is fresh memory.
//
// Not by MADV_POPULATE_WRITE, in which threads wait for each other: on a machine with an H200, 16 of them
// touch 37 GB/s, and populate 6.
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
