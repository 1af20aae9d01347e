//go:build cgo

package cuda

/*
#include "lane.h"
*/
import "C"

// An Event is a point in a device's work, by which queues and streams are ordered.
// It means the last time that it was told of; before the first it is no wait.
type Event struct {
	dev *Device
	c   C.owcu_handle
}

// NewEvent makes one, which Free ends.
func (d *Device) NewEvent() (*Event, error) {
	var e C.struct_owcu_error
	v := &Event{dev: d}
	if C.owcu_event(d.ctx, &v.c, &e) != 0 {
		return nil, failure(d.index, &e)
	}
	return v, nil
}

// Free ends the event: no slot that it was given to is under way, and no stream
// waits for it. What cannot be given back to a lost device is lost with it.
func (v *Event) Free() {
	bury := func() bool {
		var e C.struct_owcu_error
		return C.owcu_event(v.dev.ctx, &v.c, &e) <= 0
	}
	if !bury() {
		v.dev.later(bury)
	}
}

// Before makes a stream go on after the event; its number is as for WaitFor.
func (v *Event) Before(stream uintptr) error {
	var e C.struct_owcu_error
	if C.owcu_event_before(v.dev.ctx, v.c, C.uint64_t(stream), &e) != 0 {
		return failure(v.dev.index, &e)
	}
	return nil
}

// Order makes the caller's slot's next Submit write to the jobs' places after an
// event, though its bytes may cross the wire before; and tells the other when that
// and what earlier ones with an Order wrote is there. Slots that view memory of
// the device do not wait for each other, and tell of themselves.
func (s *Slot) Order(after, then *Event) { s.c.after, s.c.then = after.c, then.c }
