// Package idle delays background work until the process leaves a core unused.
package idle

import (
	"runtime"
	"time"

	"golang.org/x/sys/unix"
)

// Cores determines whether the process leaves a core unused. It belongs to one thread and ignores that thread's
// own work.
type Cores struct {
	cores   float64 // cores available to other threads
	at      time.Time
	others  time.Duration // CPU time of other threads until at
	patient time.Duration // remaining time to wait in total
}

// New returns the Cores for the calling thread, to which the goroutine must be locked.
func New() *Cores {
	s := &Cores{cores: float64(runtime.GOMAXPROCS(0)) - 0.75, patient: time.Second}
	s.sampleUse()
	return s
}

// sampleUse reports whether a core was unused since the last call.
func (s *Cores) sampleUse() bool {
	now := time.Now()
	process, thread := processorTimes()
	others, wall := process-thread-s.others, now.Sub(s.at)
	s.at, s.others = now, process-thread
	return float64(others) <= s.cores*float64(wall)
}

// Wait waits until a core is unused. It returns false if stop returns true, or once it has waited for a second
// in total.
func (s *Cores) Wait(stop func() bool) bool {
	for pause := time.Millisecond; s.patient > 0 && !stop(); pause = min(2*pause, 50*time.Millisecond) {
		if time.Since(s.at) < time.Millisecond { // too short to measure
			time.Sleep(time.Millisecond)
		}
		if s.sampleUse() {
			return true
		}
		s.patient -= pause
		time.Sleep(pause)
	}
	return false
}

// processorTimes returns the CPU time of the process and of the calling thread. Both are 0 if the kernel does
// not report them.
func processorTimes() (process, thread time.Duration) {
	var p, t unix.Timespec
	if unix.ClockGettime(unix.CLOCK_PROCESS_CPUTIME_ID, &p) != nil ||
		unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &t) != nil {
		return 0, 0
	}
	return time.Duration(p.Nano()), time.Duration(t.Nano())
}
