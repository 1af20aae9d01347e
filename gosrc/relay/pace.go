package relay

// This file paces goroutines that poll for events of readers, the device and other ranks, which occur every few
// microseconds. In a virtual machine, a sleeping goroutine wakes up a few hundred microseconds late, and waking it
// costs the waker as much. If movePieces woke the readers, it could not feed the GPU during that time.

import (
	"time"

	"golang.org/x/sys/unix"

	"github.com/overwire/overwire/gosrc/device/cuda/queue"
)

// A pacer rests between two polls. The longer there is no work, the longer it rests. The zero value is ready to use.
type pacer struct{ idle time.Time } // when the work ran out, or zero while there is work

const (
	// spinTime is how long a pacer spins without work before it sleeps.
	spinTime = 200 * time.Microsecond
	// longestRest is the maximum sleep between two polls.
	longestRest = time.Millisecond
	// landingPause is how long Ready waits before it polls again.
	landingPause = time.Millisecond
	// lateAfter is how long waiting readers rely on movePieces, which usually begins a round every few microseconds.
	lateAfter = 300 * time.Microsecond
)

// restUnless is called after each poll. worked means that there was work.
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
	_ = unix.ClockNanosleep(unix.CLOCK_MONOTONIC, 0, &nap, nil) // time.Sleep may be a millisecond late
}
