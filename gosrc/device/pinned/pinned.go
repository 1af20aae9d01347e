// Package pinned manages pinned host memory, which a GPU copies to and from at the full rate of its link. Memory is
// reserved as address space and becomes ready part by part, while earlier parts are already in use. When a user of a
// GPU's memory is done, the memory is cached for the next user until Trim. Prepare makes memory ready in advance.
package pinned

import (
	"context"
	"maps"
	"runtime"
	"sync"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/overwire/overwire/gosrc/device/cuda"
	"github.com/overwire/overwire/gosrc/device/cuda/memory"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/idle"
	"github.com/overwire/overwire/gosrc/internal/sizes"
	"github.com/overwire/overwire/gosrc/internal/spawn"
)

const (
	page = 4096
	huge = 2 << 20

	// mostUnits is the maximum size of a part, in units of memory.RegisterAlignment. The first part is one unit, so
	// that copies begin early. Larger parts are faulted in and registered faster: on a machine with an H200, at 37 GB/s
	// in parts of 256 MiB and at 21 GB/s in parts of 32 MiB.
	mostUnits = 8
)

// A Memory is pinned host memory, or ordinary memory without a GPU. Its user calls Keep or Free once, when it is no
// longer used. Several goroutines may call Await.
type Memory struct {
	gpu    *cuda.Device // nil if not registered
	raw    unsafe.Pointer
	mapped uintptr
	base   unsafe.Pointer // a multiple of memory.RegisterAlignment
	room   int64          // bytes of address space from base

	mu      sync.Mutex
	limit   int64 // maximum bytes to make ready
	want    int64
	ready   int64    // bytes from base that are ready
	parts   [][]byte // registered
	growing bool
	gentle  bool // grow only while a core is idle
	ended   bool
	err     error         // why growth has stopped
	moved   chan struct{} // closed and replaced when a field changes
}

// kept caches unused memory, by GPU.
var kept = struct {
	mu  sync.Mutex
	all map[*cuda.Device]*Memory
}{all: map[*cuda.Device]*Memory{}}

// takeKept removes and returns the cached memory of a GPU, or returns nil.
func takeKept(gpu *cuda.Device) *Memory {
	kept.mu.Lock()
	defer kept.mu.Unlock()
	m := kept.all[gpu]
	delete(kept.all, gpu)
	return m
}

// Take returns memory for up to room bytes. At most limit bytes of it become ready. It uses the cached memory of the
// GPU if that is suitable, even if it is still growing. A nil GPU means ordinary memory.
func Take(room, limit int64, gpu *cuda.Device) (*Memory, error) {
	if room <= 0 || room > 1<<45 || limit <= 0 {
		return nil, errs.New(errs.ErrArgument,
			"invalid host memory of %d bytes with limit %d: expected 1 to 2^45 bytes, and a positive limit",
			room, limit)
	}
	if m := takeKept(gpu); m != nil {
		if m.takeOver(room, limit) {
			return m, nil
		}
		m.Free()
	}
	return newMemory(room, limit, gpu)
}

