// Package retry provides sources that read ranges of a remote object. After a failure, a read resumes at the
// offset that it reached. It never restarts and never returns wrong bytes.
//
// A range that breaks is requested again from its first missing byte, after a random pause (full jitter). While
// no bytes arrive, the maximum pause doubles each time. A body that delivers less than Progress bytes within
// Options.Timeout is closed and requested again. The number of open ranges per host adapts to the measured
// throughput; see limiter.go. The Fetcher decides which errors may be retried.
package retry

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/source"
)

// A Verdict classifies a failure.
type Verdict int

// The verdicts.
const (
	Never   Verdict = iota // a retry cannot help
	Again                  // no response or an incomplete one: the network failed, or the store is down
	Busy                   // the store responded that it is busy
	Changed                // the object was replaced
)

// OpenTries is the maximum number of attempts for a store that has not responded yet, even if Retries is larger. A
// wrong name or a server that is down is then reported soon. A store that reports that it is busy has responded.
const OpenTries = 3

// A Fetcher opens ranges of one object. It is safe for concurrent use.
type Fetcher interface {
	// URI returns the object's name as the user wrote it.
	URI() string
	// Size returns the object's size, fixed when it was opened.
	Size() int64
	// Fetch opens n bytes (1 or more, within Size) from off. The body ends with io.EOF after exactly these
	// bytes. A shorter or longer body, or a response for another range or object, is a failure. The caller
	// closes the body; cancelling ctx aborts it.
	Fetch(ctx context.Context, off, n int64) (io.ReadCloser, error)
	// Judge classifies an error of Fetch or of reading a body, and returns how long the store asked to wait (0 if it
	// did not ask). It is not called for the caller's own cancellation, or for a body that ends early or stalls.
	Judge(err error) (Verdict, time.Duration)
	// Close releases the fetcher's resources.
	Close() error
}

// Options configure New. Parse returns the options that the caller can set.
type Options struct {
	// Host is the key of the shared limiter: sources of one host share their measurements.
	Host string
	// Connections is the maximum number of open ranges; 0 means 64.
	Connections int
	// Retries is how often a range may fail in succession while it receives less than Progress bytes.
	Retries int
	// Timeout is the time within which a range must receive Progress bytes.
	Timeout time.Duration
	// Range is the source's RangeBytes. Set it if reading a body in steps costs nothing.
	Range int64
	// Pin identifies the object's state; see source.Pinned.
	Pin string
	// Head is the beginning of the object, received when it was opened. Reads within it send no request.
	Head []byte

	base time.Duration // unit of the pauses; 0 means the constant base
}

// Progress is the number of bytes that distinguishes a slow connection from a stalled one.
const Progress = 64 << 10

// Names are the names of the options that Parse reads.
var Names = []string{"timeout", "connections", "retries"}

// Parse reads the options that all stores share.
func Parse(o source.Options) (Options, error) {
	timeout, err := o.Number("timeout", 30, 0.01, 86400)
	if err != nil {
		return Options{}, err
	}
	connections, err := o.Number("connections", 0, 1, 1024)
	if err != nil {
		return Options{}, err
	}
	retries, err := o.Number("retries", 8, 0, 1000)
	if err != nil {
		return Options{}, err
	}
	return Options{Timeout: time.Duration(timeout * float64(time.Second)), Connections: int(connections),
		Retries: int(retries)}, nil
}

// A Source reads the object of a Fetcher. It implements source.Source.
type Source struct {
	f     Fetcher
	opt   Options
	limit *limiter

	ctx    context.Context // ends with Close
	cancel context.CancelCauseFunc
	once   sync.Once
	shut   error
}

// New returns a source that reads from a fetcher. Closing the source closes the fetcher.
func New(f Fetcher, opt Options) *Source {
	opt.Connections = cmp.Or(opt.Connections, 64)
	s := &Source{f: f, opt: opt, limit: holdLimiter(opt.Host, opt.Connections)}
	s.ctx, s.cancel = context.WithCancelCause(context.Background())
	return s
}

// URI returns the URI of the fetcher.
func (s *Source) URI() string { return s.f.URI() }

// Size returns the size of the fetcher's object.
func (s *Source) Size() int64 { return s.f.Size() }

// Facts implements source.Source: every read costs a round trip, and the pin identifies the object.
func (s *Source) Facts() source.Facts {
	f := source.Facts{Remote: true, Concurrency: s.opt.Connections}
	if s.opt.Range > 0 {
		f.RangeBytes, f.Ranges = s.opt.Range, s
	}
	f.Identity, f.Settled = source.Pinned(s, s.opt.Pin)
	return f
}

