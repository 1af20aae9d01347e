package pipeline

import (
	"encoding/json"
	"errors"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/overwire/overwire/gosrc/plan"
)

// made returns a trace with known spans, in milliseconds from its start.
func made() *Trace {
	t := NewTrace()
	at := func(ms float64) time.Time { return t.start.Add(time.Duration(ms * 1e6)) }
	t.Verb("open", at(-20), at(-10), 0)
	t.addSpans([]span{{"read", onWorker, 0, at(0), at(2), 50}, {"read", onWorker, 1, at(1), at(4), 70},
		{"stage", onWorker, 1, at(4), at(4.5), 0}})
	for _, c := range [][2]float64{{7, 9}, {3, 5}, {5, 6}, {9, 10}} { // a gap from 6 to 7
		t.addDevice("copy", 0, at(c[0]), at(c[1]), 10)
	}
	t.addDevice("decode", 3, at(5), at(12), 30)
	return t
}

// Chrome and Perfetto can read the file: its rows are named, and its times are in microseconds and not negative.
func TestTraceFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "trace.json")
	tr := made()
	if err := tr.WriteFile(path); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var v struct {
		TraceEvents []struct {
			Name, Ph string
			Pid, Tid int
			Ts, Dur  float64
			Args     struct{ Name string }
		}
	}
	if err := json.Unmarshal(b, &v); err != nil {
		t.Fatalf("%v: %s", err, b)
	}
	lines := map[[2]int]string{}
	spans := 0
	for _, e := range v.TraceEvents {
		switch {
		case e.Name == "thread_name":
			lines[[2]int{e.Pid, e.Tid}] = e.Args.Name
		case e.Ph == "X":
			spans++
			if lines[[2]int{e.Pid, e.Tid}] == "" || e.Ts < 0 {
				t.Errorf("%+v", e)
			}
			if e.Name == "decode" && (math.Abs(e.Ts-25000) > 1 || math.Abs(e.Dur-7000) > 1 ||
				lines[[2]int{e.Pid, e.Tid}] != "kernels 3") {
				t.Errorf("%+v on %q", e, lines[[2]int{e.Pid, e.Tid}])
			}
		}
	}
	if spans != len(tr.spans) {
		t.Errorf("%d spans, want %d", spans, len(tr.spans))
	}
	// A program that has the old file open can still read all of it, because WriteFile creates a new file.
	other := filepath.Join(t.TempDir(), "other")
	if err := errors.Join(os.Link(path, other), os.Chmod(path, 0o600), (&Trace{}).WriteFile(path)); err != nil {
		t.Fatal(err)
	}
	if now, err := os.ReadFile(other); err != nil || string(now) != string(b) {
		t.Errorf("%v: the old trace was overwritten", err)
	}
	if st, err := os.Stat(path); err != nil || st.Mode() != 0o600 {
		t.Error(st.Mode(), err)
	}
	if err := tr.WriteFile(filepath.Join(path, "no")); err == nil {
		t.Error("wrote a trace to a path below a file")
	}
}

// The summary adds up each stage and finds the gaps of the copy stream.
func TestSummary(t *testing.T) {
	s := made().Summary()
	near := func(name string, got, ms float64) {
		t.Helper()
		if math.Abs(got-ms/1e3) > 1e-6 {
			t.Errorf("%s: %v s, want %v ms", name, got, ms)
		}
	}
	near("all", s.Seconds, 12)
	if s.Copy == nil || s.Copy.Gaps != 1 {
		t.Fatalf("%+v", s.Copy)
	}
	near("busy", s.Copy.Busy, 6)
	near("idle", s.Copy.Idle, 1)
	near("longest", s.Copy.Longest, 1)
	near("lead", s.Copy.Lead, 3)
	near("tail", s.Copy.Tail, 2)
	var verbs []string
	for _, g := range s.Stages {
		verbs = append(verbs, g.Verb)
		if g.Verb == "read" {
			near("read", g.Seconds, 5)
			near("longest read", g.Longest, 3)
			if g.Spans != 2 || g.Bytes != 120 {
				t.Errorf("%+v", g)
			}
		}
	}
	if want := []string{"open", "stage", "read", "copy", "decode"}; !slices.Equal(verbs, want) {
		t.Errorf("%v, want %v", verbs, want)
	}
	if s := NewTrace().Summary(); s.Seconds != 0 || s.Copy != nil || len(s.Stages) != 0 {
		t.Errorf("an empty trace: %+v", s)
	}
}

// A run on the host has a span for every piece in each of its stages, and the bytes add up.
func TestTraceOfARun(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	m := build(rand.New(rand.NewPCG(seed, 1)))
	tr := NewTrace()
	var reqs []plan.Request
	for i := range m.ix.Tensors {
		reqs = append(reqs, plan.Request{Tensor: int64(i), Hi0: plan.Whole, Hi1: plan.Whole})
	}
	m.trace = tr
	if _, _, err := m.run(t.Context(), reqs, plan.Limits{Piece: 500}, 2); err != nil {
		t.Fatal(err)
	}
	st := m.stages
	spans, read := map[string]int64{}, int64(0)
	for _, g := range tr.Summary().Stages {
		spans[g.Verb] = int64(g.Spans)
		if g.Verb == "read" {
			read = g.Bytes
		}
	}
	if spans["stage"] != st.Pieces || spans["decode"] != st.Pieces || read > st.ReadBytes || st.Pieces > 0 && read == 0 {
		t.Errorf("%v, %d bytes read; %+v", spans, read, st)
	}
}
