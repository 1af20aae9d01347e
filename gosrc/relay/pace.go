package relay

// This file paces goroutines that poll for events that readers, the device and other ranks produce every few
// microseconds. A goroutine that sleeps until it is woken is some hundred microseconds late in a virtual machine,
// and waking it costs the waker as much: if movePieces woke the readers, it could not feed the GPU meanwhile.

import (
	"time"

	"golang.org/x/sys/unix"

	"github.com/overwire/overwire/gosrc/device/cuda/queue"
)

// A pacer rests between two polls, longer the longer there was no work. The zero value is ready to use.
type pacer struct{ idle time.Time } // when work ran out; zero while there is work

const (
	// spinTime is how long a pacer keeps its core without work.
	spinTime = 200 * time.Microsecond
	// longestRest is the longest sleep between two polls after that.
	longestRest = time.Millisecond
	// landingPause is how long Ready waits before it polls again: landed requests do not wake it.
	landingPause = time.Millisecond
	// lateAfter is how long waiting readers rely on movePieces, which usually comes round every few microseconds.
	lateAfter = 300 * time.Microsecond
)

// restUnless is called after each poll. worked says that there was work.
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
