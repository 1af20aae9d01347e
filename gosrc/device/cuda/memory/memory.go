package memory

/*
#include <stdlib.h>
#include "../driver/context.h"
*/
import "C"

import (
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/device/cuda/driver"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/spawn"
)

// defaultStream is DLPack's number for the legacy default stream.
const defaultStream = 1

// A Memory allocates and frees one GPU's memory.
//
// The reaper goroutine frees memory, unless memory is short or a Free function is called. Freeing may make the driver
// wait for other work, which would delay a load. Tensor memory becomes free when all work queued on the streams of its
// users has ended, as an event on each of these streams shows. It is then cached for the next load (keptBlocks). While
// one of these streams is being captured into a graph, no event can be recorded there, and the memory is not freed. If
// the driver rejects a free, the reaper tries again.
type Memory struct {
	ctx   *driver.Context
	c     C.owcu_handle // handle of ctx
	short func() error  // called if memory is short: frees other cached memory of the device

	list    *unsafe.Pointer // device.Listed blocks without a holder; in C memory
	freeing sync.Mutex      // held while Reap runs
	pending pendingFree     // guarded by freeing

	deferring sync.Mutex // held while deferred frees are tried

	mu       sync.Mutex // guards the fields below
	live     int        // blocks not yet freed
	kept     keptBlocks
	deferred []Free
	users    []C.uint64_t // streams passed to NoteStream
	reaping  bool
}

// A Free frees an unused resource and reports whether it was freed. If the driver rejected the free, it is called
// again.
type Free = func() (gone bool, err error)

// pendingFree holds blocks that were removed from the list and that queued work may still use.
type pendingFree struct {
	blocks []*device.Listed
	marked bool // events have been recorded
	events []C.owcu_handle
}

// New returns the memory manager of a device. short frees all other memory that is cached for the next load.
func New(ctx *driver.Context, short func() error) *Memory {
	list := (*unsafe.Pointer)(C.calloc(1, C.size_t(unsafe.Sizeof(uintptr(0)))))
	if list == nil {
		panic("out of memory for the head of a list")
	}
	return &Memory{ctx: ctx, c: C.owcu_handle(ctx.Handle()), short: short, list: list}
}

// call runs a C function and returns its error.
func (m *Memory) call(run func(e *C.struct_owcu_error) C.int) error {
	var e C.struct_owcu_error
	if run(&e) != 0 {
		return m.ctx.ErrorOf(unsafe.Pointer(&e))
	}
	return nil
}

