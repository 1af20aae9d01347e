package queue

/*
#include "queue.h"
*/
import "C"

import (
	"context"
	"slices"
	"sync"
	"time"
	"unsafe"

	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/device/cuda/driver"
	"github.com/overwire/overwire/gosrc/internal/spawn"
)

// A completer finishes the submitted slots of a queue: it waits for their work, calls done for their tasks, and frees
// the slots.
type completer struct {
	ctx       *driver.Context
	c         *C.struct_owcu_queue
	free      *freeSlots
	submitted chan *Slot    // in order of submission, for run
	ended     chan struct{} // closed when run has ended

	polled    bool       // see Queue.UsePolling; set while no work is in flight
	finishing sync.Mutex // held while slots of a polled queue are being finished
	asked     []*Slot    // used by finishEnded; guarded by finishing

	mu       sync.Mutex // guards the fields below; never held during driver calls, so that run does not wait for them
	inflight int
	drained  chan struct{}    // closed and replaced when inflight becomes 0
	broken   error            // the first device error, with which later submits fail
	flying   []*Slot          // submitted slots of a polled queue, in order of submission
	trace    device.TraceFunc // nil if times are not reported
	origin   time.Time
}

// deviceError returns the error that broke the queue, if any.
func (f *completer) deviceError() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.broken
}

// recordError returns an error and records it if it is the first device error. Out-of-memory errors, and errors because
// a stream is being captured, are not recorded, because the next call may succeed.
func (f *completer) recordError(e *C.struct_owcu_error) error {
	err := f.ctx.ErrorOf(unsafe.Pointer(e))
	f.mu.Lock()
	defer f.mu.Unlock()
	if e.code != C.OWCU_OUT_OF_MEMORY && e.code != C.OWCU_CAPTURED && f.broken == nil {
		f.broken = err
	}
	return err
}

// add adds a submitted slot to those that will be finished.
func (f *completer) add(s *Slot) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.inflight++
	if f.polled {
		f.flying = append(f.flying, s)
		return
	}
	f.submitted <- s // has space for all slots
}

// run finishes slots one by one, in the order of submission.
func (f *completer) run() {
	defer close(f.ended)
	for s := range f.submitted {
		_ = spawn.Guard("cuda completer", func() error { f.finishSlot(s); return nil })
	}
}

// stop ends run. No work may be in flight.
func (f *completer) stop() {
	close(f.submitted)
	<-f.ended
}

// finishSlot waits for a slot's work, calls done, and frees the slot. It frees the slot even after a panic, because
// drain and Close wait for it.
func (f *completer) finishSlot(s *Slot) {
	var e C.struct_owcu_error
	var err error
	if C.owcu_wait_slot(f.c, C.int(s.index), &e) != 0 {
		err = f.recordError(&e)
	}
	defer func() {
		f.free.putSlotAndJoined(s)
		f.mu.Lock()
		defer f.mu.Unlock()
		if f.inflight--; f.inflight == 0 {
			close(f.drained)
			f.drained = make(chan struct{})
		}
	}()
	if err == nil {
		s.build.t.collectErrors(s)
		f.reportTimes(s)
	}
	s.callDone(err)
	for _, m := range s.joined {
		m.callDone(err)
	}
}

// finishEnded finishes the completed slots of a polled queue, on each stream in the order of submission. It
// reports whether there were any. It does not wait for the device.
func (f *completer) finishEnded() (worked bool) {
	f.finishing.Lock()
	defer f.finishing.Unlock()
	f.mu.Lock()
	f.asked = append(f.asked[:0], f.flying...)
	f.mu.Unlock()
	var busy [C.OWCU_STREAMS]bool
	for _, s := range f.asked {
		stream := s.lastStream()
		if busy[stream] || C.owcu_has_slot_ended(f.c, C.int(s.index)) == 0 {
			busy[stream] = true
			continue
		}
		f.finishFlying(s)
		worked = true
	}
	return worked
}

// finishAll waits for all slots of a polled queue and finishes them.
func (f *completer) finishAll() {
	f.finishing.Lock()
	defer f.finishing.Unlock()
	for len(f.flying) > 0 {
		f.finishFlying(f.flying[0])
	}
}

// finishFlying waits for a slot of a polled queue and finishes it. The caller holds f.finishing.
func (f *completer) finishFlying(s *Slot) {
	f.mu.Lock()
	f.flying = slices.DeleteFunc(f.flying, func(other *Slot) bool { return other == s })
	f.mu.Unlock()
	_ = spawn.Guard("cuda queue", func() error { f.finishSlot(s); return nil })
}

// countFlying returns the number of submitted slots of a polled queue that are not finished or being finished.
func (f *completer) countFlying() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.flying)
}

// drain waits until all slots are finished or ctx ends. It returns the error that broke the queue, if any.
func (f *completer) drain(ctx context.Context) error {
	for {
		f.mu.Lock()
		n, signal, err := f.inflight, f.drained, f.broken
		f.mu.Unlock()
		if n == 0 {
			return err
		}
		select {
		case <-signal:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// setTrace sets the function that receives the times of slots from now on. nil stops the reports.
func (f *completer) setTrace(trace device.TraceFunc) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.trace, f.origin = trace, time.Now()
}

// reportTimes calls trace for a completed slot.
func (f *completer) reportTimes(s *Slot) {
	f.mu.Lock()
	trace, origin := f.trace, f.origin
	f.mu.Unlock()
	if trace == nil {
		return
	}
	at := func(k int) time.Time { return origin.Add(time.Duration(float64(s.c.at[k]) * 1e6)) }
	if s.copied > 0 {
		trace("copy", 0, at(0), at(1), s.copied)
	}
	if s.c.nlaunches > 0 {
		tensorBytes := s.tensorBytes()
		for _, m := range s.joined {
			tensorBytes += m.tensorBytes()
		}
		trace("decode", 1+int(s.c.stream), at(2), at(3), tensorBytes)
	}
}
