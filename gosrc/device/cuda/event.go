//go:build cgo

package cuda

/*
#include "lane.h"
*/
import "C"

// An Event is a point in a device's work, by which lanes and streams are ordered
// without the host. It means the last time that it was told of; before the first
// it is no wait at all.
type Event struct {
	dev *Device
	c   C.owcu_handle
}

// NewEvent makes one, which Free ends.
func (d *Device) NewEvent() (*Event, error) {
	var e C.struct_owcu_error
	var c C.owcu_handle
	if C.owcu_event(d.ctx, &c, &e) != 0 {
		return nil, failure(d.index, &e)
	}
	return &Event{d, c}, nil
}

// Free ends the event. No slot that it was given to is under way, and no stream
// still waits for it.
func (v *Event) Free() error {
	var e C.struct_owcu_error
	if C.owcu_event_free(v.dev.ctx, v.c, &e) != 0 {
		return failure(v.dev.index, &e)
	}
	return nil
}

// Before makes a stream go on after the event; its number is as for WaitFor.
func (v *Event) Before(stream uintptr) error {
	var e C.struct_owcu_error
	if C.owcu_event_before(v.dev.ctx, v.c, C.uint64_t(stream), &e) != 0 {
		return failure(v.dev.index, &e)
	}
	return nil
}

// After makes the slot's next Submit write to the jobs' places after an event
// only; its bytes may cross the wire before. The caller owns the slot.
func (s *Slot) After(v *Event) { s.c.after = v.c }

// Then tells an event when what the slot's next Submit writes is there, and what
// earlier ones of the lane wrote that had a Then.
func (s *Slot) Then(v *Event) { s.c.then = v.c }
