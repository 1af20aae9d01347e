package retry

// This file reads one range, resumes it when its connection breaks, and adapts the number of open ranges per host.

import (
	"context"
	"fmt"
	"io"
	"math"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/source"
)

// RangeBytes is the range size that stores recommend. At 100 MB/s per connection, such a range takes four times
// the usual latency of 20 ms.
const RangeBytes = 8 << 20

// AtOnce returns how many ranges may be open now; see limiter.go.
func (s *Source) AtOnce() int { return s.limit.atOnce() }

// OpenRange waits for a permit; see source.Ranges.
func (s *Source) OpenRange(ctx context.Context) (source.Range, error) {
	ctx, end := s.withinSource(ctx, -1)
	defer end()
	r := &byteRange{s: s}
	if err := r.acquire(ctx); err != nil {
		return nil, err
	}
	return r, nil
}

// withinSource returns a context that also ends with the source. Its error then contains the offset.
func (s *Source) withinSource(ctx context.Context, off int64) (context.Context, func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	unhook := context.AfterFunc(s.ctx, func() { cancel(s.placeError(off, context.Cause(s.ctx))) })
	return ctx, func() {
		unhook()
		cancel(nil)
	}
}

// A byteRange is read in order by one goroutine. It holds its permit until its end, because the kernel receives more
// bytes while the reader works between two steps. If its body breaks, it resumes without waiting for a permit: its
// reader may hold resources that the permit holders are waiting for. If no response has arrived yet, it queues for a
// permit again.
type byteRange struct {
	s        *Source
	ctx      context.Context // ends with the caller's context or the source
	finish   func()          // releases ctx
	off, end int64
	failed   int // consecutive failures
	permit   bool
	answered bool
	waited   [2]time.Duration

	// The open body, if any.
	body  io.ReadCloser
	about context.Context
	drop  context.CancelCauseFunc
	watch *time.Timer // closes a body that makes no progress
	got   int64
}

// beginRange sets the limits of the range. The first step sends the request.
func (r *byteRange) beginRange(ctx context.Context, off, n int64) error {
	s := r.s
	if off < 0 || n < 0 || off > s.Size() || n > s.Size()-off {
		return s.placeError(off, errs.New(errs.ErrCorrupt,
			"truncated: expected %d bytes from this offset, but the object has %d", n, s.Size()))
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if s.ctx.Err() != nil {
		return s.placeError(off, context.Cause(s.ctx))
	}
	r.off, r.end = off, off+n
	r.ctx, r.finish = s.withinSource(ctx, off)
	return nil
}

// Begin requests n bytes from off.
func (r *byteRange) Begin(ctx context.Context, off, n int64) error {
	if err := r.beginRange(ctx, off, n); err != nil {
		return err
	}
	return r.Next(nil)
}

// Close discards the bytes that were not read.
func (r *byteRange) Close() error {
	r.shut()
	r.givePermitBack()
	if r.finish != nil {
		r.finish()
	}
	return nil
}

// acquire waits for a permit.
func (r *byteRange) acquire(ctx context.Context) error {
	start := time.Now()
	if err := r.s.limit.acquire(ctx); err != nil {
		return err
	}
	r.permit = true
	r.waited[0] += time.Since(start)
	return nil
}

func (r *byteRange) givePermitBack() {
	if r.permit {
		r.permit = false
		r.s.limit.releasePermit()
	}
}

// Waited returns the waiting times; see source.Range.
func (r *byteRange) Waited() (permit, answer time.Duration) {
	permit, answer = r.waited[0], r.waited[1]
	r.waited = [2]time.Duration{}
	return permit, answer
}

// Next fills p with the next bytes.
func (r *byteRange) Next(p []byte) error {
	s := r.s
	if r.ctx.Err() != nil {
		return context.Cause(r.ctx)
	}
	if int64(len(p)) > r.end-r.off {
		return s.placeError(r.off, errs.New(errs.ErrEngine, "%d bytes requested, but the range has %d left", len(p),
			r.end-r.off))
	}
	for r.off < r.end {
		n, err := r.readBody(p)
		p, r.off = p[n:], r.off+int64(n)
		if err == nil {
			if r.off == r.end { // the connection and the permit can be reused
				r.shut()
				r.givePermitBack()
			}
			return nil
		}
		count := r.got
		r.shut()
		if r.ctx.Err() != nil {
			return context.Cause(r.ctx)
		}
		if n > 0 && len(p) == 0 {
			return nil // all bytes have arrived, so the error does not matter
		}
		verdict, after := s.judgeError(err)
		switch {
		case verdict == Changed:
			return s.placeError(r.off, errs.New(errs.ErrCorrupt, "changed while it was read: %v", err))
		case verdict == Never:
			return s.placeError(r.off, classifyError(err))
		case count >= Progress:
			r.failed = 0
		}
		if r.failed++; r.failed > s.opt.Retries {
			return s.placeError(r.off, fmt.Errorf("%w (after %d attempts)", classifyError(err), r.failed))
		}
		if after > 0 {
			s.limit.halveLimit()
		}
		if err := pauseBefore(r.ctx, s.opt.base, r.failed, after); err != nil {
			return err
		}
	}
	return nil
}

// readBody reads from the body until p is full or the body breaks. It first opens a body if necessary.
func (r *byteRange) readBody(p []byte) (int, error) {
	s := r.s
	if r.body == nil {
		if !r.permit && !source.IsUrgent(r.ctx) {
			if err := r.acquire(r.ctx); err != nil {
				return 0, err
			}
		}
		start := time.Now()
		r.got = 0
		r.about, r.drop = context.WithCancelCause(r.ctx)
		drop := r.drop
		r.watch = time.AfterFunc(s.opt.Timeout, func() { drop(errStalled) })
		body, err := s.f.Fetch(r.about, r.off, r.end-r.off)
		r.waited[1] += time.Since(start)
		if err != nil {
			err = nameWatchdog(r.about, err)
			r.endWatch()
			if !r.answered {
				r.givePermitBack()
			}
			return 0, err
		}
		r.body, r.answered = body, true
	}
	r.watch.Reset(s.opt.Timeout)
	count, mark := 0, 0
	for count < len(p) {
		n, err := r.body.Read(p[count:])
		count += n
		r.got += int64(n)
		s.limit.countBytes(int64(n))
		if err == io.EOF {
			if r.off+int64(count) < r.end {
				return count, fmt.Errorf("%w: %d bytes are missing", errShort, r.end-r.off-int64(count))
			}
			return count, nil
		}
		if err != nil {
			return count, nameWatchdog(r.about, &broken{err})
		}
		if count-mark >= Progress {
			mark = count
			r.watch.Reset(s.opt.Timeout)
		}
	}
	if r.off+int64(count) < r.end {
		r.watch.Stop()
		return count, nil
	}
	// Read the end of the body, so that the connection can be reused.
	var more [1]byte
	if n, _ := r.body.Read(more[:]); n > 0 {
		r.got = 0 // count no progress, so that retries end if a server always sends too many bytes
		return 0, errLong
	}
	return count, nil
}

// shut closes the body if one is open.
func (r *byteRange) shut() {
	if r.body != nil {
		_ = r.body.Close()
		r.body = nil
		r.endWatch()
	}
}

func (r *byteRange) endWatch() {
	r.watch.Stop()
	r.drop(nil)
}

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
