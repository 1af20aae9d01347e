package main

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/spawn"
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

// interpreter is a program in the place of Python that does as the script says,
// with MODE being the measurement and N the number of the task.
func interpreter(t *testing.T, script string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "python")
	text := "#!/bin/sh\nMODE=$3 N=$5\n" + script
	if err := os.WriteFile(path, []byte(text), 0o700); err != nil {
		t.Fatal(err)
	}
	return path
}

func someRun(t *testing.T, python string, limit time.Duration) *run {
	return &run{Run: &measure.Run{Began: time.Now(), Ctx: t.Context(), Folder: t.TempDir(),
		Options: measure.Options{Threads: 4}, Report: measure.Report{Device: &measure.Device{}}},
		opt: Options{Python: python, Limit: limit}, rates: map[string]float64{}}
}

// Each process is measured alone, after its word; one that crashes, hangs, says
// that it cannot, or prints rubbish costs its own figure only, and a model whose
// bytes are wrong is not timed at all.
func TestTaskTurns(t *testing.T) {
	startLimit, workLimit = 20*time.Second, time.Second
	defer func() { startLimit, workLimit = 150*time.Second, 45*time.Second }()
	const good = "echo ready; read word; [ \"$word\" = go ] || exit 1; "
	for _, c := range []struct {
		name, script string
		results      int // of load
		says         string
	}{
		{"good", good + `echo '{"first": 2, "second": 1, "bytes": 4}'`, 3, ""},
		{"one crashes", good + `[ $N = 3 ] && { echo boom >&2; exit 7; }; echo '{"first": 2, "second": 1}'`, 2, "boom"},
		{"one crashes before it is ready", `[ $N = 3 ] && { echo early >&2; exit 7; }; ` + good + `echo '{}'`, 2,
			"early"},
		{"one hangs", good + `[ $N = 3 ] && exec sleep 60; echo '{}'`, 2, "given up"},
		{"cannot", `echo '{"missing": "torch is not installed"}'`, 0, "torch is not installed"},
		{"rubbish", good + `echo hello`, 0, "printed"},
		{"wrong bytes", good + `[ $MODE = verify ] && echo '{"error": "ValueError: other bytes"}' || echo '{}'`, 0,
			"other bytes"},
		{"not there", "", 0, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			python := "/no/such/python"
			if c.script != "" {
				python = interpreter(t, c.script)
			}
			r := someRun(t, python, time.Minute)
			words := 0
			all := r.taskTurns(&model{}, []task{
				{"verify", packed, []string{"verify", "cpu", "1"}}, {"load", packed, []string{"load", "cpu", "2"}},
				{"load", packed, []string{"load", "cpu", "3"}}, {"load", packed, []string{"load", "cpu", "4"}},
			}, func() error { words++; return nil })
			o := all["load"]
			if len(o.results) != c.results || (o.err != nil) != (c.results < 3) {
				t.Fatalf("%d results, %v", len(o.results), o.err)
			}
			if c.says != "" && !strings.Contains(o.err.Error(), c.says) {
				t.Errorf("%v does not say %q", o.err, c.says)
			}
			var why *lackingError
			if errors.As(o.err, &why) != (c.name == "cannot") {
				t.Errorf("%v: is it lacking?", o.err)
			}
			if c.name == "good" {
				row := measure.Row{}
				o.setSpread(&row, func(d deviceResult) float64 { return d.First })
				if row.Value != 2 || row.Runs != 3 || words != 4 {
					t.Errorf("%+v after %d words", row, words)
				}
			}
		})
	}
	if n := spawn.Left(); len(n) != 0 {
		t.Errorf("left running: %v", n)
	}
}

// A run that is cancelled kills the process that it waits for.
func TestTaskTurnsCancelled(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	r := someRun(t, interpreter(t, "echo ready; exec sleep 3600"), time.Hour)
	r.Ctx = ctx
	time.AfterFunc(300*time.Millisecond, cancel)
	o := r.taskTurns(&model{}, []task{{"load", packed, []string{"load", "cpu"}}}, nil)["load"]
	if o.err == nil || len(o.results) > 0 {
		t.Errorf("%+v", o)
	}
}

// The range and the median are those of what get gives.
func TestSpread(t *testing.T) {
	o := outcome{results: []deviceResult{{First: 3}, {First: 1}, {First: 2, Note: "last"}, {First: 10}}}
	row := measure.Row{Note: "kept"}
	o.setSpread(&row, func(d deviceResult) float64 { return 10 * d.First })
	if row.Value != 25 || row.Low != 10 || row.High != 100 || row.Runs != 4 || row.Note != "kept" {
		t.Errorf("%+v", row)
	}
}

// Dropped pages are gone by mincore's count, unless the file system is memory.
func TestDropped(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(path, make([]byte, 3<<20+5), 0o600); err != nil {
		t.Fatal(err)
	}
	in, pages := int64(0), int64(-1)
	for n := 0; in != pages; n++ { // a host that is short of memory drops pages when it likes
		if n == 100 {
			t.Skipf("the page cache here keeps %d of %d pages", in, pages)
		}
		if _, err := os.ReadFile(path); err != nil {
			t.Fatal(err)
		}
		f, err := os.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		in, pages, err = countResident(f)
		f.Close()
		if err != nil || pages != (3<<20)/int64(os.Getpagesize())+1 {
			t.Fatalf("%d of %d pages, %v", in, pages, err)
		}
	}
	share, err := dropPages([]string{path})
	if err != nil {
		t.Fatal(err)
	}
	if fs := measure.FileSystem(path); fs != "tmpfs" && share > 0.02 || fs == "tmpfs" && share != 1 {
		t.Errorf("on %s a share of %.3f is resident", fs, share)
	}
	if _, err := dropPages([]string{path + "?"}); !errors.Is(err, errs.ErrIO) {
		t.Error(err)
	}
}
