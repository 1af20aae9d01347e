//go:build cgo

package cuda

/*
#include "lane.h"
*/
import "C"

import (
	"time"

	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/fault"
)

// Floor measures the wire: count copies of n bytes from the queue's slots to
// their staging, and nothing else. No slot is in use meanwhile.
func (l *Queue) Floor(n int64, count int) (time.Duration, error) {
	if n <= 0 || n > l.size || count <= 0 {
		return 0, fault.New(fault.ErrArgument, "%d copies of %d bytes", count, n)
	}
	start := time.Now()
	var e C.struct_owcu_error
	if C.owcu_floor(l.c, C.uint64_t(l.size+headBytes), headBytes, C.uint64_t(n), C.int(count), &e) != 0 {
		return 0, failure(l.dev.index, &e)
	}
	return time.Since(start), nil
}

// StagingBytes is how many bytes of host memory are registered for the queue, and as
// many lie on the device for them.
func (l *Queue) StagingBytes() int64 { return l.pages.n }

// Asynchronous is true: a completer tells of what has landed.
func (l *Queue) Asynchronous() bool { return true }

// Across measures the device's memory: count copies of n bytes from one half of
// the staging to the other. No slot is in use meanwhile.
func (l *Queue) Across(n int64, count int) (time.Duration, error) {
	half := l.pages.n / 2 &^ 255
	if n <= 0 || n > half || count <= 0 {
		return 0, fault.New(fault.ErrArgument, "%d copies of %d bytes", count, n)
	}
	start := time.Now()
	var e C.struct_owcu_error
	if C.owcu_across(l.c, C.uint64_t(half), C.uint64_t(n), C.int(count), &e) != 0 {
		return 0, failure(l.dev.index, &e)
	}
	return time.Since(start), nil
}

// Again measures the kernels alone: it launches those of every slot's last piece
// again, count times, and copies nothing. The pieces were submitted since the
// queue was made, have landed, needed no scratch and one round, and their
// destinations are still held. No slot is in use meanwhile.
func (l *Queue) Again(count int) (time.Duration, error) {
	if count <= 0 {
		return 0, fault.New(fault.ErrArgument, "%d launches", count)
	}
	for _, s := range l.slots {
		if s.rounds > 1 {
			return 0, fault.New(fault.ErrArgument, "a piece that took %d rounds cannot be launched again", s.rounds)
		}
	}
	start := time.Now()
	var e C.struct_owcu_error
	if C.owcu_again(l.c, C.int(count), &e) != 0 {
		return 0, failure(l.dev.index, &e)
	}
	return time.Since(start), nil
}

// Time has every piece tell, when it has landed, when the device copied it and
// when its kernels ran; nil: no more. Nothing is under way. Of a piece that
// takes several rounds the last is told.
func (l *Queue) Time(span device.Span) error {
	on := C.int(0)
	if span != nil {
		on = 1
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.broken != nil {
		return l.broken
	}
	l.span = nil
	var e C.struct_owcu_error
	if C.owcu_timing(l.c, on, &e) != 0 {
		return l.fail(&e)
	}
	l.span, l.origin = span, time.Now()
	return nil
}

// told passes on when a piece that has landed was copied and decoded.
func (l *Queue) told(s *Slot) {
	l.mu.Lock()
	span, origin := l.span, l.origin
	l.mu.Unlock()
	if span == nil {
		return
	}
	at := func(k int) time.Time { return origin.Add(time.Duration(float64(s.c.at[k]) * 1e6)) }
	span("copy", 0, at(0), at(1), s.taken[0])
	if s.c.nlaunches > 0 {
		span("decode", 1+int(s.c.stream), at(2), at(3), s.taken[1])
	}
}
