package retry

// This file adapts the number of ranges that are open at once for a host.

import (
	"context"
	"math"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// A limiter is the adaptive concurrency of one host: it decides how many ranges are open at once. While all
// permits are in use, it compares the throughput of each window with the best recent one. A probe step that
// raises the throughput by probeGain is kept and followed by another, twice as large if it raised the throughput
// nearly in proportion. One that does not is undone, and the next follows after backoffWindows windows, then
// after twice as many, and so on. When a store says that it is overloaded, the number is halved.
type limiter struct {
	host string
	refs int

	bytes atomic.Int64 // received in this window
	due   atomic.Int64 // when it ends, in nanoseconds since start

	mu      sync.Mutex
	most    int
	limit   int
	open    int
	waiting []chan struct{} // closed when it has a permit

	saturated    bool    // a range waited for a permit in this window
	bestRate     float64 // bytes per second in the best recent window
	probedFrom   int     // limit to go back to; 0: no probe step is being judged
	waitWindows  int     // until the next probe step
	failedProbes int     // consecutive, 4 at most
	halved       time.Time
}

const (
	// first is the initial number. It was measured with 2, 4, 8, 16 and 32 connections on a 10 Gbit/s link and
	// two cores: 8 were the fewest that filled the link, compressed or plain, and 32 were the first to cost more.
	// More cores can receive on more connections: loading to a GPU over loopback on 16 cores, 16 connections were
	// 6 to 10 % faster than 8, in loads that end within the first window.
	first  = 8
	window = 150 * time.Millisecond
	// A step adds half of the current number. It is kept if the throughput grows by probeGain. The next step is
	// doubled if it grows by fullGain, since the connections do not share a bottleneck yet.
	probeGain      = 1.1
	fullGain       = 1.4
	rateDecay      = 0.998 // each slower window lowers the best rate by this factor, since links change
	backoffWindows = 4
	// All overload responses within this time count as one.
	overloadPause = time.Second
)

var (
	start = time.Now() // of the process

	limitersMu sync.Mutex
	limiters   = map[string]*limiter{}
)

// holdLimiter returns the limiter of a host and counts its use. For host "" each call gets its own.
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

// drop ends one use. After the last one the host is forgotten.
func (l *limiter) drop() {
	limitersMu.Lock()
	defer limitersMu.Unlock()
	if l.refs--; l.refs == 0 && limiters[l.host] == l {
		delete(limiters, l.host)
	}
}

// atOnce is how many ranges may be open.
func (l *limiter) atOnce() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.limit
}

// acquire waits for a permit, first come, first served.
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
	l.open-- // it already had the permit
	l.admitWaiting()
	return context.Cause(ctx)
}

func (l *limiter) beginWindow() {
	l.saturated = len(l.waiting) > 0
	l.due.Store(int64(time.Since(start) + window))
	l.bytes.Store(0)
}

// countBytes counts bytes as they arrive, and ends a window that is over.
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

// adaptLimit judges the last probe step by the throughput of a window and takes the next one. One lucky window
// may delay a step but never causes one, so noise cannot ratchet the limit up.
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

// halveLimit halves the number of open ranges, once for all responses to the same overload.
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
