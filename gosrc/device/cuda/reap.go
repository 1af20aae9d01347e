package cuda

/*
#include <stdlib.h>
#include "queue.h"
*/
import "C"

import (
	"slices"
	"time"
	"unsafe"

	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/internal/spawn"
)

// The reaper frees device memory on a thread of its own, unless memory is short or
// Trim is called: freeing may make the driver wait for other work, which no load
// should. Memory of tensors is freed once all work that was queued on the streams
// of its users is done, as an event on each stream shows. It is then kept for the
// next load: up to keepBytes for good, the rest until nothing was dropped or loaded
// for keepFor, so that a model that replaces another finds it. While one of these
// streams is captured into a graph it can have no event, and the memory stays. What
// the driver refuses to free is tried again.

// defaultStream is DLPack's number of the legacy default stream.
const defaultStream = 1

// pendingFree is memory without a holder, taken off the list, that queued work may
// still read.
type pendingFree struct {
	blocks []*device.Listed
	marked bool // events are recorded
	events []C.owcu_handle
}

// A keptBlock is device memory without a holder that no work uses. It is kept for
// the next load, since freeing it may wait for everything that is queued on the
// device, and stop all other calls meanwhile.
type keptBlock struct {
	at    C.owcu_ptr
	bytes C.uint64_t
}

// What is kept for good: the small tensors of most models. The rest is freed when
// nothing was added or taken for keepFor.
const (
	keepBytes  = 128 << 20
	keepPieces = 64
	keepFor    = time.Second
)

// removeSurplus removes the excess from what is kept, the oldest first. d.mu is held.
// later: it is too early for that.
func (d *Device) removeSurplus() (old []C.owcu_ptr, later bool) {
	n, keptCount := C.uint64_t(0), len(d.kept)
	for _, k := range d.kept {
		n += k.bytes
	}
	for _, k := range d.kept {
		if n <= keepBytes && keptCount <= keepPieces {
			break
		}
		if time.Since(d.touched) < keepFor {
			return nil, true
		}
		old = append(old, k.at)
		n, keptCount = n-k.bytes, keptCount-1
	}
	d.kept = d.kept[len(old):]
	return old, false
}

// takeKeptBlock returns the smallest kept block for n bytes that is not much too long. d.mu
// is held.
func (d *Device) takeKeptBlock(n C.uint64_t) (best keptBlock, ok bool) {
	at := -1
	for i, k := range d.kept {
		if k.bytes >= n && k.bytes <= n+n/8+1<<20 && (at < 0 || k.bytes < d.kept[at].bytes) {
			at = i
		}
	}
	if at < 0 {
		return keptBlock{}, false
	}
	best, d.touched = d.kept[at], time.Now()
	d.kept = append(d.kept[:at], d.kept[at+1:]...)
	return best, true
}

// reapAndFreeKept frees all tensor memory without a holder, and what is kept; it waits for
// the work that uses it.
func (d *Device) reapAndFreeKept() error {
	err := d.reapBlocks(true)
	d.mu.Lock()
	blocks := d.kept
	d.kept = nil
	d.mu.Unlock()
	at := make([]C.owcu_ptr, len(blocks))
	for i := range blocks {
		at[i] = blocks[i].at
	}
	if e := d.freeBlocks(at); err == nil {
		err = e
	}
	return err
}

