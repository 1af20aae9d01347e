package relay

// The pace of goroutines that ask again and again for what comes every few microseconds, from
// readers, the device and other ranks. One that sleeps until it is woken is late by some hundred
// microseconds in a virtual machine, and to wake one costs the waker as much: if
// movePieces woke the readers, it would not feed the GPU meanwhile.

import (
	"time"

	"golang.org/x/sys/unix"

	"github.com/overwire/overwire/gosrc/device/cuda/queue"
)

// A pacer rests between two looks for work, longer the longer there was none. The zero value is ready for use.
type pacer struct{ idle time.Time } // since when nothing was to be done; zero: there was something

const (
	// spinTime is how long a pacer keeps its core while nothing is to be done.
	spinTime = 200 * time.Microsecond
	// longestRest is the longest that a pacer then sleeps between two looks.
	longestRest = time.Millisecond
	// landingPause is how long Ready waits before it looks again: nothing that lands wakes it.
	landingPause = time.Millisecond
	// lateAfter is how long readers that wait leave all to movePieces, which comes round every few microseconds.
	lateAfter = 300 * time.Microsecond
)

// restUnless is called after each look for work; worked says that there was some.
func (p *pacer) restUnless(worked bool) {
	if worked {
		p.idle = time.Time{}
		return
	}
	now := time.Now()
	if p.idle.IsZero() {
		p.idle = now
	}
	idle := now.Sub(p.idle)
	if idle < spinTime {
		queue.PauseBriefly()
		return
	}
	nap := unix.NsecToTimespec(min(idle/8, longestRest).Nanoseconds())
	_ = unix.ClockNanosleep(unix.CLOCK_MONOTONIC, 0, &nap, nil) // time.Sleep may be late by a millisecond
}
