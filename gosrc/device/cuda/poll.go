package cuda

/*
#include "queue.h"
*/
import "C"

import (
	"slices"

	"github.com/overwire/overwire/gosrc/internal/spawn"
)

// This file has polled queues, whose user asks again and again what has ended, and does not wait for it.

// UsePolling makes the queue a polled one until Close: no goroutine of its own finishes slots. Its user calls
// FinishEnded again and again, since a thread that sleeps until the device wakes it, and then wakes others, is
// late by hundreds of microseconds. Get and Drain may wait for these calls, which another goroutine then makes.
// UsePolling is called while no slot is in use.
func (q *Queue) UsePolling() { q.polled = true }

// FinishEnded finishes the slots whose work has ended by now, on each stream in the order of submission: it
// calls their done and takes them back. It reports whether there were any, and does not wait for the device.
func (q *Queue) FinishEnded() (worked bool) {
	q.finishing.Lock()
	defer q.finishing.Unlock()
	q.mu.Lock()
	q.asked = append(q.asked[:0], q.flying...)
	q.mu.Unlock()
	var busy [C.OWCU_STREAMS]bool
	for _, s := range q.asked {
		stream := s.lastStream()
		if busy[stream] || C.owcu_has_slot_ended(q.c, C.int(s.index)) == 0 {
			busy[stream] = true
			continue
		}
		q.finishFlying(s)
		worked = true
	}
	return worked
}

// finishAll waits for all slots of a polled queue, and finishes them.
func (q *Queue) finishAll() {
	q.finishing.Lock()
	defer q.finishing.Unlock()
	for len(q.flying) > 0 {
		q.finishFlying(q.flying[0])
	}
}

// finishFlying waits for a slot of a polled queue, and finishes it. q.finishing is held.
func (q *Queue) finishFlying(s *Slot) {
	q.mu.Lock()
	q.flying = slices.DeleteFunc(q.flying, func(other *Slot) bool { return other == s })
	q.mu.Unlock()
	_ = spawn.Guard("cuda queue", func() error { q.finishSlot(s); return nil })
}

// lastStream is the stream on which the slot's work ends, as submit_slot in queue.c has it.
func (s *Slot) lastStream() int {
	if s.c.nlaunches == 0 {
		return 0
	}
	return int(1+s.c.stream) % C.OWCU_STREAMS
}

// TryGet is Get that does not wait: nil if no slot is free.
func (q *Queue) TryGet() *Slot { return q.TryGetFor(anyone) }

// TryGetFor is GetFor that does not wait: nil if no slot is free.
func (q *Queue) TryGetFor(reader int) *Slot {
	s := q.free.tryTakeSlotFor(reader)
	if s != nil {
		s.ownFresh()
	}
	return s
}

// CountFree is how many slots TryGet would give now.
func (q *Queue) CountFree() int { return len(q.free.tokens) }

// CountFlying is how many slots of a polled queue were submitted, and neither are finished nor being finished.
func (q *Queue) CountFlying() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return len(q.flying)
}

// PauseBriefly lets some hundred nanoseconds pass, for those that ask again and again.
func PauseBriefly() { C.owcu_pause(16) }
