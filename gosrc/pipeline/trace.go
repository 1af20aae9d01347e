package pipeline

import (
	"bufio"
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/overwire/overwire/gosrc/fault"
)

// A Trace records what every worker did when: one span for each stage of each
// piece. A nil *Trace records nothing.
type Trace struct {
	start time.Time
	mu    sync.Mutex
	spans []span
}

type span struct {
	verb       string
	worker     int
	begin, end time.Time
	bytes      int64
}

// NewTrace starts a trace now.
func NewTrace() *Trace { return &Trace{start: time.Now()} }

func (t *Trace) add(spans []span) {
	t.mu.Lock()
	t.spans = append(t.spans, spans...)
	t.mu.Unlock()
}

// WriteFile writes the trace in Chrome's trace event format, which Perfetto
// opens, replacing the file.
func (t *Trace) WriteFile(path string) error {
	f, err := os.Create(path)
	if err != nil {
		return &fault.At{Verb: "trace", Source: path, Chunk: -1, Offset: -1, Err: fault.FromOS(err)}
	}
	w := bufio.NewWriter(f)
	fmt.Fprint(w, `{"traceEvents":[`)
	us := func(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1e3 }
	for i, s := range t.spans {
		if i > 0 {
			fmt.Fprint(w, ",")
		}
		fmt.Fprintf(w, "\n"+`{"name":%q,"ph":"X","pid":1,"tid":%d,"ts":%.3f,"dur":%.3f,"args":{"bytes":%d}}`,
			s.verb, s.worker, us(s.begin.Sub(t.start)), us(s.end.Sub(s.begin)), s.bytes)
	}
	fmt.Fprint(w, "\n]}\n")
	err = w.Flush()
	if e := f.Close(); err == nil {
		err = e
	}
	if err != nil {
		return &fault.At{Verb: "trace", Source: path, Chunk: -1, Offset: -1, Err: fault.FromOS(err)}
	}
	return nil
}
