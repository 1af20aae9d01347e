package cuda

// This file makes queues in the background, for loads that are about to begin.

/*
#include "queue.h"
*/
import "C"

// PrepareQueue makes a queue as Queue does, for a load that is about to begin, unless one is
// kept already. One of TablesOnly has its kernels loaded, which the driver does when each is first
// launched, and takes milliseconds for. It reports no error: Queue will.
func (d *Device) PrepareQueue(slots int, slotBytes int64) {
	d.making.Lock()
	defer d.making.Unlock()
	d.mu.Lock()
	hasIdle := d.idle[idleIndexFor(slotBytes)] != nil
	d.mu.Unlock()
	if hasIdle {
		return
	}
	if queue, err := d.takeOrMakeQueue(slots, slotBytes); err == nil {
		if slotBytes <= TablesOnly {
			var e C.struct_owcu_error
			_ = C.owcu_load_kernels(queue.c, &e)
		}
		queue.Close()
	}
}

// IsMakingQueue reports whether one is being made now, for which Queue would wait.
func (d *Device) IsMakingQueue() bool {
	if d.making.TryLock() {
		d.making.Unlock()
		return false
	}
	return true
}
