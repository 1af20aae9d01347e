package job

// This file reports which requests are ready, in the order in which they became ready.

import (
	"sync"
	"time"
)

// Landings collects the requests of a job that have landed (are ready). It is safe for concurrent use.
type Landings struct {
	mu     sync.Mutex
	ready  []int         // landed, not yet returned
	wake   chan struct{} // closed and replaced when ready grows while Next waits
	asleep bool          // Next waits on wake
}

// NewLandings returns an empty Landings with space for a number of requests. It grows if more land.
func NewLandings(requests int) *Landings {
	return &Landings{ready: make([]int, 0, requests), wake: make(chan struct{})}
}

// Add records that a request has landed.
func (l *Landings) Add(i int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.ready = append(l.ready, i)
	if l.asleep {
		close(l.wake)
		l.wake, l.asleep = make(chan struct{}), false
	}
}

// Next returns up to limit requests that have landed since the last call, in the order in which they landed. It waits
// up to d for the first. done is closed when the job ends. more is false if the job has ended and all requests have
// been returned.
func (l *Landings) Next(done <-chan struct{}, limit int, d time.Duration) (reqs []int, more bool) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	for {
		hasEnded := false
		select {
		case <-done: // no more requests can land
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
