// Package retry makes a source of something that opens ranges of a remote
// object: every failure costs a resume at the byte reached, never a restart and
// never a wrong byte.
//
// A range that breaks is asked for again from its first missing byte, after a
// pause with full jitter that doubles while nothing arrives. A body that brings
// less than Options.Floor bytes within Options.Timeout is given up and asked
// for again. How many ranges of one host are open at once is found by
// measuring; see limiter.go. What may be tried again is the Fetcher's to judge.
package retry

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/overwire/overwire/gosrc/fault"
	"github.com/overwire/overwire/gosrc/source"
)

// A Verdict says what a failure means.
type Verdict int

// The verdicts.
const (
	Never   Verdict = iota // asking again cannot help
	Again                  // there was no answer, or not all of it: the network, or a store that is down
	Busy                   // the store answered that it cannot for the moment
	Changed                // the object is another one by now
)

// OpenTries is how often a store is asked that has not answered once, however many
// retries it may have: a wrong name, or a server that is down, should be reported
// soon. A store that says that it is busy has answered.
const OpenTries = 3

// A Fetcher opens ranges of one object. It is safe for concurrent use.
type Fetcher interface {
	// URI names the object as the user wrote it.
	URI() string
	// Size is the object's size, fixed when it was opened.
	Size() int64
	// Fetch opens n bytes (1 or more, within Size) from off. The body ends with
	// io.EOF after exactly these; one that is shorter or longer is a failure,
	// and so is an answer that is not about this very range of this very
	// object. The body is closed by the caller, and ctx ends it.
	Fetch(ctx context.Context, off, n int64) (io.ReadCloser, error)
	// Judge says what an error of Fetch or of reading a body means, and how
	// long the store asks to wait, 0 if it does not. It is not asked about the
	// caller's own cancellation, nor about a body that is cut or stalls.
	Judge(err error) (Verdict, time.Duration)
	// Close releases what the fetcher holds.
	Close() error
}

// Options of New. Zero fields are the defaults.
type Options struct {
	// Host names what shares one limit: sources of one host measure together.
	Host string
	// Connections is the most ranges open at once, 64 if 0.
	Connections int
	// Retries is how many consecutive failures a range may have that bring less
	// than Floor bytes; 8 if 0, none if negative.
	Retries int
	// Timeout is how long a range may bring less than Floor bytes: 30 s if 0.
	Timeout time.Duration
	// Floor is what counts as progress: 64 KiB if 0.
	Floor int64
	// Range is the RangeBytes of the source: set where a body may be read in
	// steps at no cost.
	Range int64

	base time.Duration // of the pauses; tests make it short
}

// Names are the options of Parse.
var Names = []string{"timeout", "connections", "retries"}

// Parse reads the options that every store has.
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
	out := Options{Timeout: time.Duration(timeout * float64(time.Second)), Connections: int(connections), Retries: int(retries)}
	if out.Retries == 0 {
		out.Retries = -1
	}
	return out, nil
}

func (o *Options) defaults() {
	if o.Connections == 0 {
		o.Connections = 64
	}
	if o.Retries == 0 {
		o.Retries = 8
	}
	o.Retries = max(0, o.Retries)
	if o.Timeout == 0 {
		o.Timeout = 30 * time.Second
	}
	if o.Floor == 0 {
		o.Floor = 64 << 10
	}
	if o.base == 0 {
		o.base = base
	}
}

// A Source reads a Fetcher's object. It implements source.Source.
type Source struct {
	f     Fetcher
	opt   Options
	limit *limiter

	ctx    context.Context // ends with Close
	cancel context.CancelCauseFunc
	once   sync.Once
	shut   error

	counts [4]atomic.Int64
}

// Counts is what a source has done so far.
type Counts struct {
	Requests int64 // ranges asked for
	Resumed  int64 // of them, those that went on where another broke
	Bytes    int64 // wanted and arrived
	Extra    int64 // arrived and thrown away
}

// New makes a source of a fetcher, which it closes.
func New(f Fetcher, opt Options) *Source {
	opt.defaults()
	s := &Source{f: f, opt: opt, limit: hold(opt.Host, opt.Connections)}
	s.ctx, s.cancel = context.WithCancelCause(context.Background())
	return s
}

// URI is the fetcher's.
func (s *Source) URI() string { return s.f.URI() }

