//go:build cgo

package cuda

/*
#include <stdlib.h>
#include "lane.h"
*/
import "C"

import (
	"time"
	"unsafe"

	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/internal/spawn"
)

// What goes back to the driver goes back on the reaper's thread alone, unless
// memory is short or somebody asks (Trim): the driver may wait there for work of
// others, and no load shall. It waits for nothing itself: memory of tensors is
// freed when all that was queued on the streams of its users is done, which an
// event on each tells, and then kept for the next load: as much as keepBytes for
// good, what is more until nothing was dropped or loaded for keepFor, so that a model
// that takes the place of another finds it; while one of these streams is
// captured into a graph there is no such event, and the memory stays. What the
// driver refuses is tried again.

// defaultStream is the legacy default stream, by the number that DLPack gives it.
const defaultStream = 1

// A parting is memory without a holder, off the list, while work that
// may read it is under way.
type parting struct {
	blocks []*device.Listed
	marked bool // events are recorded
	events []C.owcu_handle
}

// A span is memory of the device without a holder, which no work uses. It is kept
// for the next load: to give it back to the driver may wait for everything that
// is queued on the device, and stop all other calls meanwhile.
type span struct {
	at    C.owcu_ptr
	bytes C.uint64_t
}

// What is kept for good: the small tensors of most models. What is more goes back
// to the driver when for keepFor nothing was added or taken.
const (
	keepBytes  = 128 << 20
	keepPieces = 64
	keepFor    = time.Second
)

// surplus takes from what is kept that which is too much, the oldest first. d.mu is
// held. later says that it is too early for that.
func (d *Device) surplus() (old []C.owcu_ptr, later bool) {
	n, left := C.uint64_t(0), len(d.kept)
	for _, k := range d.kept {
		n += k.bytes
	}
	for _, k := range d.kept {
		if n <= keepBytes && left <= keepPieces {
			break
		}
		if time.Since(d.touched) < keepFor {
			return nil, true
		}
		old = append(old, k.at)
		n, left = n-k.bytes, left-1
	}
	d.kept = d.kept[len(old):]
	return old, false
}

// fit gives the smallest piece that is kept for n bytes, unless it is much too
// long. d.mu is held.
func (d *Device) fit(n C.uint64_t) (best span, ok bool) {
	at := -1
	for i, k := range d.kept {
		if k.bytes >= n && k.bytes <= n+n/8+1<<20 && (at < 0 || k.bytes < d.kept[at].bytes) {
			at = i
		}
	}
	if at < 0 {
		return span{}, false
	}
	best, d.touched = d.kept[at], time.Now()
	d.kept = append(d.kept[:at], d.kept[at+1:]...)
	return best, true
}

// giveBack frees all memory of tensors that has no holder any more, and what is
// kept of it; it waits for the work that uses that.
func (d *Device) giveBack() error {
	err := d.reap(true)
	d.mu.Lock()
	kept := d.kept
	d.kept = nil
	d.mu.Unlock()
	if len(kept) == 0 {
		return err
	}
	at := make([]C.owcu_ptr, len(kept))
	for i := range kept {
		at[i] = kept[i].at
	}
	var e C.struct_owcu_error
	rc := C.owcu_free(d.ctx, C.int64_t(len(at)), &at[0], &e)
	for _, left := range at {
		if left != 0 {
			d.loose(left)
		}
	}
	if rc != 0 && err == nil {
		err = failure(d.index, &e)
	}
	return err
}

