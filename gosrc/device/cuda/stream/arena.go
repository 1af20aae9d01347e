package stream

/*
#include "../driver/context.h"
#include "batch.h"
*/
import "C"

import (
	"unsafe"

	"github.com/overwire/overwire/gosrc/device/cuda/memory"
)

// An arena is one pinned and one device allocation, with streams and events.
type arena struct {
	on    *Streams
	pages memory.Pages
	c     C.struct_owcu_arena
	pads  []*pad // pads for batches
}

// newArena allocates `bytes` bytes on the host and `room` bytes on the device. See owcu_arena_new.
func newArena(on *Streams, bytes, room int64, streams, events, sleepers int, what string) (*arena, error) {
	p, err := memory.NewPages(bytes, on.ctx.NearNode())
	if err != nil {
		return nil, err
	}
	a := &arena{on: on, pages: p}
	var e C.struct_owcu_error
	rc := C.owcu_arena_new(on.c, &a.c, p.P, C.uint64_t(p.N), C.uint64_t(room), C.int(streams), C.int(events),
		C.int(sleepers), &e)
	if rc == 0 {
		return a, nil
	}
	if rc > 0 {
		on.mem.DeferFree(a.tryFree)
	} else {
		p.Free()
	}
	return nil, on.ctx.AddSizes(on.errorOf(&e), room, what)
}

// newPads makes an arena that is divided into pads.
func newPads(on *Streams, count, bytes, room int) (*arena, error) {
	a, err := newArena(on, int64(count*bytes), int64(count*room), 0, count, 0, "the tables of a batch")
	if err != nil {
		return nil, err
	}
	for i, event := range unsafe.Slice(a.c.events, count) {
		a.pads = append(a.pads, &pad{
			on: on, host: unsafe.Add(a.pages.P, i*bytes), mapped: a.c.mapped + C.owcu_ptr(i*bytes),
			dev: a.c.device + C.owcu_ptr(i*room), bytes: bytes, room: room, done: event,
		})
	}
	return a, nil
}

// tryFree frees an unused arena. See memory.Free.
func (a *arena) tryFree() (gone bool, err error) {
	var e C.struct_owcu_error
	rc := C.owcu_arena_free(a.on.c, &a.c, &e)
	if rc <= 0 {
		a.pages.Free()
	}
	if rc != 0 {
		err = a.on.errorOf(&e)
	}
	return rc <= 0, err
}

// A pad is the memory of one batch: its status words, table and rows. batch is set while its kernels may be running,
// unless the Batch is no longer referenced.
type pad struct {
	on          *Streams
	host        unsafe.Pointer
	mapped, dev C.owcu_ptr
	bytes, room int
	done        C.owcu_handle
	used        bool // done was recorded
	batch       *Batch
}

// wait waits for the pad's last batch. If isKnown is true, the batch has ended and err is its error. Otherwise the
// driver could not tell.
func (p *pad) wait() (isKnown bool, err error) {
	var e C.struct_owcu_error
	rc := C.owcu_wait_batch(p.on.c, p.done, &e)
	if rc != 0 {
		err = p.on.errorOf(&e)
	}
	return rc != C.OWCU_UNKNOWN, err
}

// finish waits for the pad's last batch and sets its result. If the state of its kernels is unknown, it returns an
// error and the pad stays in use.
func (p *pad) finish() error {
	if !p.used {
		return nil
	}
	isKnown, err := p.wait()
	if !isKnown {
		return err
	}
	p.used = false
	if p.batch != nil {
		p.batch.takeResults(p, err)
	}
	return nil
}

// isDone reports whether the pad's last batch has ended.
func (p *pad) isDone() bool {
	if !p.used {
		return true
	}
	var e C.struct_owcu_error
	return C.owcu_is_batch_done(p.on.c, p.done, &e) != 0
}
