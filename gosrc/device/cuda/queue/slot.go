package queue

/*
#include "queue.h"
*/
import "C"

import (
	"unsafe"

	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/device/cuda/driver"
	"github.com/overwire/overwire/gosrc/internal/spawn"
)

// A Slot is the staging memory of one piece. The caller of Get owns it until Submit or Put.
//
// It has status words, tables and bytes in pinned memory. Its mirror in staging memory on the device has the same
// layout. Tables are written directly before the bytes, so that one copy usually covers both.
type Slot struct {
	q      *Queue
	c      *C.struct_owcu_slot
	index  int
	owned  bool
	reader int // the reader that last filled the slot, or anyone
	mem    slotMemory

	// Fields of the submission.
	modes  slotModes
	joined []*Slot // the work of these slots is part of this slot's work; see SubmitAll
	copied int64   // bytes copied, for the trace
	build  pieceBuilder

	result slotResult
}

// A slotMemory is the memory of a slot's piece.
type slotMemory struct {
	own    []byte         // pinned
	at     int64          // offset of own in the queue's memory
	host   unsafe.Pointer // host address of own
	dev    uint64         // address of own for kernels: in staging memory, or in place
	view   []byte         // registered memory used instead of own, or nil
	onDev  uint64         // device memory used instead of own, or 0
	devLen int64
}

// slotModes determine what the next Submit does.
type slotModes struct {
	loose   bool // see AllowGapWrites
	checks  bool // see CheckOnSubmit
	sumOnly bool // see SumOnly
}

// A slotResult collects the results of a slot's tasks.
type slotResult struct {
	count    int
	done     func(task int, err error)
	failures map[int]error // keyed by task
}

// ownFresh makes the caller the owner of the slot, and resets the slot.
func (s *Slot) ownFresh() {
	s.owned, s.modes, s.mem.view, s.mem.onDev = true, slotModes{}, nil, 0
	s.c.after, s.c.nbehind = nil, 0
}

// Memory returns the piece's bytes in host memory.
func (s *Slot) Memory() []byte {
	if s.mem.view != nil {
		return s.mem.view
	}
	return s.mem.own
}

// View replaces the slot's bytes with b until the slot is returned. b must be registered (memory.Register), because the
// device copies from it.
func (s *Slot) View(b []byte) {
	if !s.owned || len(b) > len(s.mem.own) {
		panic("cuda: View of a slot that the caller does not own, or of too much memory")
	}
	s.mem.view = b
}

// ViewMirror returns the slot's mirror in staging memory on the device, or nil. A caller of ViewMirror writes the
// piece's bytes there before Submit, which then only copies the tables, as with ViewDevice.
func (s *Slot) ViewMirror() unsafe.Pointer {
	if s.q.c.arena.device == 0 {
		return nil
	}
	at := s.q.c.arena.device + C.owcu_ptr(s.mem.at)
	s.ViewDevice(uintptr(at), int64(len(s.mem.own)))
	return device.Pointer(uintptr(at))
}

// ViewDevice replaces the slot's bytes with n bytes at p in device memory, until the slot is returned. They are not
// copied. p must be a multiple of 16. The caller must wait for the work that wrote them (FollowStream) and compare
// their checksums. The host does not read them, so only the chunks' records are checked, but kernels are safe for any
// bytes.
func (s *Slot) ViewDevice(p uintptr, n int64) {
	if !s.owned || p == 0 || p%16 != 0 {
		panic("cuda: ViewDevice of a slot that the caller does not own, or of unaligned memory")
	}
	s.mem.onDev, s.mem.devLen = uint64(p), n
}

// isReadInPlace reports whether kernels read the slot's piece without a copy to staging memory.
func (s *Slot) isReadInPlace() bool { return s.mem.onDev != 0 || s.q.inPlace }

// capacityBytes returns the maximum size of a piece in the slot.
func (s *Slot) capacityBytes() int64 {
	if s.mem.onDev != 0 {
		return s.mem.devLen
	}
	return int64(len(s.Memory()))
}

// CheckOnSubmit makes the slot's next Submit compare the checksums of its tasks that have one.
func (s *Slot) CheckOnSubmit() { s.modes.checks = true }

