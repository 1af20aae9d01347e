package bench

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/measure"
)

func report(rows ...measure.Row) *measure.Report {
	return &measure.Report{Machine: measure.Machine{CPU: "A CPU", Cores: 2}, Rows: rows, Seconds: 3}
}

// Promise: the page has each figure with its floor and the earlier figure of the same
// name, says which have none, and makes no element of a file's name.
func TestPage(t *testing.T) {
	rows := []measure.Row{
		{Group: "size", Name: "</text></svg><script>alert(1)</script>", Value: 0.6649, Unit: "x", Floor: 0.6624,
			FloorName: "the least", Share: 1.004},
		{Group: "load", Name: "load 2.0 GB", Value: 8, Unit: "GB/s", Floor: 12, FloorName: "memory", Share: 0.667,
			Note: "the first at 7"},
		{Group: "load", Name: "new", Value: 3, Unit: "GB/s"},
	}
	before := report(measure.Row{Group: "load", Name: "load 2.0 GB", Value: 5, Unit: "GB/s"},
		measure.Row{Group: "load", Name: "new", Value: 1, Unit: "x"})
	text := string(Page(report(rows...), before))
	for _, want := range []string{"0.665", "least 0.662", "8.00", "0.67 of 12.0", "before 5.00: +60.0 %",
		"the first at 7",
		"2 figures have none of the same name before", "A CPU, 2 cores", "&lt;/text&gt;"} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q", want)
		}
	}
	if strings.Contains(text, "<script") || strings.Count(text, "<table") != 2 || strings.Contains(text, "@figures@") {
		t.Error(text)
	}
	if alone := string(Page(report(rows...), nil)); strings.Contains(alone, "before") ||
		strings.Contains(alone, "Before") {
		t.Error("a page of one run speaks of another")
	}
}

// Promise: a report is read as it was written; anything else is refused by class.
func TestReadReport(t *testing.T) {
	text, err := json.Marshal(report(measure.Row{Group: "load", Name: "a", Value: 1}))
	if err != nil {
		t.Fatal(err)
	}
	rep, err := ReadReport(text)
	if err != nil || rep.Rows[0].Name != "a" || rep.Machine.CPU != "A CPU" {
		t.Errorf("%+v, %v", rep, err)
	}
	for _, bad := range []string{"", "[]", "{}", `{"rows":[]}`, `{"rows":{}}`, `{"rows":[{"value":"x"}]}`} {
		if _, err := ReadReport([]byte(bad)); !errors.Is(err, errs.ErrFormat) {
			t.Errorf("%q: %v", bad, err)
		}
	}
}
