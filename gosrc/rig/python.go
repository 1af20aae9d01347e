package main

// This file runs measurements in fresh interpreters, and has the rows that need one.

import (
	"bytes"
	"embed"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/measure"
)

// noPython is why a row without an interpreter is not measured.
const noPython = "needs Python: --python names an interpreter that has overwire"

//go:embed workers/*.py
var workers embed.FS

// unpackWorkers writes Python's scripts to the run's folder.
func (r *run) unpackWorkers() error {
	if err := os.CopyFS(r.Folder, workers); err != nil {
		return errs.New(errs.ErrIO, "%v", err)
	}
	return nil
}

// workerPath is the path of one of Python's scripts.
func (r *run) workerPath(name string) string { return filepath.Join(r.Folder, "workers", name) }

// pythonResult is the one line of JSON that workers/rig_rows.py prints.
type pythonResult struct {
	Seconds float64 `json:"seconds"`
	Missing string  `json:"missing"` // why it could not be measured
	Note    string  `json:"note"`
	Threads int     `json:"threads"`
	Torch   bool    `json:"torch"`
}

// python runs one measurement in a fresh interpreter.
func (r *run) python(args ...string) (pythonResult, error) {
	var res pythonResult
	if r.opt.Python == "" {
		res.Missing = noPython
		return res, nil
	}
	return r.runPython(append([]string{r.workerPath("rig_rows.py")}, args...)...)
}

func (r *run) runPython(args ...string) (res pythonResult, err error) {
	if err := r.Stopped(); err != nil {
		return res, err
	}
	cmd := exec.CommandContext(r.Ctx, r.opt.Python, args...)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		if stopped := r.Stopped(); stopped != nil {
			return res, stopped
		}
		lines := strings.Split(strings.TrimSpace(stderr.String()), "\n")
		return res, errs.New(errs.ErrEngine, "%s %s: %v: %s", r.opt.Python, strings.Join(args, " "), err,
			lines[len(lines)-1])
	}
	if err := json.Unmarshal(stdout.Bytes(), &res); err != nil {
		return res, errs.New(errs.ErrEngine, "%s printed %q", strings.Join(args, " "), stdout.String())
	}
	return res, nil
}

// runTurns runs measurements in fresh processes, alternating, after one warm-up of
// each, and returns the median seconds of each; a missing reason ends it.
func (r *run) runTurns(cmds ...[]string) (seconds []float64, notes []string, missing string, err error) {
	all := make([][]float64, len(cmds))
	notes = make([]string, len(cmds))
	for round := range r.Repeat + 1 {
		for i, args := range cmds {
			res, err := r.python(args...)
			if err != nil || res.Missing != "" {
				return nil, nil, res.Missing, err
			}
			notes[i] = res.Note
			if round > 0 {
				all[i] = append(all[i], res.Seconds)
			}
		}
	}
	for _, a := range all {
		seconds = append(seconds, measure.Middle(a))
	}
	return seconds, notes, "", nil
}

// pythonLoad is load_file of the compressed model, as a user calls it.
func (r *run) pythonLoad(total int64, gb float64) error {
	name := fmt.Sprintf("load_file of %.1f GB compressed bf16, fresh process", gb)
	res, err := r.python("verify", r.Path(bigCompressed), r.Path(bigSums))
	if err != nil {
		return err
	}
	if res.Missing != "" {
		r.Missing("load", name, res.Missing)
		return nil
	}
	s, notes, missing, err := r.runTurns([]string{"load", r.Path(bigCompressed)})
	if err != nil {
		return err
	}
	if missing != "" {
		r.Missing("load", name, missing)
		return nil
	}
	v := measure.Rate(total, s[0])
	row := measure.Row{Group: "load", Name: name, Value: v, Unit: "GB/s", Floor: r.Report.Floors.RawCopy,
		FloorName: "pread to fresh memory", Note: notes[0]}
	// The goal is against our own streaming rate, if it was measured.
	if one := r.valueOf("to memory"); one > 0 {
		goal := 0.8 * float64(r.Threads) * one
		row.Goal = fmt.Sprintf(">= 0.8 x %d x %.1f = %.1f", r.Threads, one, goal)
		row.Reached = atLeast(v, goal)
	}
	r.Add(row)
	return nil
}