// takeOver prepares cached memory for a new user, and reports whether it is suitable.
func (m *Memory) takeOver(room, limit int64) bool {
	m.mu.Lock()
	grows := m.want <= limit && m.growing // and will not exceed the new limit
	m.mu.Unlock()
	if !grows {
		m.stopGrowth()
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.room < room || m.ready > limit || m.ready%memory.RegisterAlignment() != 0 || m.err != nil {
		return false
	}
	if !m.growing {
		m.want = m.ready
	}
	m.limit, m.ended, m.gentle = min(limit, m.room), false, false
	m.wakeWaiters()
	return true
}

func newMemory(room, limit int64, gpu *cuda.Device) (*Memory, error) {
	unit := memory.RegisterAlignment()
	m := &Memory{gpu: gpu, room: sizes.RoundUp(room, unit), moved: make(chan struct{})}
	if gpu != nil {
		m.room *= 2 // address space costs nothing, and the next user may need a little more
	}
	m.limit = min(limit, m.room)
	m.mapped = uintptr(m.room + unit)
	raw, err := unix.MmapPtr(-1, 0, nil, m.mapped, unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANON|unix.MAP_NORESERVE)
	if err != nil {
		return nil, &errs.Memory{Where: "host", Asked: room, Free: -1, Total: -1, For: "address space",
			Err: err.Error()}
	}
	m.raw = raw
	m.base = unsafe.Add(raw, (unit-int64(uintptr(raw)%uintptr(unit)))%unit)
	return m, nil
}

// Ready returns how many bytes of a GPU's cached memory are ready.
func Ready(gpu *cuda.Device) int64 {
	kept.mu.Lock()
	defer kept.mu.Unlock()
	if m := kept.all[gpu]; m != nil {
		m.mu.Lock()
		defer m.mu.Unlock()
		return m.ready
	}
	return 0
}

// Bytes returns n bytes at offset off. Await must have returned for them.
func (m *Memory) Bytes(off, n int64) []byte {
	return unsafe.Slice((*byte)(unsafe.Add(m.base, off)), n)
}

// Want starts to make the first n bytes ready, up to the limit. It does not wait.
func (m *Memory) Want(n int64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if n = min(n, m.limit); n <= m.want && (m.growing || n <= m.ready) || m.ended || m.err != nil {
		return
	}
	unit := int64(page)
	if m.gpu != nil {
		unit = memory.RegisterAlignment()
	}
	m.want = max(m.want, min(sizes.RoundUp(n, unit), sizes.RoundUp(m.limit, page)))
	if !m.growing {
		m.growing = true
		spawn.Go("pinned", m.growParts)
	}
}

// Await waits until the first n bytes are ready.
func (m *Memory) Await(ctx context.Context, n int64) error {
	for {
		m.mu.Lock()
		ready, growing, err, signal := m.ready, m.growing, m.err, m.moved
		if m.ended && err == nil {
			err = errs.New(errs.ErrEngine, "the pinned memory was already returned")
		}
		m.mu.Unlock()
		switch {
		case n <= ready:
			return nil
		case err != nil:
			return err
		case n > m.limit:
			return &errs.Memory{Where: "host", Asked: n, Free: m.limit, Total: m.limit, For: "stored bytes"}
		case !growing || n > m.want:
			m.Want(n + max(huge, n/32))
			continue
		}
		select {
		case <-signal:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// growParts makes parts ready until the wanted bytes are. It faults in the next part while one is being registered.
func (m *Memory) growParts() {
	err := spawn.Guard("pinned", func() error {
		lo, offset := m.ready, m.ready
		for {
			hi := m.partEnd(lo)
			if lo == hi {
				return nil
			}
			if m.isGentle() {
				m.waitForIdleCore()
			}
			if offset < hi {
				if err := m.touchRange(offset, hi); err != nil {
					return err
				}
				offset = hi
			}
			var ahead chan error
			if end := m.partEnd(hi); end > hi && m.gpu != nil && !m.isGentle() {
				ahead = make(chan error, 1)
				spawn.Go("pinned", func() {
					ahead <- spawn.Guard("pinned", func() error { return m.touchRange(hi, end) })
				})
				offset = end
			}
			err := m.pinRange(lo, hi)
			if ahead != nil {
				if e := <-ahead; err == nil {
					err = e
				}
			}
			if err != nil {
				return err
			}
			lo = hi
		}
	})
	m.mu.Lock()
	defer m.mu.Unlock()
	defer m.wakeWaiters()
	switch {
	case err != nil:
		m.err, m.growing = err, false
	case m.nextPart(m.ready) > m.ready: // Want was called during the allocation
		spawn.Go("pinned", m.growParts)
	default:
		m.growing = false
	}
}

// wakeWaiters wakes goroutines that wait for a change. The caller holds m.mu.
func (m *Memory) wakeWaiters() {
	close(m.moved)
	m.moved = make(chan struct{})
}

// partEnd returns the end of the part that begins at lo, or lo if no more bytes are wanted.
func (m *Memory) partEnd(lo int64) int64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.nextPart(lo)
}

func (m *Memory) nextPart(lo int64) int64 {
	if m.ended || lo >= m.want {
		return lo
	}
	if m.gpu == nil {
		return m.want
	}
	unit := memory.RegisterAlignment()
	if m.gentle {
		return min(m.want, lo+unit) // small parts, because registering memory blocks the driver
	}
	return min(m.want, lo+min(max(lo/unit, 1), mostUnits)*unit)
}

// touchRange makes [lo, hi) accessible and, with a GPU, faults in its pages.
func (m *Memory) touchRange(lo, hi int64) error {
	b := m.Bytes(lo, hi-lo)
	if err := unix.Mprotect(b, unix.PROT_READ|unix.PROT_WRITE); err != nil {
		return &errs.Memory{Where: "host", Asked: hi, Free: -1, Total: -1, For: "stored bytes", Err: err.Error()}
	}
	_ = unix.Madvise(b, unix.MADV_HUGEPAGE)
	if m.gpu == nil {
		return nil // writers will fault it in
	}
	near := m.gpu.NearNode()
	_ = near.Bind(b) // if it fails, pages are placed near the threads that touch them
	threads := 0
	if m.isGentle() {
		threads = 1
	}
	memory.FaultIn(b, near, threads)
	return nil
}

// pinRange registers [lo, hi) and marks it as ready.
func (m *Memory) pinRange(lo, hi int64) error {
	b := m.Bytes(lo, hi-lo)
	if m.gpu != nil {
		if err := m.gpu.Register(b); err != nil {
			return err
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.gpu != nil {
		m.parts = append(m.parts, b)
	}
	m.ready = hi
	m.wakeWaiters()
	return nil
}

// stopGrowth stops the growth and waits until it has stopped.
func (m *Memory) stopGrowth() {
	for {
		m.mu.Lock()
		m.ended = true
		growing, signal := m.growing, m.moved
		m.mu.Unlock()
		if !growing {
			return
		}
		<-signal
	}
}

// Keep returns the memory, which is cached for the GPU's next user unless more is cached already.
func (m *Memory) Keep() {
	m.stopGrowth()
	if m.gpu == nil || m.err != nil || m.ready == 0 {
		m.Free()
		return
	}
	kept.mu.Lock()
	other := kept.all[m.gpu]
	if other == nil || other.promisedBytes() < m.ready {
		kept.all[m.gpu], m = m, other
	}
	kept.mu.Unlock()
	if m != nil {
		m.Free()
	}
}

// promisedBytes returns how many bytes are ready or will become ready without a new user.
func (m *Memory) promisedBytes() int64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.growing {
		return max(m.ready, m.want)
	}
	return m.ready
}

// Free returns the memory to the system.
func (m *Memory) Free() {
	m.stopGrowth()
	var remaining atomic.Int64
	remaining.Store(int64(len(m.parts)) + 1)
	finish := func() {
		if remaining.Add(-1) == 0 {
			_ = unix.MunmapPtr(m.raw, m.mapped)
		}
	}
	for _, b := range m.parts {
		m.gpu.Unregister(b, finish)
	}
	m.parts = nil
	finish()
}

// Trim frees all cached memory.
func Trim() {
	kept.mu.Lock()
	all := maps.Clone(kept.all)
	clear(kept.all)
	kept.mu.Unlock()
	for _, m := range all {
		m.Free()
	}
}

// Prepare starts to make n bytes ready for a GPU's next Take. If Take is called earlier, it takes over the bytes that
// are ready, and the rest continues to become ready. Before Take, one thread does this, and only while a core of the
// process is idle. room is the maximum that Take may ask for. Cached memory counts, so repeating the same call does
// nothing.
func Prepare(room, n int64, gpu *cuda.Device) (*Memory, error) {
	if gpu == nil || n <= 0 || room < n || room > 1<<45 {
		return nil, errs.New(errs.ErrArgument,
			"invalid pinned memory of %d bytes in %d bytes of address space: expected a GPU and 1 to 2^45 bytes",
			n, room)
	}
	n = sizes.RoundUp(n, memory.RegisterAlignment()) // takeOver only accepts multiples of this
	kept.mu.Lock()
	m, old := kept.all[gpu], (*Memory)(nil)
	if m != nil && !m.extendTo(room, n) {
		m, old = nil, m
	}
	var err error
	if m == nil {
		if m, err = newMemory(max(room, n), n, gpu); err == nil {
			kept.all[gpu], m.gentle = m, true
		} else {
			delete(kept.all, gpu)
		}
	}
	if err == nil {
		m.Want(n)
	}
	kept.mu.Unlock()
	if old != nil {
		old.Free()
	}
	return m, err
}

// extendTo allows cached memory to grow to n bytes if it has enough address space.
func (m *Memory) extendTo(room, n int64) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.room < room || m.err != nil || m.ready%memory.RegisterAlignment() != 0 {
		return false
	}
	m.limit = min(max(m.limit, m.ready, n), m.room)
	if !m.growing {
		m.want = m.ready
	}
	m.gentle, m.ended = true, false
	return true
}

// Prepared waits until n bytes are ready, or the memory has been taken or freed, and returns how many are ready. If the
// context ends first, the growth stops. Bytes that are ready stay ready.
func (m *Memory) Prepared(ctx context.Context, n int64) (int64, error) {
	for {
		m.mu.Lock()
		ready, err, signal := m.ready, m.err, m.moved
		over := m.ended || !m.gentle || !m.growing
		m.mu.Unlock()
		switch {
		case n <= ready || err == nil && over:
			return ready, nil
		case err != nil:
			return ready, err
		}
		select {
		case <-signal:
		case <-ctx.Done():
			m.mu.Lock()
			if m.gentle { // it has not been taken
				m.want = m.ready
			}
			growing, signal := m.gentle && m.growing, m.moved
			m.mu.Unlock()
			if growing {
				<-signal
			}
		}
	}
}

// Drop frees the cached memory of a GPU.
func Drop(gpu *cuda.Device) {
	if m := takeKept(gpu); m != nil {
		m.Free()
	}
}

func (m *Memory) isGentle() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.gentle
}

// waitForIdleCore waits until a core is idle, but at most one second.
func (m *Memory) waitForIdleCore() {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	idle.New().Wait(func() bool {
		m.mu.Lock()
		defer m.mu.Unlock()
		return !m.gentle || m.ended
	})
}
