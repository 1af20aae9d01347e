package cuda

/*
#include "queue.h"
*/
import "C"

// An Event is the end of a slot's work, by which queues and streams are ordered. It refers to the
// slot's last Submit; before the first, waiting for it returns at once.
type Event struct {
	dev *Device
	c   C.owcu_handle
}

// MakeStreamWait makes a stream wait for the event, if there is one; the stream's number is as for FollowStream.
func (v *Event) MakeStreamWait(stream uintptr) error {
	if v == nil {
		return nil
	}
	return v.dev.call(func(e *C.struct_owcu_error) C.int {
		return C.owcu_stream_follow_event(v.dev.ctx, v.c, C.uint64_t(stream), e)
	})
}

// FollowEvent makes the slot's next Submit wait for an event before it writes to destinations, though its
// bytes may be copied to the staging before. nil: it waits for none.
func (s *Slot) FollowEvent(event *Event) {
	s.c.after = nil
	if event != nil {
		s.c.after = event.c
	}
}

// DelayKernels makes the kernels of the slot's next Submit wait for what is queued on these streams then, at
// most OWCU_BEHIND of them. The numbers are as for FollowStream.
func (s *Slot) DelayKernels(streams ...uintptr) {
	for i, stream := range streams {
		s.c.behind[i] = C.uint64_t(stream)
	}
	s.c.nbehind = C.uint32_t(len(streams))
}

// EndEvent is the event of the end of the slot's last Submit. It stays that until the slot, once it is
// back, is submitted again. The slot's queue owns it.
func (s *Slot) EndEvent() *Event { return &Event{dev: s.q.dev, c: s.c.done} }

// FollowStream makes everything submitted from now on wait for the work that is queued
// now on a stream of the same device: memory of torch's allocator may still be in
// use there. The number is DLPack's: 1 the legacy default stream, 2 the thread's,
// else a handle.
func (q *Queue) FollowStream(stream uintptr) error {
	q.order.Lock()
	defer q.order.Unlock()
	if err := q.deviceError(); err != nil {
		return err
	}
	var e C.struct_owcu_error
	if C.owcu_queue_follow(q.c, C.uint64_t(stream), &e) != 0 {
		return q.recordError(&e)
	}
	return nil
}

// looseGap is more than the bytes that may lie between neighbours of a loose piece.
const looseGap = 16

// AllowGapWrites lets the slot's next Submit also write the bytes between the destinations of
// neighbouring tasks, fewer than 16: what lies alike in the slot and at its
// destinations then goes there in one copy, without the staging and without a kernel.
func (s *Slot) AllowGapWrites() { s.loose = true }
