package cuda

/*
#include "queue.h"
*/
import "C"

import (
	"time"
	"unsafe"

	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/errs"
)

// MeasureLink measures the link: count copies of n bytes from the queue's slots to their
// staging, and nothing else. No slot may be in use.
func (q *Queue) MeasureLink(n int64, count int) (time.Duration, error) {
	if n <= 0 || n > q.size || count <= 0 {
		return 0, errs.New(errs.ErrArgument, "%d copies of %d bytes", count, n)
	}
	if _, _, err := q.StagingMemory(); err != nil {
		return 0, err
	}
	on := Order{Stream: uintptr(unsafe.Pointer(*q.c.slab.streams))}
	start := time.Now()
	for i := range count {
		s := q.slots[i%len(q.slots)]
		if err := q.dev.Copy(on, uint64(q.c.slab.device)+uint64(s.at), uint64(uintptr(s.host)), n,
			i+1 == count); err != nil {
			_ = q.dev.SyncStream(on.Stream)
			return 0, err
		}
	}
	return time.Since(start), nil
}

// PinnedBytes is how many bytes of host memory are registered for the queue; the
// staging on the device, where there is one, has the same size.
func (q *Queue) PinnedBytes() int64 { return q.pages.n }

// Asynchronous is true: a completer reports what has landed.
func (q *Queue) Asynchronous() bool { return true }

// TraceTimes calls trace for every piece that has landed, with the times of its copy and
// of its kernels; nil ends this. No piece may be in flight. For a piece of several
// rounds it reports the last.
func (q *Queue) TraceTimes(trace device.TraceFunc) error {
	if err := q.deviceError(); err != nil {
		return err
	}
	var e C.struct_owcu_error
	var err error
	if C.owcu_time_slots(q.c, cBool(trace != nil), &e) != 0 {
		err, trace = q.recordError(&e), nil
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	q.trace, q.origin = trace, time.Now()
	return err
}

// reportTimes calls trace for a piece that has landed.
func (q *Queue) reportTimes(s *Slot) {
	q.mu.Lock()
	trace, origin := q.trace, q.origin
	q.mu.Unlock()
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

// tensorBytes is the tensor bytes of a slot's tasks.
func (s *Slot) tensorBytes() (n int64) {
	for i := range s.build.tasks {
		n += int64(s.build.tasks[i].Chunk.Logical)
	}
	return n
}