// Alloc returns device memory for tensors of the given sizes. If it fails, it allocates nothing. Each tensor has
// exactly its size, is aligned to Align, and has one holder, the caller. The contents are undefined. Queued work may
// still use the memory when the last holder releases it. The memory is freed after that work, if the work's stream is
// the default stream or was passed to NoteStream.
func (m *Memory) Alloc(sizes []int64) ([]device.Memory, error) {
	regions, err := arrangeRegions(sizes)
	if err != nil {
		return nil, err
	}
	mem := make([]device.Memory, len(sizes))
	for i := range mem {
		mem[i].CUDA = int32(m.ctx.Index() + 1)
	}
	if len(regions) == 0 {
		return mem, nil
	}
	want := make([]C.uint64_t, len(regions))
	for i := range regions {
		want[i] = C.uint64_t(regions[i].bytes)
	}
	blocks, err := m.takeBlocks(want, sizes)
	if err != nil {
		return nil, err
	}
	for i := range regions {
		region := &regions[i]
		header := C.calloc(1, C.size_t(unsafe.Sizeof(device.Listed{})))
		if header == nil {
			panic("out of memory for a header of 64 bytes")
		}
		base := device.Pointer(uintptr(blocks[i]))
		b := device.NewListed(header, int64(len(region.member)), base, uint64(want[i]), device.KindCUDA,
			unsafe.Pointer(m.list))
		for k, n := range region.member {
			mem[n].Ptr, mem[n].Bytes, mem[n].Block = unsafe.Add(base, region.at[k]), sizes[n], &b.Block
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.live += len(regions)
	m.startReaper()
	return mem, nil
}

// takeBlocks returns memory for regions of the wanted sizes, from the cache and from the driver. It sets want to the
// actual lengths.
func (m *Memory) takeBlocks(want []C.uint64_t, sizes []int64) ([]C.owcu_ptr, error) {
	pointers := make([]C.owcu_ptr, len(want))
	var need []C.uint64_t
	var at []int
	m.mu.Lock()
	for i, n := range want {
		if b, ok := m.kept.take(uint64(n)); ok {
			pointers[i], want[i] = C.owcu_ptr(b.at), C.uint64_t(b.bytes)
		} else {
			need, at = append(need, n), append(at, i)
		}
	}
	m.mu.Unlock()
	fresh := make([]C.owcu_ptr, len(need))
	err := m.allocateBlocks(need, fresh, sizes)
	for k, i := range at {
		pointers[i] = fresh[k]
	}
	if err == nil {
		return pointers, nil
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for i, p := range pointers {
		if p != 0 {
			m.kept.add(uint64(p), uint64(want[i]))
		}
	}
	return nil, err
}

// allocateBlocks allocates memory with the driver. If memory is short, it frees memory without a holder, after the work
// that uses it, and tries again. If memory is still short, it frees all cached memory and tries a third time.
func (m *Memory) allocateBlocks(want []C.uint64_t, got []C.owcu_ptr, sizes []int64) error {
	try := func() error {
		err := m.call(func(e *C.struct_owcu_error) C.int {
			return C.owcu_alloc(m.c, C.int64_t(len(want)), &want[0], &got[0], e)
		})
		if err != nil {
			refused := make([]uint64, len(got)) // blocks that the driver failed to free after the error
			for i, p := range got {
				refused[i] = uint64(p)
			}
			_ = m.freeBlocks(refused)
			clear(got)
		}
		return err
	}
	if len(want) == 0 {
		return nil
	}
	err := try()
	if errors.Is(err, errs.ErrMemory) && m.FreeUnused() == nil {
		err = try()
	}
	if !errors.Is(err, errs.ErrMemory) {
		return err
	}
	if err := m.short(); err != nil {
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
	return m.ctx.AddSizes(err, all, fmt.Sprintf("%d tensors of up to %d bytes", len(sizes), most))
}

// NoteStream registers a stream that uses memory of Alloc. Memory that is released from now on is only freed after the
// work queued on the stream. The stream must live as long as the process. The default stream need not be registered.
func (m *Memory) NoteStream(stream uintptr) {
	if stream <= 2 {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if !slices.Contains(m.users, C.uint64_t(stream)) {
		m.users = append(m.users, C.uint64_t(stream))
	}
}

// Register pins the caller's memory, which must begin on a page boundary, so that devices can copy directly from it.
// The memory is pinned for all devices of the process until Unregister. A forked child does not inherit the memory.
func (m *Memory) Register(b []byte) error {
	_ = unix.Madvise(b, unix.MADV_DONTFORK)
	err := m.call(func(e *C.struct_owcu_error) C.int {
		return C.owcu_register(m.c, unsafe.Pointer(&b[0]), C.uint64_t(len(b)), e)
	})
	if err != nil {
		_ = unix.Madvise(b, unix.MADV_DOFORK)
	}
	return m.ctx.AddSizes(err, int64(len(b)), "pinned memory")
}

// Unregister undoes Register and then calls `then`, possibly after Unregister has returned, because the driver may wait
// for other work. No copy may use the memory any more, and it must stay allocated until `then` is called.
func (m *Memory) Unregister(b []byte, then func()) {
	m.DeferFree(func() (bool, error) {
		gone := m.ctx.TryRelease(driver.Pinned, unsafe.Pointer(&b[0]))
		if gone {
			then()
		}
		return gone, nil
	})
}

// ExportMemory returns a name with which MapExported maps memory in another process. Alloc must have returned the
// memory for a single tensor. It must not be freed while other processes use it.
func (m *Memory) ExportMemory(mem device.Memory) (string, error) {
	var h C.struct_owcu_ipc
	err := m.call(func(e *C.struct_owcu_error) C.int {
		return C.owcu_export_ipc(m.c, C.owcu_ptr(uintptr(mem.Ptr)), &h, e)
	})
	return hex.EncodeToString(unsafe.Slice((*byte)(unsafe.Pointer(&h)), unsafe.Sizeof(h))), err
}

// MapExported maps memory that another process exported, on this device or one that this device can access, until
// UnmapExported. It fails if the devices or processes cannot access each other.
func (m *Memory) MapExported(name string) (unsafe.Pointer, error) {
	var h C.struct_owcu_ipc
	raw, err := hex.DecodeString(name)
	if err != nil || len(raw) != int(unsafe.Sizeof(h)) {
		return nil, errs.New(errs.ErrArgument, "%q is not the name of device memory", name)
	}
	copy(unsafe.Slice((*byte)(unsafe.Pointer(&h)), len(raw)), raw)
	var p C.owcu_ptr
	err = m.call(func(e *C.struct_owcu_error) C.int { return C.owcu_map_ipc(m.c, &h, &p, e) })
	return device.Pointer(uintptr(p)), err
}

// UnmapExported unmaps memory of MapExported. No work may use it.
func (m *Memory) UnmapExported(at unsafe.Pointer) { m.Release(driver.Attached, at) }

// Release frees an unused object of the driver. If the driver rejects that, the reaper tries again.
func (m *Memory) Release(what driver.Thing, thing unsafe.Pointer) {
	_ = m.FreeNow(func() (bool, error) { return m.ctx.TryRelease(what, thing), nil })
}

// FreeNow calls free. If the driver rejects the free, the reaper calls free again.
func (m *Memory) FreeNow(free Free) error {
	gone, err := free()
	if !gone {
		m.DeferFree(free)
	}
	return err
}

// DeferFree makes the reaper call free until the resource has been freed.
func (m *Memory) DeferFree(free Free) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.deferred = append(m.deferred, free)
	m.startReaper()
}

// FreeDeferred calls the functions passed to DeferFree. Functions whose frees the driver rejects stay deferred.
func (m *Memory) FreeDeferred() {
	m.deferring.Lock()
	defer m.deferring.Unlock()
	m.mu.Lock()
	all := m.deferred
	m.deferred = nil
	m.mu.Unlock()
	var rest []Free
	for _, free := range all {
		if gone, _ := free(); !gone {
			rest = append(rest, free)
		}
	}
	m.mu.Lock()
	m.deferred = append(rest, m.deferred...)
	m.mu.Unlock()
}

// FreeUnused frees all tensor memory without a holder and all cached blocks. It waits for the work that uses them.
func (m *Memory) FreeUnused() error {
	err := m.Reap(true)
	m.mu.Lock()
	all := m.kept.removeAll()
	m.mu.Unlock()
	if e := m.freeBlocks(all); err == nil {
		err = e
	}
	return err
}

// Reap moves blocks without a holder, which no queued work uses, to the cache for the next load. If wait is set, it
// waits for the work that uses the other blocks without a holder. Calls of Reap exclude each other.
func (m *Memory) Reap(wait bool) (err error) {
	m.freeing.Lock()
	defer m.freeing.Unlock()
	for {
		busy, e := m.reapStep()
		if err == nil {
			err = e
		}
		if !busy || !wait {
			return err
		}
		time.Sleep(time.Millisecond)
	}
}

// reapStep runs one step of Reap. busy means that another step may do more.
func (m *Memory) reapStep() (busy bool, err error) {
	pending := &m.pending
	var e C.struct_owcu_error
	if len(pending.blocks) == 0 {
		for b := (*device.Listed)(atomic.SwapPointer(m.list, nil)); b != nil; b = b.Next() {
			pending.blocks = append(pending.blocks, b)
		}
		pending.marked = false
	}
	if len(pending.blocks) == 0 {
		return false, nil
	}
	if !pending.marked {
		m.mu.Lock()
		streams := append([]C.uint64_t{defaultStream}, m.users...)
		m.mu.Unlock()
		for len(pending.events) < len(streams) {
			pending.events = append(pending.events, nil)
		}
		switch C.owcu_try_record_events(m.c, C.int(len(streams)), &streams[0], &pending.events[0], &e) {
		case 0:
			pending.marked = true
		case 1:
			return false, nil
		default:
			return false, m.ctx.ErrorOf(unsafe.Pointer(&e))
		}
	}
	switch C.owcu_events_passed(m.c, C.int(len(pending.events)), &pending.events[0], &e) {
	case 0:
		return true, nil
	case 1:
	default:
		pending.marked = false
		return false, m.ctx.ErrorOf(unsafe.Pointer(&e))
	}
	m.mu.Lock()
	for _, b := range pending.blocks {
		base, n := b.Base()
		m.kept.add(uint64(uintptr(base)), n)
		C.free(unsafe.Pointer(b))
	}
	m.live -= len(pending.blocks)
	m.kept.touched = time.Now()
	m.startReaper() // frees the surplus later
	m.mu.Unlock()
	pending.blocks = pending.blocks[:0]
	return true, nil // there may be more on the list
}

// freeOldSurplus frees cached blocks beyond the permanent cache if they are old enough. It reports whether there are
// more.
func (m *Memory) freeOldSurplus() bool {
	m.mu.Lock()
	old, more := m.kept.removeSurplus()
	m.mu.Unlock()
	_ = m.freeBlocks(old) // the reaper tries again
	return more
}

// freeBlocks frees memory that no work uses. It skips zeros. If the driver rejects a free, the reaper tries again.
func (m *Memory) freeBlocks(all []uint64) error {
	var left []C.owcu_ptr
	for _, p := range all {
		if p != 0 {
			left = append(left, C.owcu_ptr(p))
		}
	}
	if len(left) == 0 {
		return nil
	}
	return m.FreeNow(func() (bool, error) {
		err := m.call(func(e *C.struct_owcu_error) C.int {
			return C.owcu_free(m.c, C.int64_t(len(left)), &left[0], e)
		})
		left = slices.DeleteFunc(left, func(p C.owcu_ptr) bool { return p == 0 })
		return len(left) == 0, err
	})
}

// startReaper starts the reaper unless it is running. The caller holds m.mu.
func (m *Memory) startReaper() {
	if !m.reaping {
		m.reaping = true
		spawn.Go("cuda reaper", m.runReaper)
	}
}

// runReaper polls for memory to free while there is any. It must poll, because the deleters that list memory must not
// wake a thread.
func (m *Memory) runReaper() {
	const least, most = 5 * time.Millisecond, 100 * time.Millisecond
	pause := least
	for {
		time.Sleep(pause)
		more := m.freeOldSurplus()
		m.mu.Lock()
		before := m.live + len(m.deferred)
		if before == 0 && !more {
			m.reaping = false
			m.mu.Unlock()
			return
		}
		m.mu.Unlock()
		_ = m.Reap(false) // a later step tries again, and the next call that can return an error does so
		m.FreeDeferred()
		m.mu.Lock()
		same := m.live+len(m.deferred) == before
		m.mu.Unlock()
		pause = least
		if same {
			pause = min(most, 2*pause+least)
		}
	}
}

// CountLive returns the number of blocks that are not freed or cached yet.
func (m *Memory) CountLive() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.live
}

// Close frees everything after the reaper has ended. No tensor may be left. Only tests call it.
func (m *Memory) Close() (err error) {
	end := time.Now().Add(time.Minute)
	for m.mu.Lock(); m.reaping; m.mu.Lock() {
		m.mu.Unlock()
		if time.Now().After(end) {
			return errs.New(errs.ErrEngine, "cuda:%d: %d blocks are still in use", m.ctx.Index(), m.CountLive())
		}
		time.Sleep(time.Millisecond)
	}
	m.mu.Unlock()
	for { // repeat while frees fail
		e := m.FreeUnused()
		m.FreeDeferred()
		if e == nil {
			break
		}
		if err == nil {
			err = e
		}
	}
	for _, event := range m.pending.events {
		for !m.ctx.TryRelease(driver.Event, driver.Handle(event)) {
		}
	}
	C.free(unsafe.Pointer(m.list))
	return err
}