// Used tells the device of a stream that works on memory of Alloc: what is freed
// from now on waits for what is queued there. The stream lives as long as the
// process; the default stream need not be told.
func (d *Device) Used(stream uintptr) {
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

// reap frees the memory of blocks that have no holder any more and that no queued
// work uses, or keeps it; with wait it waits for such work. When it returns, no other caller is
// still at it.
func (d *Device) reap(wait bool) (err error) {
	d.freeing.Lock()
	defer d.freeing.Unlock()
	for {
		busy, e := d.part()
		if err == nil {
			err = e
		}
		if !busy || !wait {
			return err
		}
		time.Sleep(time.Millisecond)
	}
}

// part takes one step of reap. busy says that the next may do more.
func (d *Device) part() (busy bool, err error) {
	p := &d.parting
	var e C.struct_owcu_error
	if len(p.blocks) == 0 {
		for b := (*device.Listed)(C.owcu_list_take((*unsafe.Pointer)(unsafe.Pointer(d.list)))); b != nil; b = b.Next() {
			p.blocks = append(p.blocks, b)
		}
		p.marked = false
	}
	if len(p.blocks) == 0 {
		return false, nil
	}
	if !p.marked {
		d.mu.Lock()
		streams := append([]C.uint64_t{defaultStream}, d.users...)
		d.mu.Unlock()
		for len(p.events) < len(streams) {
			p.events = append(p.events, nil)
		}
		switch C.owcu_mark(d.ctx, C.int(len(streams)), &streams[0], &p.events[0], &e) {
		case 0:
			p.marked = true
		case 1:
			return false, nil
		default:
			return false, failure(d.index, &e)
		}
	}
	switch C.owcu_passed(d.ctx, C.int(len(p.events)), &p.events[0], &e) {
	case 0:
		return true, nil
	case 1:
	default:
		p.marked = false
		return false, failure(d.index, &e)
	}
	d.mu.Lock()
	for _, b := range p.blocks {
		base, n := b.Base()
		d.kept = append(d.kept, span{address(base), C.uint64_t(n)})
		C.free(unsafe.Pointer(b))
	}
	d.live -= len(p.blocks)
	d.touched = time.Now()
	d.watch() // for what is too much of it
	d.mu.Unlock()
	p.blocks = p.blocks[:0]
	return true, nil // there may be more on the list
}

// shed gives back what is kept too much of, for too long, and says whether there
// will be more.
func (d *Device) shed() bool {
	d.mu.Lock()
	old, more := d.surplus()
	d.mu.Unlock()
	if len(old) > 0 {
		var e C.struct_owcu_error
		C.owcu_free(d.ctx, C.int64_t(len(old)), &old[0], &e)
		for _, at := range old {
			if at != 0 {
				d.loose(at)
			}
		}
	}
	return more
}

// loose has the reaper free a piece that nothing ever used.
func (d *Device) loose(at C.owcu_ptr) {
	d.later(func() bool {
		var e C.struct_owcu_error
		C.owcu_free(d.ctx, 1, &at, &e)
		return at == 0
	})
}

// later has the reaper give something back; bury says whether it is gone.
func (d *Device) later(bury func() bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.graves = append(d.graves, bury)
	d.watch()
}

// inter gives back what later was told of, and keeps what is not gone.
func (d *Device) inter() {
	d.burying.Lock()
	defer d.burying.Unlock()
	d.mu.Lock()
	all := d.graves
	d.graves = nil
	d.mu.Unlock()
	var left []func() bool
	for _, bury := range all {
		if !bury() {
			left = append(left, bury)
		}
	}
	d.mu.Lock()
	d.graves = append(left, d.graves...)
	d.mu.Unlock()
}

// given turns what a C function that gives back said into an error, and has the
// reaper try again where the driver refused.
func (d *Device) given(rc C.int, e *C.struct_owcu_error, again func() bool) error {
	if rc == 0 {
		return nil
	}
	if rc > 0 {
		d.later(again)
	}
	return failure(d.index, e)
}

// watch starts the reaper, if there is none. d.mu is held.
func (d *Device) watch() {
	if !d.reaping {
		d.reaping = true
		spawn.Go("cuda reaper", d.reaper)
	}
}

// reaper gives back soon what is let go, as long as there is any: the deleters
// that list it must not wake anybody.
func (d *Device) reaper() {
	const least, most = 5 * time.Millisecond, 100 * time.Millisecond
	pause := least
	for {
		time.Sleep(pause)
		more := d.shed()
		d.mu.Lock()
		before := d.live + len(d.graves)
		if before == 0 && !more {
			d.reaping = false
			d.mu.Unlock()
			return
		}
		d.mu.Unlock()
		_ = d.reap(false) // what fails is tried again; the next call that matters says so
		d.inter()
		d.mu.Lock()
		same := d.live+len(d.graves) == before
		d.mu.Unlock()
		pause = least
		if same {
			pause = min(most, 2*pause+least)
		}
	}
}
