// Package page renders reports of the command line as self-contained HTML pages. Texts from a model are never
// interpreted as markup or script.
package page

import (
	"bytes"
	"cmp"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/verify"
)

// Every page consists of the frame with the common style, and a body with the common script and the data.
var (
	//go:embed frame.html
	frame string
	//go:embed page.css
	style string
	//go:embed page.js
	script string

	//go:embed model.html
	modelBody string
)

// assemblePage renders a page. @data@ in the body marks where the data is inserted.
func assemblePage(body string, data any) ([]byte, error) {
	// Marshal escapes <, > and & as \u003c ..., so no name can end the element.
	text, err := json.Marshal(data)
	if err != nil {
		return nil, errs.New(errs.ErrEngine, "page: %v", err)
	}
	// Insert the data last, so that markers in it are not replaced.
	before, after, _ := strings.Cut(staticPage(body), "@data@")
	return bytes.Join([][]byte{[]byte(before), text, []byte(after)}, nil), nil
}

// staticPage returns a page without its data.
func staticPage(body string) string {
	return strings.NewReplacer("@style@", style, "@body@", strings.Replace(body, "@script@", script, 1)).Replace(frame)
}

// columns has the tensors of a model in the page's form: one list per property. Repeated texts are replaced by
// their index.
type columns struct {
	Files   []string `json:"files"`
	Names   []string `json:"names"`
	File    []int    `json:"file"`
	DTypes  []string `json:"dtypes"`
	DType   []int    `json:"dtype"`
	Shapes  []string `json:"shapes"` // "3,4"
	Bytes   []int64  `json:"bytes"`
	Stored  []int64  `json:"stored"`
	Codings []string `json:"codings"`
	Coding  []int    `json:"coding"`
}

// Model returns a page with the tensors of an inspection: a treemap of their names, and a table.
func Model(in *verify.Inspection) ([]byte, error) {
	c := columns{Files: []string{}, Names: []string{}, File: []int{}, DTypes: []string{}, DType: []int{},
		Shapes: []string{}, Bytes: []int64{}, Stored: []int64{}, Codings: []string{}, Coding: []int{}}
	dtypes, codings := map[string]int{}, map[string]int{}
	for i, f := range in.Sources {
		c.Files = append(c.Files, f.URI)
		for _, t := range f.Tensors {
			c.Names, c.File = append(c.Names, t.Name), append(c.File, i)
			c.DType = append(c.DType, numberOf(&c.DTypes, dtypes, t.DType))
			c.Shapes = append(c.Shapes, shapeText(t.Shape))
			c.Bytes, c.Stored = append(c.Bytes, t.Bytes), append(c.Stored, t.Stored)
			c.Coding = append(c.Coding, numberOf(&c.Codings, codings, t.Coding))
		}
	}
	return assemblePage(modelBody, c)
}

// numberOf returns the index of a text in a list, and appends the text at its first use.
func numberOf(list *[]string, known map[string]int, text string) int {
	at, ok := known[text]
	if !ok {
		at = len(*list)
		known[text], *list = at, append(*list, text)
	}
	return at
}

// shapeText formats a shape as "3,4".
func shapeText(shape []int64) string {
	return strings.ReplaceAll(strings.Trim(fmt.Sprint(shape), "[]"), " ", ",")
}

//go:embed trace.html
var traceBody string

// Limits of a trace. A load of a terabyte has a few hundred thousand spans.
const (
	maxSpans  = 1 << 20
	maxRows   = 4096
	maxStages = 256
	maxTime   = 1e13 // microseconds: four months
)

// event is an event in Chrome's trace event format, as overwire writes it. X is a span; M names a row.
type event struct {
	Name string  `json:"name"`
	Kind string  `json:"ph"`
	PID  int     `json:"pid"`
	TID  int     `json:"tid"`
	At   float64 `json:"ts"` // in microseconds, like Took
	Took float64 `json:"dur"`
	Args struct {
		Name  string `json:"name"`
		Bytes int64  `json:"bytes"`
	} `json:"args"`
}

// line identifies a row of the trace.
type line struct{ pid, tid int }

// row has the spans of one worker or queue, sorted by start. Times are in nanoseconds. Each start is relative
// to the previous one.
type row struct {
	Name   string  `json:"name"`
	Device bool    `json:"device"`
	Stage  []int   `json:"stage"`
	Begin  []int64 `json:"begin"`
	Took   []int64 `json:"took"`
	Bytes  []int64 `json:"bytes"`
}

