package peers

// This file paces goroutines that poll for events of the device and other processes, which occur every few
// microseconds. In a virtual machine, a sleeping goroutine wakes up a few hundred microseconds late, and waking one
// takes about as long.

import (
	"time"

	"golang.org/x/sys/unix"

	"github.com/overwire/overwire/gosrc/device/cuda/queue"
)

// A Pacer rests between two polls. The longer there is no work, the longer it rests. The zero value is ready to use.
type Pacer struct{ idle time.Time } // when the work ran out, or zero while there is work

const (
	// spinTime is how long a Pacer spins without work before it sleeps.
	spinTime = 200 * time.Microsecond
	// longestRest is the maximum sleep between two polls.
	longestRest = time.Millisecond
)

// RestUnless is called after each poll. worked means that there was work.
func (p *Pacer) RestUnless(worked bool) {
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
