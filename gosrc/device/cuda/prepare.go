package cuda

// This file makes queues before the loads that will use them.

/*
#include "queue.h"
*/
import "C"

// PrepareQueue makes a queue, which the device keeps for the next call of Queue, unless it keeps
// one already. With TablesOnly it also loads the kernels, which takes the driver milliseconds when
// each is first launched. It reports no error: Queue will.
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

// IsMakingQueue reports whether a queue is being made now, for which Queue would wait.
func (d *Device) IsMakingQueue() bool {
	if d.making.TryLock() {
		d.making.Unlock()
		return false
	}
	return true
}