// NoteStream registers a stream that works on memory of Alloc: what is released from now
// on is freed only after the work queued there. The stream lives as long as the
// process; the default stream need not be registered.
func (d *Device) NoteStream(stream uintptr) {
	if stream <= 2 {
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, s := range d.users {
		if s == C.uint64_t(stream) {
			return
		}
	}
	d.users = append(d.users, C.uint64_t(stream))
}

// reapBlocks frees, or keeps for the next load, the memory of blocks without a holder
// that no queued work uses; with wait it waits for such work. When it returns, no
// other call of it runs.
func (d *Device) reapBlocks(wait bool) (err error) {
	d.freeing.Lock()
	defer d.freeing.Unlock()
	for {
		busy, e := d.reapStep()
		if err == nil {
			err = e
		}
		if !busy || !wait {
			return err
		}
		time.Sleep(time.Millisecond)
	}
}

// reapStep takes one step of reapBlocks. busy: another step may do more.
func (d *Device) reapStep() (busy bool, err error) {
	pending := &d.pending
	var e C.struct_owcu_error
	if len(pending.blocks) == 0 {
		list := C.owcu_block_list_take_all((*unsafe.Pointer)(unsafe.Pointer(d.list)))
		for b := (*device.Listed)(list); b != nil; b = b.Next() {
			pending.blocks = append(pending.blocks, b)
		}
		pending.marked = false
	}
	if len(pending.blocks) == 0 {
		return false, nil
	}
	if !pending.marked {
		d.mu.Lock()
		streams := append([]C.uint64_t{defaultStream}, d.users...)
		d.mu.Unlock()
		for len(pending.events) < len(streams) {
			pending.events = append(pending.events, nil)
		}
		switch C.owcu_try_record_events(d.ctx, C.int(len(streams)), &streams[0], &pending.events[0], &e) {
		case 0:
			pending.marked = true
		case 1:
			return false, nil
		default:
			return false, errorOf(d.index, &e)
		}
	}
	switch C.owcu_events_passed(d.ctx, C.int(len(pending.events)), &pending.events[0], &e) {
	case 0:
		return true, nil
	case 1:
	default:
		pending.marked = false
		return false, errorOf(d.index, &e)
	}
	d.mu.Lock()
	for _, b := range pending.blocks {
		base, n := b.Base()
		d.kept = append(d.kept, keptBlock{deviceAddress(base), C.uint64_t(n)})
		C.free(unsafe.Pointer(b))
	}
	d.live -= len(pending.blocks)
	d.touched = time.Now()
	d.startReaper() // to free the excess later
	d.mu.Unlock()
	pending.blocks = pending.blocks[:0]
	return true, nil // there may be more on the list
}

// freeOldSurplus frees the excess of what is kept, if it is old enough, and reports
// whether there is more.
func (d *Device) freeOldSurplus() bool {
	d.mu.Lock()
	old, more := d.removeSurplus()
	d.mu.Unlock()
	_ = d.freeBlocks(old) // the reaper tries again
	return more
}

// freeBlocks frees memory that no work uses. What the driver refuses to free, the reaper
// tries again.
func (d *Device) freeBlocks(at []C.owcu_ptr) error {
	left, err := d.tryFreeBlocks(at)
	if len(left) > 0 {
		d.deferFree(func() bool {
			left, _ = d.tryFreeBlocks(left)
			return len(left) == 0
		})
	}
	return err
}

// tryFreeBlocks frees memory and returns what the driver refused to free; zeros are none.
func (d *Device) tryFreeBlocks(at []C.owcu_ptr) (left []C.owcu_ptr, err error) {
	isZero := func(p C.owcu_ptr) bool { return p == 0 }
	if at = slices.DeleteFunc(at, isZero); len(at) == 0 {
		return nil, nil
	}
	err = d.call(func(e *C.struct_owcu_error) C.int { return C.owcu_free(d.ctx, C.int64_t(len(at)), &at[0], e) })
	return slices.DeleteFunc(at, isZero), err
}

// freeOrDefer frees a thing of the driver's that nothing uses; if the driver refuses, the
// reaper tries again.
func (d *Device) freeOrDefer(what C.int, thing unsafe.Pointer) {
	if !d.tryFreeThing(what, thing) {
		d.deferFree(func() bool { return d.tryFreeThing(what, thing) })
	}
}

// tryFreeThing frees a thing and reports whether it is gone; with a lost device it is.
func (d *Device) tryFreeThing(what C.int, thing unsafe.Pointer) bool {
	var e C.struct_owcu_error
	return C.owcu_try_release(d.ctx, what, thing, &e) <= 0
}

// deferFree has the reaper call free until it reports that the memory is gone.
func (d *Device) deferFree(free func() bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.deferred = append(d.deferred, free)
	d.startReaper()
}

// freeDeferred calls what deferFree was given, and keeps those whose memory is not
// gone.
func (d *Device) freeDeferred() {
	d.deferring.Lock()
	defer d.deferring.Unlock()
	d.mu.Lock()
	all := d.deferred
	d.deferred = nil
	d.mu.Unlock()
	var rest []func() bool
	for _, free := range all {
		if !free() {
			rest = append(rest, free)
		}
	}
	d.mu.Lock()
	d.deferred = append(rest, d.deferred...)
	d.mu.Unlock()
}

// handleFreeResult turns the result of a C function that frees into an error, and has the
// reaper try again if the driver refused.
func (d *Device) handleFreeResult(rc C.int, e *C.struct_owcu_error, again func() bool) error {
	if rc == 0 {
		return nil
	}
	if rc > 0 {
		d.deferFree(again)
	}
	return errorOf(d.index, e)
}

// startReaper starts the reaper, unless it runs. d.mu is held.
func (d *Device) startReaper() {
	if !d.reaping {
		d.reaping = true
		spawn.Go("cuda reaper", d.runReaper)
	}
}

// runReaper polls for memory to free, as long as there is any: the deleters that list
// memory must not wake a thread.
func (d *Device) runReaper() {
	const least, most = 5 * time.Millisecond, 100 * time.Millisecond
	pause := least
	for {
		time.Sleep(pause)
		more := d.freeOldSurplus()
		d.mu.Lock()
		before := d.live + len(d.deferred)
		if before == 0 && !more {
			d.reaping = false
			d.mu.Unlock()
			return
		}
		d.mu.Unlock()
		_ = d.reapBlocks(false) // errors are tried again, and recur in the next call that reports them
		d.freeDeferred()
		d.mu.Lock()
		same := d.live+len(d.deferred) == before
		d.mu.Unlock()
		pause = least
		if same {
			pause = min(most, 2*pause+least)
		}
	}
}
