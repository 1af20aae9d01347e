package retry

// This file adapts the number of open ranges per host.

import (
	"context"
	"math"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// A limiter implements adaptive concurrency for one host: it decides how many ranges may be open. While all permits are
// in use, it compares the throughput of each window with the best recent one. A probe step that raises the throughput
// by the factor probeGain is retained, and another step follows, twice as large if the throughput rose nearly in
// proportion. Any other step is undone, and the next one follows after backoffWindows windows, then after twice as
// many, and so on. When a store reports that it is overloaded, the number is halved.
type limiter struct {
	host string
	refs int

	bytes atomic.Int64 // received in this window
	due   atomic.Int64 // end of the window, in nanoseconds since start

	mu      sync.Mutex
	most    int
	limit   int
	open    int
	waiting []chan struct{} // closed when the permit is granted

	saturated    bool    // a range waited for a permit in this window
	bestRate     float64 // bytes per second in the best recent window
	probedFrom   int     // the limit to restore; 0 means that no probe step is in progress
	waitWindows  int     // windows until the next probe step
	failedProbes int     // consecutive, at most 4
	halved       time.Time
}

const (
	// first is the initial number. With 2, 4, 8, 16 and 32 connections on a 10 Gbit/s link and two cores, 8 was
	// the smallest number that filled the link, with and without compression, and 32 the smallest that cost
	// more. More cores can use more connections: for loads to a GPU over loopback on 16 cores, which end within
	// the first window, 16 connections were 6 to 10 % faster than 8.
	first  = 8
	window = 150 * time.Millisecond
	// A step adds half of the current number. It is retained if the throughput grows by the factor probeGain. If it
	// grows by fullGain, the connections do not share a bottleneck yet, and the next step is twice as large.
	probeGain      = 1.1
	fullGain       = 1.4
	rateDecay      = 0.998 // each slower window lowers the best rate by this factor, because links change
	backoffWindows = 4
	// Overload responses within this time count as one.
	overloadPause = time.Second
)

var (
	start = time.Now() // start time of the process

	limitersMu sync.Mutex
	limiters   = map[string]*limiter{}
)

// holdLimiter returns the limiter of a host and adds a reference. For host "" each call returns a new one.
func holdLimiter(host string, most int) *limiter {
	limitersMu.Lock()
	defer limitersMu.Unlock()
	l := limiters[host]
	if l == nil || host == "" {
		l = &limiter{host: host, most: most, limit: min(max(first, runtime.GOMAXPROCS(0)), most)}
		if host != "" {
			limiters[host] = l
		}
	}
	l.mu.Lock()
	l.most = max(l.most, most)
	l.mu.Unlock()
	l.refs++
	return l
}

// drop removes a reference. After the last one, the limiter is deleted.
func (l *limiter) drop() {
	limitersMu.Lock()
	defer limitersMu.Unlock()
	if l.refs--; l.refs == 0 && limiters[l.host] == l {
		delete(limiters, l.host)
	}
}

// atOnce returns how many ranges may be open.
func (l *limiter) atOnce() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.limit
}

// acquire waits for a permit. Permits are granted in the order of the calls.
func (l *limiter) acquire(ctx context.Context) error {
	l.mu.Lock()
	if l.open == 0 { // idle time must not count
		l.beginWindow()
	}
	if l.open < l.limit && len(l.waiting) == 0 {
		l.open++
		l.mu.Unlock()
		return nil
	}
	permit := make(chan struct{})
	l.waiting = append(l.waiting, permit)
	l.saturated = true
	l.mu.Unlock()
	select {
	case <-permit:
		return nil
	case <-ctx.Done():
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if i := slices.Index(l.waiting, permit); i >= 0 {
		l.waiting = slices.Delete(l.waiting, i, i+1)
		return context.Cause(ctx)
	}
	l.open-- // the permit was already granted
	l.admitWaiting()
	return context.Cause(ctx)
}

func (l *limiter) beginWindow() {
	l.saturated = len(l.waiting) > 0
	l.due.Store(int64(time.Since(start) + window))
	l.bytes.Store(0)
}

// countBytes counts bytes as they arrive, and ends the window when its time is over.
func (l *limiter) countBytes(n int64) {
	l.bytes.Add(n)
	due, now := l.due.Load(), int64(time.Since(start))
	if now < due || !l.due.CompareAndSwap(due, math.MaxInt64) {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.saturated {
		l.adaptLimit(float64(l.bytes.Load()) / (time.Duration(now-due) + window).Seconds())
	}
	l.beginWindow()
	l.admitWaiting()
}

func (l *limiter) releasePermit() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.open--
	l.admitWaiting()
}

// adaptLimit evaluates the last probe step by the throughput of a window and begins the next one. A single fast
// window may delay a step but never causes one, so noise does not raise the limit.
func (l *limiter) adaptLimit(rate float64) {
	switch {
	case l.probedFrom != 0 && rate < l.bestRate*probeGain:
		l.limit, l.probedFrom = l.probedFrom, 0
		l.waitWindows, l.failedProbes = backoffWindows<<l.failedProbes, min(l.failedProbes+1, 4)
	case l.waitWindows > 0:
		l.waitWindows--
		l.bestRate = max(rate, l.bestRate*rateDecay)
	default:
		more := max(1, l.limit/2)
		if l.probedFrom != 0 {
			l.failedProbes = 0
			if rate >= l.bestRate*fullGain {
				more = l.limit
			}
		}
		l.bestRate = max(rate, l.bestRate*rateDecay)
		if l.limit < l.most {
			l.probedFrom = l.limit
			l.limit = min(l.most, l.limit+more)
		} else {
			l.probedFrom = 0
		}
	}
}

// halveLimit halves the number of open ranges, once for all responses to one overload.
func (l *limiter) halveLimit() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if time.Since(l.halved) < overloadPause {
		return
	}
	l.halved = time.Now()
	l.limit, l.probedFrom, l.waitWindows, l.bestRate = max(1, l.limit/2), 0, backoffWindows, 0
}

func (l *limiter) admitWaiting() {
	for l.open < l.limit && len(l.waiting) > 0 {
		close(l.waiting[0])
		l.waiting = l.waiting[1:]
		l.open++
	}
	if len(l.waiting) > 0 {
		l.saturated = true
	}
}
