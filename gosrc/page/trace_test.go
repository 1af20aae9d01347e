package page

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/regular"
	"github.com/overwire/overwire/gosrc/pipeline"
)

// The page shows every span of a trace that overwire wrote, in rows by worker.
func TestTrace(t *testing.T) {
	trace := pipeline.NewTrace()
	now := time.Now()
	for i := range 50 {
		begin := now.Add(time.Duration(i) * time.Millisecond)
		trace.Verb([]string{"open", "plan", "land"}[i%3], begin, begin.Add(time.Duration(i)*time.Microsecond), int64(i))
	}
	path := filepath.Join(t.TempDir(), "t.json")
	if err := trace.WriteFile(path); err != nil {
		t.Fatal(err)
	}
	text, err := regular.Read(path, 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	line, err := ReadTrace("t.json", text)
	if err != nil {
		t.Fatal(err)
	}
	if line.Spans != 50 || len(line.Rows) != 1 || line.Rows[0].Name != "load" || len(line.Stages) != 3 {
		t.Fatalf("%+v", line)
	}
	at := int64(0)
	for i, step := range line.Rows[0].Begin {
		at += step
		if r := line.Rows[0]; i > 0 && step != 1e6 || r.Took[i] != int64(i)*1e3 || r.Bytes[i] != int64(i) ||
			line.Stages[r.Stage[i]] != []string{"open", "plan", "land"}[i%3] {
			t.Errorf("span %d: %d, %d, %d", i, step, r.Took[i], r.Bytes[i])
		}
	}
	if line.End != at+49e3 {
		t.Errorf("the trace ends at %d, its last span begins at %d", line.End, at)
	}
}

// The device's rows come last, in numerical order. No name in a trace ends the element that contains it.
func TestTraceNames(t *testing.T) {
	bad := "</script><img src=x onerror=alert(1)>"
	text := `{"traceEvents":[{"ph":"X","name":"copy","pid":2,"tid":0,"ts":5,"dur":1.5,"args":{"bytes":3}},{"ph":"i","name":"mark"},
		{"ph":"M","name":"thread_name","pid":2,"tid":0,"args":{"name":"copies"}},{"ph":"M","name":"thread_name","pid":1,"tid":3,"args":{"name":"` + bad + `"}},
		{"ph":"X","name":"` + bad + `","pid":1,"tid":3,"ts":1,"dur":1},{"ph":"X","name":"read","pid":1,"tid":2,"ts":1,"dur":1,"args":{"bytes":1}}]}`
	line, err := ReadTrace(bad, []byte(text))
	if err != nil {
		t.Fatal(err)
	}
	if r := line.Rows; len(r) != 3 || r[0].Name != "" || r[1].Name != bad || r[2].Name != "copies" || !r[2].Device ||
		r[1].Device {
		t.Errorf("%+v", r)
	}
	html, err := line.HTML()
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := bytes.Cut(html, []byte(`id="data">`))
	data, _, _ := bytes.Cut(rest, []byte("</script>"))
	var again Timeline
	if err := json.Unmarshal(data, &again); err != nil || bytes.ContainsAny(data, "<>&") || again.Title != bad {
		t.Errorf("%v: %s", err, data)
	}
}

// Input that is not a trace is refused with a typed error.
func TestTraceRefuses(t *testing.T) {
	span := func(at, took string) string {
		return fmt.Sprintf(`{"traceEvents":[{"ph":"X","name":"read","pid":1,"tid":1,"ts":%s,"dur":%s}]}`, at, took)
	}
	for _, text := range []string{"", "{", "[]", "{}", `{"traceEvents":[]}`, `{"traceEvents":[{"ph":"M"}]}`,
		`{"traceEvents":{}}`, `{"traceEvents":[1]}`, `{"a":1}`, `{"a":1`, `{"traceEvents":[{"ph":"X"}`, "null",
		span("-1", "1"), span("1", "-1"), span("1e300", "1e300"), span("1", "1e14"), span(`"1"`, "1"),
		strings.Repeat("[", 20_000)} {
		if _, err := ReadTrace("x", []byte(text)); !errors.Is(err, errs.ErrFormat) {
			t.Errorf("%.60q: %v", text, err)
		}
	}
	rows := make([]string, maxRows+1)
	for i := range rows {
		rows[i] = fmt.Sprintf(`{"ph":"X","name":"read","pid":1,"tid":%d,"ts":1,"dur":1}`, i)
	}
	stages := make([]string, maxStages+1)
	for i := range stages {
		stages[i] = fmt.Sprintf(`{"ph":"X","name":"%d","pid":1,"tid":1,"ts":1,"dur":1}`, i)
	}
	for what, list := range map[string]string{"rows": strings.Join(rows, ","), "stages": strings.Join(stages, ","),
		"events": strings.Repeat("{},", maxSpans+maxRows) + "{}"} {
		if _, err := ReadTrace("x", []byte(`{"traceEvents":[`+list+`]}`)); !errors.Is(err, errs.ErrNotSupported) {
			t.Errorf("too many %s: %v", what, err)
		}
	}
}
