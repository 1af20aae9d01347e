package pipeline

// This file records when each stage of each piece ran.

import (
	"bufio"
	"cmp"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/atomicfile"
)

// A Trace records when each worker and stream was busy: one span for each stage of
// each piece. A nil *Trace records nothing.
//
// On the host, "decode" is a worker's own time. On an asynchronous device, "copy" and "decode" are times of the device,
// and "submit" is a worker's time in Queue.Submit.
type Trace struct {
	start time.Time
	mu    sync.Mutex
	spans []span
}

// A place is where a span ran: on a worker, on a stream of the device, or in the load itself.
type place uint8

const (
	onWorker place = iota
	onStream
	inVerb
)

type span struct {
	verb       string
	at         place
	n          int // number of the worker or stream
	begin, end time.Time
	bytes      int64
}

// NewTrace returns an empty trace that starts now.
func NewTrace() *Trace { return &Trace{start: time.Now()} }

// Verb records a stage of the whole load, such as planning.
func (t *Trace) Verb(verb string, begin, end time.Time, bytes int64) {
	if t != nil {
		t.addSpans([]span{{verb, inVerb, 0, begin, end, bytes}})
	}
}

func (t *Trace) addDevice(verb string, stream int, begin, end time.Time, bytes int64) {
	t.addSpans([]span{{verb, onStream, stream, begin, end, bytes}})
}

func (t *Trace) addSpans(spans []span) {
	t.mu.Lock()
	t.spans = append(t.spans, spans...)
	t.mu.Unlock()
}

// A Summary summarizes a trace. The seconds of a stage are summed over workers: 16 workers that all read for one
// second count as 16 seconds.
type Summary struct {
	Seconds float64    `json:"seconds"` // from the start of the load to its last span
	Stages  []StageSum `json:"stages"`  // in the order in which bytes pass through them
	Copy    *Gaps      `json:"copy_stream,omitempty"`
}

// A StageSum is the sum of the spans of one stage. The stage "stage" is the wait for a free slot. If a remote
// object is read by ranges, "permit" is the wait for permission to send a request, and "answer" the wait for the first
// byte of its response.
type StageSum struct {
	Verb    string  `json:"verb"`
	Spans   int     `json:"spans"`
	Seconds float64 `json:"seconds"`
	Longest float64 `json:"longest"`
	Bytes   int64   `json:"bytes"`
}

// Gaps describes how the device's copy stream was used between its first and last copy. Lead is the time before the
// first copy, and Tail the time after the last.
type Gaps struct {
	Busy    float64 `json:"busy"`
	Gaps    int     `json:"gaps"`
	Idle    float64 `json:"idle"`
	Longest float64 `json:"longest"`
	Lead    float64 `json:"lead"`
	Tail    float64 `json:"tail"`
}

var order = []string{"open", "plan", "stage", "permit", "answer", "read", "check", "submit", "copy", "decode", "land"}

// Summary returns the total time and bytes of each stage, and the gaps between copies.
func (t *Trace) Summary() Summary {
	t.mu.Lock()
	defer t.mu.Unlock()
	var s Summary
	var copies []*span
	last := t.start
	sums := map[string]*StageSum{}
	for i := range t.spans {
		p := &t.spans[i]
		last = laterOf(last, p.end)
		if p.at == onStream && p.verb == "copy" {
			copies = append(copies, p)
		}
		sum := sums[p.verb]
		if sum == nil {
			sum = &StageSum{Verb: p.verb}
			sums[p.verb] = sum
		}
		took := p.end.Sub(p.begin).Seconds()
		sum.Spans++
		sum.Seconds += took
		sum.Longest = max(sum.Longest, took)
		sum.Bytes += p.bytes
	}
	s.Seconds = last.Sub(t.start).Seconds()
	for _, sum := range slices.SortedFunc(maps.Values(sums), func(a, b *StageSum) int {
		return cmp.Compare(slices.Index(order, a.Verb), slices.Index(order, b.Verb))
	}) {
		s.Stages = append(s.Stages, *sum)
	}
	s.Copy = findGaps(copies, t.start, last)
	return s
}

// findGaps finds the gaps between the copies of a stream. Copies of one stream do not overlap.
func findGaps(copies []*span, first, last time.Time) *Gaps {
	if len(copies) == 0 {
		return nil
	}
	slices.SortFunc(copies, func(a, b *span) int { return a.begin.Compare(b.begin) })
	g := &Gaps{Lead: copies[0].begin.Sub(first).Seconds()}
	end := copies[0].begin
	for _, c := range copies {
		if gap := c.begin.Sub(end).Seconds(); gap > 0 {
			g.Gaps++
			g.Idle += gap
			g.Longest = max(g.Longest, gap)
		}
		if c.end.After(end) {
			g.Busy += c.end.Sub(laterOf(c.begin, end)).Seconds()
			end = c.end
		}
	}
	g.Tail = last.Sub(end).Seconds()
	return g
}

func laterOf(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// traceHead is how a trace begins.
const traceHead = `{"traceEvents":[`

// WriteFile writes the trace to a file in Chrome's trace event format, which Perfetto also opens, and replaces an
// existing trace, but no other file. The host's workers are one process in it, and the device's streams another.
func (t *Trace) WriteFile(path string) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	err := atomicfile.RefuseOtherKind(path, traceHead)
	if err == nil {
		err = atomicfile.With(path, t.writeTrace)
	}
	if at, ok := errors.AsType[*errs.At](err); ok {
		at.Verb = "trace"
	}
	return err
}

func (t *Trace) writeTrace(f *os.File) error {
	w := bufio.NewWriter(f)
	us := func(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1e3 }
	type line struct{ pid, tid int }
	named := map[line]bool{}
	zero := t.start
	for _, s := range t.spans {
		if s.begin.Before(zero) { // the model was opened before the trace began
			zero = s.begin
		}
	}
	comma := traceHead
	event := func(format string, args ...any) {
		fmt.Fprintf(w, comma+"\n"+format, args...)
		comma = ","
	}
	ofDevice := slices.ContainsFunc(t.spans, func(s span) bool { return s.at == onStream })
	for pid, name := range []string{1: "host", 2: "device"} {
		if pid == 1 || pid == 2 && ofDevice {
			event(`{"name":"process_name","ph":"M","pid":%d,"args":{"name":%q}}`, pid, name)
		}
	}
	for _, s := range t.spans {
		at, name := line{1, s.n + 1}, fmt.Sprintf("worker %d", s.n)
		switch {
		case s.at == inVerb:
			at, name = line{1, 0}, "load"
		case s.at == onStream && s.n == 0:
			at, name = line{2, 0}, "copies"
		case s.at == onStream:
			at, name = line{2, s.n}, fmt.Sprintf("kernels %d", s.n)
		}
		if !named[at] {
			named[at] = true
			event(`{"name":"thread_name","ph":"M","pid":%d,"tid":%d,"args":{"name":%q}}`, at.pid, at.tid, name)
		}
		event(`{"name":%q,"ph":"X","pid":%d,"tid":%d,"ts":%.3f,"dur":%.3f,"args":{"bytes":%d}}`,
			s.verb, at.pid, at.tid, us(s.begin.Sub(zero)), us(s.end.Sub(s.begin)), s.bytes)
	}
	fmt.Fprint(w, "\n]}\n")
	return w.Flush()
}