// Close aborts reads in flight and closes the fetcher.
func (s *Source) Close() error {
	s.once.Do(func() {
		s.cancel(errs.New(errs.ErrArgument, "the source is closed"))
		s.shut = s.f.Close()
		s.limit.drop()
	})
	return s.shut
}

// ReadAt fills p from off; see source.Source. It reads from the connection directly into p.
func (s *Source) ReadAt(ctx context.Context, p []byte, off int64) error {
	if head := int64(len(s.opt.Head)); off >= 0 && off <= head && int64(len(p)) <= head-off && ctx.Err() == nil &&
		s.ctx.Err() == nil {
		copy(p, s.opt.Head[off:])
		return nil
	}
	r := byteRange{s: s}
	if err := r.beginRange(ctx, off, int64(len(p))); err != nil {
		return err
	}
	defer r.Close()
	return r.Next(p)
}

var (
	errStalled = errors.New("no progress")
	errShort   = errors.New("the body ended early")
	errLong    = errors.New("the body has more bytes than requested")
)

// broken is an error of reading a body. It can always be retried.
type broken struct{ err error }

func (b *broken) Error() string { return b.err.Error() }
func (b *broken) Unwrap() error { return b.err }

// nameWatchdog returns errStalled if the watchdog ended the request, or else err.
func nameWatchdog(ctx context.Context, err error) error {
	if context.Cause(ctx) == errStalled {
		return errStalled
	}
	return err
}

func (s *Source) judgeError(err error) (Verdict, time.Duration) {
	var b *broken
	switch {
	case errors.Is(err, errStalled), errors.Is(err, errShort), errors.Is(err, errLong):
		return Again, 0
	case errors.As(err, &b):
		if v, after := s.f.Judge(b.err); v != Never {
			return v, after
		}
		return Again, 0
	}
	return s.f.Judge(err)
}

// classifyError adds a class to an error that has none.
func classifyError(err error) error {
	switch {
	case errs.Classed(err):
		return err
	case errors.Is(err, errStalled), errors.Is(err, context.DeadlineExceeded):
		return errs.New(errs.ErrTimeout, "%v", err)
	}
	return errs.New(errs.ErrIO, "%v", err)
}

func (s *Source) placeError(off int64, err error) error {
	return &errs.At{Verb: "read", Source: s.URI(), Chunk: -1, Offset: off, Err: err}
}

// The pause before attempt n is random, up to base x 2^n but at most `most`.
const (
	base = 50 * time.Millisecond
	most = 10 * time.Second
)

// Pause waits before an attempt, with full jitter. failed is the number of consecutive failures. after is how
// long the store asked to wait; at most a minute of it is respected.
func Pause(ctx context.Context, failed int, after time.Duration) error {
	return pauseBefore(ctx, 0, failed, after)
}

func pauseBefore(ctx context.Context, unit time.Duration, failed int, after time.Duration) error {
	span := min(most, cmp.Or(unit, base)<<min(failed, 10))
	d := max(min(after, time.Minute), rand.N(span))
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// Repeat runs a request until it succeeds or another attempt cannot help, with the same pauses as a range. It makes up
// to Options.Retries + 1 attempts. Until heard returns true (the store has responded), at most OpenTries attempts may
// end without a response. Repeat returns the number of failed attempts and the last error.
func Repeat(ctx context.Context, opt Options, judge func(error) (Verdict, time.Duration), heard func() bool,
	fn func() error) (failed int, err error) {
	for silent := 0; ; {
		if err = fn(); err == nil || ctx.Err() != nil {
			return failed, err
		}
		verdict, after := judge(err)
		failed++
		if verdict == Again && !heard() {
			silent++
		}
		if verdict == Never || verdict == Changed || failed > opt.Retries || silent >= OpenTries {
			return failed, err
		}
		if err := pauseBefore(ctx, opt.base, failed, after); err != nil {
			return failed, err
		}
	}
}

// Do is like Repeat for opening an object: the store counts as one that has never responded. Each attempt may
// take Options.Timeout. An attempt that times out counts as one without a response.
func Do(ctx context.Context, opt Options, judge func(error) (Verdict, time.Duration),
	fn func(ctx context.Context) error) error {
	failures, err := Repeat(ctx, opt, func(err error) (Verdict, time.Duration) {
		if errors.Is(err, errStalled) {
			return Again, 0
		}
		return judge(err)
	}, func() bool { return false }, func() error {
		ctx, cancel := context.WithCancelCause(ctx)
		defer cancel(nil)
		defer time.AfterFunc(opt.Timeout, func() { cancel(errStalled) }).Stop()
		return nameWatchdog(ctx, fn(ctx))
	})
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case failures > 1:
		return fmt.Errorf("%w (after %d attempts)", classifyError(err), failures)
	}
	return classifyError(err)
}
