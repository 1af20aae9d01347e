package main

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/measure"
)

// What is no device, no part, or goes with other rows, is refused by class.
func TestDeviceRefuses(t *testing.T) {
	for _, c := range []struct {
		opt  Options
		want error
	}{
		{Options{Device: "tpu"}, errs.ErrArgument},
		{Options{Device: "cuda:x"}, errs.ErrArgument},
		{Options{Device: "cpu", What: "load"}, errs.ErrArgument},
		{Options{Device: "cpu", Only: []string{"all"}}, errs.ErrArgument},
		{Options{Device: "cpu", Options: measure.Options{Out: "no/such/folder/report"}}, errs.ErrIO},
	} {
		c.opt.Dir, c.opt.Size, c.opt.Repeat = t.TempDir(), 1<<20, 1
		if _, err := Run(t.Context(), nil, c.opt); !errors.Is(err, c.want) {
			t.Errorf("%+v: %v, want %v", c.opt, err, c.want)
		}
	}
}

// A run whose time is up begins nothing more, says so in every row, writes its
// report all the same, and leaves no file.
func TestDeviceOutOfTime(t *testing.T) {
	dir, out := t.TempDir(), filepath.Join(t.TempDir(), "report.json")
	rep, err := Run(t.Context(), nil, Options{Device: "cpu", Limit: 1,
		Options: measure.Options{Size: 1 << 20, Repeat: 1, Dir: dir, Out: out}})
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range rep.Rows {
		if !strings.Contains(r.Missing, "were over") {
			t.Errorf("%+v", r)
		}
	}
	b, err := os.ReadFile(out)
	var again measure.Report
	if err == nil {
		err = json.Unmarshal(b, &again)
	}
	if err != nil || len(again.Rows) != len(rep.Rows) || len(rep.Rows) < 3 {
		t.Errorf("%v: %d rows in the file, %d in the report", err, len(again.Rows), len(rep.Rows))
	}
	if left, _ := os.ReadDir(dir); len(left) != 0 {
		t.Errorf("left behind: %v", left)
	}
}

// A file whose bytes are others than those that were saved is not timed.
func TestCompareModel(t *testing.T) {
	m, err := measure.Start(t.Context(), nil, measure.Options{Size: 1 << 20, Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	r := &run{Run: m, opt: Options{Device: "cpu", Limit: time.Hour}}
	if err := r.withModel("bf16", "llama-bf16", 1<<20, func(m *model) {
		for _, v := range []variant{plain, packed} {
			if err := r.compareModel(m, m.files[v]); err != nil {
				t.Error(err)
			}
			m.sums["lm_head.weight"]++
			if err := r.compareModel(m, m.files[v]); err == nil || !strings.Contains(err.Error(), "lm_head.weight") {
				t.Errorf("%s: %v", v, err)
			}
			m.sums["lm_head.weight"]--
		}
	}); err != nil {
		t.Fatal(err)
	}
}
