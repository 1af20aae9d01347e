package cuda

/*
#include "queue.h"
*/
import "C"

import "unsafe"

// An Event is a point in a device's work, by which queues and streams are ordered.
// It refers to its last record; before the first record, waiting for it returns at
// once.
type Event struct {
	dev *Device
	c   C.owcu_handle
}

// NewEvent makes an event, to be freed with Free.
func (d *Device) NewEvent() (*Event, error) {
	v := &Event{dev: d}
	err := d.call(func(e *C.struct_owcu_error) C.int { return C.owcu_event_new(d.ctx, &v.c, e) })
	return v, err
}

// Free frees the event. No slot that it was passed to may be in flight, and no
// stream may wait for it. On a lost device it is simply dropped.
func (v *Event) Free() { v.dev.freeOrDefer(C.OWCU_EVENT, unsafe.Pointer(v.c)) }

// Before makes a stream wait for the event; the stream's number is as for WaitFor.
func (v *Event) Before(stream uintptr) error {
	return v.dev.call(func(e *C.struct_owcu_error) C.int {
		return C.owcu_event_before(v.dev.ctx, v.c, C.uint64_t(stream), e)
	})
}

// Order makes the slot's next Submit wait for `after` before it writes to
// destinations, though its bytes may be copied to the staging before; `then` is
// recorded when that Submit and all earlier ones with an Order have finished. Slots
// that view device memory do not wait for each other, and record only their own
// end.
func (s *Slot) Order(after, then *Event) { s.c.after, s.c.then = after.c, then.c }

// looseGap is more than the bytes that may lie between neighbours of a loose piece.
const looseGap = 16

// Loose lets the slot's next Submit also write the bytes between the destinations of
// neighbouring tasks, fewer than 16: what lies alike in the slot and at its
// destinations then goes there in one copy, without the staging and without a kernel.
func (s *Slot) Loose() { s.loose = true }