// SumOnly makes the slot's next Submit only compare the checksums of its tasks, with bytes in device memory
// (ViewDevice). It writes nothing to their destinations.
func (s *Slot) SumOnly() { s.modes.sumOnly = true }

// AllowGapWrites allows the slot's next Submit to overwrite the bytes between the destinations of neighbouring tasks if
// they are fewer than GapLimit. Tasks with the same layout in the slot as at their destinations are then copied
// together, without staging memory or a kernel.
func (s *Slot) AllowGapWrites() { s.modes.loose = true }

// FollowEvent makes the slot's next Submit wait for an event before it writes to destinations. Its bytes may be copied
// to staging memory before that. nil means no event.
func (s *Slot) FollowEvent(event *Event) {
	s.c.after = nil
	if event != nil {
		s.c.after = event.c
	}
}

// DelayKernels makes the kernels of the slot's next Submit wait for the work that is then queued on these streams, at
// most OWCU_BEHIND of them. Stream numbers are those of FollowStream.
func (s *Slot) DelayKernels(streams ...uintptr) {
	for i, stream := range streams {
		s.c.behind[i] = C.uint64_t(stream)
	}
	s.c.nbehind = C.uint32_t(len(streams))
}

// EndEvent returns the event at the end of the slot's last Submit. It is valid until the slot has been returned and is
// submitted again. The slot's queue owns it.
func (s *Slot) EndEvent() *Event { return &Event{ctx: s.q.pool.ctx, c: s.c.done} }

// beginPiece takes over the slot and the tasks in its first n bytes. After a panic the caller still owns the slot.
func (s *Slot) beginPiece(n int64, tasks []device.DecodeTask, done func(task int, err error)) {
	if !s.owned || n < 0 || n > s.capacityBytes() {
		panic("cuda: Submit of a slot that the caller does not own, or of too many bytes")
	}
	s.result.count, s.result.done = len(tasks), done
	clear(s.result.failures)
	s.copied = n
	if s.isReadInPlace() {
		s.copied = 0 // queueRound adds what it copies
	}
	s.build.checkPiece(s, n, tasks)
	s.owned = false
}

// tryJoinSlot adds another slot's work to this slot's work if possible, and reports whether it did.
func (s *Slot) tryJoinSlot(other *Slot) bool {
	b, o := &s.build, &other.build
	if len(b.runs) == 0 || len(o.runs) == 0 || s.c.after != other.c.after || len(s.joined)+1 == GroupSlots {
		return false
	}
	s.copied += other.copied
	s.joined = append(s.joined, other)
	return true
}

// callDone calls done for each task of a slot, even if one of these calls panics.
func (s *Slot) callDone(err error) {
	for i := range s.result.count {
		each := s.result.failures[i]
		if err != nil {
			each = err
		}
		_ = spawn.Guard("cuda completer", func() error { s.result.done(i, each); return nil })
	}
}

// lastStream returns the stream on which the slot's work ends. It must match submit_slot in queue.c.
func (s *Slot) lastStream() int {
	if s.c.nlaunches == 0 {
		return 0
	}
	return int(1+s.c.stream) % C.OWCU_STREAMS
}

// tensorBytes returns the number of tensor bytes of a slot's tasks.
func (s *Slot) tensorBytes() (n int64) {
	for i := range s.build.tasks {
		n += int64(s.build.tasks[i].Chunk.Logical)
	}
	return n
}

// An Event marks the end of a slot's last Submit, for queues and streams that wait for it. Before the first Submit,
// waiting for it returns immediately.
type Event struct {
	ctx *driver.Context
	c   C.owcu_handle
}

// MakeStreamWait makes a stream wait for the event, unless v is nil. Stream numbers are those of FollowStream.
func (v *Event) MakeStreamWait(stream uintptr) error {
	if v == nil {
		return nil
	}
	return call(v.ctx, func(e *C.struct_owcu_error) C.int {
		return C.owcu_stream_follow_event(C.owcu_handle(v.ctx.Handle()), v.c, C.uint64_t(stream), e)
	})
}
