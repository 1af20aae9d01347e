package job

// Tells the caller which requests have landed, in the order of their arrival.

import (
	"sync"
	"time"
)

// Landings are the requests of a job that have landed. It is safe for concurrent use.
type Landings struct {
	mu     sync.Mutex
	ready  []int         // landed, not yet returned
	wake   chan struct{} // closed and renewed when ready grows and Next waits
	asleep bool          // Next waits on wake
}

// NewLandings is room for a number of requests, without a limit.
func NewLandings(requests int) *Landings {
	return &Landings{ready: make([]int, 0, requests), wake: make(chan struct{})}
}

// Add says that a request has landed.
func (l *Landings) Add(i int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.ready = append(l.ready, i)
	if l.asleep {
		close(l.wake)
		l.wake, l.asleep = make(chan struct{}), false
	}
}

// Next returns the requests that have landed since the last call, in order of arrival,
// at most limit of them; it waits up to d for the first. more is false when the job,
// which ends with done, has ended and everything was returned.
func (l *Landings) Next(done <-chan struct{}, limit int, d time.Duration) (reqs []int, more bool) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	for {
		hasEnded := false
		select {
		case <-done: // all have landed that will
			hasEnded = true
		default:
		}
		l.mu.Lock()
		n := min(limit, len(l.ready))
		reqs = append(reqs, l.ready[:n]...)
		l.ready = l.ready[n:]
		wake := l.wake
		l.asleep = l.asleep || n == 0
		l.mu.Unlock()
		switch {
		case n > 0:
			return reqs, true
		case hasEnded:
			return nil, false
		}
		select {
		case <-wake:
		case <-done:
		case <-timer.C:
			return nil, true
		}
	}
}