// Size is the fetcher's.
func (s *Source) Size() int64 { return s.f.Size() }

// Facts are those of an object whose every read costs a round trip.
func (s *Source) Facts() source.Facts {
	f := source.Facts{Remote: true, Concurrency: s.opt.Connections}
	if s.opt.Range > 0 {
		f.RangeBytes, f.Ranges = s.opt.Range, s
	}
	return f
}

// Counts says what was done so far.
func (s *Source) Counts() Counts {
	return Counts{s.counts[0].Load(), s.counts[1].Load(), s.counts[2].Load(), s.counts[3].Load()}
}

// Wasted counts bytes that a fetcher had to throw away.
func (s *Source) Wasted(n int64) { s.counts[3].Add(n) }

// Close ends reads in flight and releases the fetcher.
func (s *Source) Close() error {
	s.once.Do(func() {
		s.cancel(fault.New(fault.ErrArgument, "the source is closed"))
		s.shut = s.f.Close()
		s.limit.drop()
	})
	return s.shut
}

// ReadAt fills p from off; see source.Source. Bytes go from the connection
// straight into p.
func (s *Source) ReadAt(ctx context.Context, p []byte, off int64) error {
	r := byteRange{s: s}
	if err := r.begin(ctx, off, int64(len(p))); err != nil {
		return err
	}
	defer r.Close()
	return r.Next(p)
}

var (
	errStalled = errors.New("no progress")
	errShort   = errors.New("the body ended early")
	errLong    = errors.New("the body has more bytes than were asked for")
)

// broken is an error of reading a body: always worth another try.
type broken struct{ err error }

func (b *broken) Error() string { return b.err.Error() }
func (b *broken) Unwrap() error { return b.err }

// stalled names the watchdog when it was what ended a request.
func stalled(ctx context.Context, err error) error {
	if context.Cause(ctx) == errStalled {
		return errStalled
	}
	return err
}

func (s *Source) judge(err error) (Verdict, time.Duration) {
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

// classed gives an error that has none the class that fits.
func classed(err error) error {
	switch {
	case fault.Classed(err):
		return err
	case errors.Is(err, errStalled), errors.Is(err, context.DeadlineExceeded):
		return fault.New(fault.ErrTimeout, "%v", err)
	}
	return fault.New(fault.ErrIO, "%v", err)
}

func (s *Source) at(off int64, err error) error {
	return &fault.At{Verb: "read", Source: s.URI(), Chunk: -1, Offset: off, Err: err}
}

// The pause before try n is anything up to base x 2^n, at most most.
const (
	base = 50 * time.Millisecond
	most = 10 * time.Second
)

// Pause waits before a try that follows failed consecutive failures, with full jitter;
// after is how long the store asked for, which is obeyed up to a minute.
func Pause(ctx context.Context, failed int, after time.Duration) error {
	return pause(ctx, base, failed, after)
}

func pause(ctx context.Context, base time.Duration, failed int, after time.Duration) error {
	span := min(most, base<<min(failed, 10))
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

// Do runs a single request, as opening an object is, until it succeeds, with the
// pauses of a range: each try has Options.Timeout, there is one more than
// Options.Retries, and at most OpenTries without an answer. A try that is out of
// time is one without an answer.
func Do(ctx context.Context, opt Options, judge func(error) (Verdict, time.Duration), fn func(ctx context.Context) error) error {
	opt.defaults()
	for failed, silent := 0, 0; ; {
		err := func() error {
			ctx, cancel := context.WithCancelCause(ctx)
			defer cancel(nil)
			defer time.AfterFunc(opt.Timeout, func() { cancel(errStalled) }).Stop()
			return stalled(ctx, fn(ctx))
		}()
		if err == nil {
			return nil
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		verdict, after := Again, time.Duration(0)
		if !errors.Is(err, errStalled) {
			verdict, after = judge(err)
		}
		failed++
		if verdict == Again {
			silent++
		}
		if verdict == Never || verdict == Changed || failed > opt.Retries || silent >= OpenTries {
			if failed > 1 {
				return fmt.Errorf("%w (after %d attempts)", classed(err), failed)
			}
			return classed(err)
		}
		if err := pause(ctx, opt.base, failed, after); err != nil {
			return err
		}
	}
}