// A Timeline is a trace in the page's form.
type Timeline struct {
	Title  string   `json:"title"`
	Stages []string `json:"stages"` // in the order of their first use
	Rows   []*row   `json:"rows"`   // the load, its workers, then the device's queues
	Spans  int      `json:"spans"`
	End    int64    `json:"end"` // end of the last span, in nanoseconds
}

// ReadTrace reads a trace that overwire wrote. Other input gives errs.ErrFormat; a trace beyond the limits gives
// errs.ErrNotSupported.
func ReadTrace(title string, text []byte) (*Timeline, error) {
	t := &Timeline{Title: title, Stages: []string{}, Rows: []*row{}}
	names, rows := map[line]string{}, map[line][]*event{}
	count := 0
	err := eachEvent(text, func(e *event) error {
		at := line{e.PID, e.TID}
		switch {
		case e.Kind == "M" && e.Name == "thread_name":
			names[at] = e.Args.Name
		case e.Kind != "X":
		case !(e.At >= 0 && e.Took >= 0 && e.At+e.Took <= maxTime) || e.Args.Bytes < 0:
			return errs.New(errs.ErrFormat, "this is not an overwire trace: invalid span %q at %g us, %g us "+
				"long", e.Name, e.At,
				e.Took)
		default:
			rows[at] = append(rows[at], e)
			t.Spans++
		}
		if count++; count > maxSpans+maxRows || len(rows) > maxRows {
			return errs.New(errs.ErrNotSupported, "the trace is too large for a page: more than %d spans or %d "+
				"rows", maxSpans,
				maxRows)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	if t.Spans == 0 {
		return nil, errs.New(errs.ErrFormat, "this is not an overwire trace: it has no spans")
	}
	lines := slices.SortedFunc(maps.Keys(rows), func(a, b line) int {
		return cmp.Or(cmp.Compare(a.pid, b.pid), cmp.Compare(a.tid, b.tid))
	})
	stages := map[string]int{}
	for _, at := range lines {
		r := &row{Name: names[at], Device: at.pid == 2}
		r.takeSpans(t, rows[at], stages)
		t.Rows = append(t.Rows, r)
	}
	if len(t.Stages) > maxStages {
		return nil, errs.New(errs.ErrNotSupported, "the trace is too large for a page: %d stages, expected at most "+
			"%d", len(t.Stages),
			maxStages)
	}
	return t, nil
}

// eachEvent calls take with each event of a trace, one at a time, so that events can be counted before memory
// is allocated for them. take may retain the event.
func eachEvent(text []byte, take func(*event) error) error {
	bad := func(err error) error { return errs.New(errs.ErrFormat, "this is not an overwire trace: %v", err) }
	d := json.NewDecoder(bytes.NewReader(text))
	if at, err := d.Token(); err != nil || at != json.Delim('{') {
		return bad(errors.New("it is not a JSON object"))
	}
	for d.More() {
		key, err := d.Token()
		if err != nil {
			return bad(err)
		}
		if key != "traceEvents" {
			var other json.RawMessage
			if err := d.Decode(&other); err != nil {
				return bad(err)
			}
			continue
		}
		if at, err := d.Token(); err != nil || at != json.Delim('[') {
			return bad(errors.New("traceEvents is not a list"))
		}
		for d.More() {
			var e event
			if err := d.Decode(&e); err != nil {
				return bad(err)
			}
			if err := take(&e); err != nil {
				return err
			}
		}
		if _, err := d.Token(); err != nil {
			return bad(err)
		}
	}
	if _, err := d.Token(); err != nil {
		return bad(err)
	}
	return nil
}

func (r *row) takeSpans(t *Timeline, events []*event, stages map[string]int) {
	slices.SortStableFunc(events, func(a, b *event) int { return cmp.Compare(a.At, b.At) })
	last := int64(0)
	for _, e := range events {
		begin, took := int64(math.Round(e.At*1e3)), int64(math.Round(e.Took*1e3))
		r.Stage = append(r.Stage, numberOf(&t.Stages, stages, e.Name))
		r.Begin, r.Took, r.Bytes = append(r.Begin, begin-last), append(r.Took, took), append(r.Bytes, e.Args.Bytes)
		last, t.End = begin, max(t.End, begin+took)
	}
}

// HTML returns the page: zoomable rows by worker and queue, and tables of the same data.
func (t *Timeline) HTML() ([]byte, error) { return assemblePage(traceBody, t) }