// valueOf finds a row measured earlier in this run.
func (r *run) valueOf(suffix string) float64 {
	for _, row := range r.Report.Rows {
		if strings.HasSuffix(row.Name, suffix) {
			return row.Value
		}
	}
	return 0
}

// pythonPlain compares load_file of a plain file with safetensors' own; both then
// read every byte, since mapping a file alone costs nothing.
func (r *run) pythonPlain(total int64, gb float64) error {
	name := fmt.Sprintf("load_file of %.1f GB plain safetensors, consumed", gb)
	res, err := r.python("verify", r.Path(bigPlain), r.Path(bigSums))
	if err == nil && res.Missing != "" {
		r.Missing("load", name, res.Missing)
		return nil
	}
	if err != nil {
		return err
	}
	s, notes, missing, err := r.runTurns([]string{"consume", r.Path(bigPlain)}, []string{"peer", r.Path(bigPlain)})
	if err != nil {
		return err
	}
	if missing != "" {
		r.Missing("load", name, missing)
		return nil
	}
	ours, theirs := measure.Rate(total, s[0]), measure.Rate(total, s[1])
	r.Add(measure.Row{Group: "load", Name: name, Value: ours, Unit: "GB/s", Floor: theirs, FloorName: notes[1],
		Goal: ">= 0.95 x theirs", Reached: atLeast(ours, 0.95*theirs), Note: notes[0]})
	return nil
}

func (r *run) pythonMany(n int) error {
	name := fmt.Sprintf("%d tensors: each beside its bytes, Python objects included", n)
	res, err := r.python("verify", r.Path(manyFile), r.Path(manySums))
	if err != nil {
		return err
	}
	var s []float64
	var notes []string
	missing := res.Missing
	if missing == "" {
		s, notes, missing, err = r.runTurns([]string{"load", r.Path(manyFile)}, []string{"load", r.Path(oneFile)})
		if err != nil {
			return err
		}
	}
	if missing != "" {
		r.Missing("many", name, missing)
		return nil
	}
	v := 1e6 * (s[0] - s[1]) / float64(n)
	r.Add(measure.Row{Group: "many", Name: name, Value: v, Unit: "us", Goal: "<= 2", Reached: atMost(v, 2),
		Note: fmt.Sprintf("%s; %.1f ms against %.1f ms in one tensor", notes[0], 1e3*s[0], 1e3*s[1])})
	return nil
}

// measureImport is the time that `import overwire` adds to a bare interpreter.
func (r *run) measureImport() error {
	const name = "import overwire, over a bare interpreter"
	if r.opt.Python == "" {
		r.Missing("import", name, noPython)
		return nil
	}
	var bare, ours []float64
	var last pythonResult
	for round := range 3*r.Repeat + 1 {
		for _, with := range []bool{false, true} {
			code := "print('{}')"
			if with {
				code = "import overwire;print('{}')"
			}
			s, err := measure.Timed(func() error { _, err := r.runPython("-c", code); return err })
			if err != nil {
				return err
			}
			switch {
			case round == 0: // warms the page cache and writes .pyc files
			case with:
				ours = append(ours, s)
			default:
				bare = append(bare, s)
			}
		}
	}
	last, err := r.runPython("-c", "import sys, overwire, json, threading\n"+
		"print(json.dumps({'threads': len(__import__('os').listdir('/proc/self/task')),"+
		" 'torch': bool({'torch', 'numpy'} & set(sys.modules))}))")
	if err != nil {
		return err
	}
	v := 1e3 * (measure.Middle(ours) - measure.Middle(bare))
	ok := v <= 5 && last.Threads == 1 && !last.Torch
	r.Add(measure.Row{Group: "import", Name: name, Value: v, Unit: "ms", Floor: 1e3 * measure.Middle(bare),
		FloorName: "bare interpreter",
		Goal:      "<= 5 ms, one thread, no torch", Reached: &ok,
		Note: fmt.Sprintf("%d threads, torch or numpy imported: %v", last.Threads, last.Torch)})
	return nil
}
