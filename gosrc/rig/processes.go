package main

// This file runs measurements of a device in processes of their own.

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"io"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/measure"
	"github.com/overwire/overwire/gosrc/pipeline"
)

// A deviceResult is the last line that workers/rig_device.py prints.
type deviceResult struct {
	First  float64 `json:"first"`  // seconds
	Second float64 `json:"second"` // seconds
	Bytes  int64   `json:"bytes"`  // of tensors
	Device int64   `json:"device"` // beside the tensors, at the peak
	Host   int64   `json:"host"`
	Pinned int64   `json:"pinned"`
	Torch  bool    `json:"torch"` // was imported
	// Stages are those of the last load.
	Stages  pipeline.Stages `json:"stages"`
	Note    string          `json:"note"`
	Missing string          `json:"missing"`
	Error   string          `json:"error"`
}

// A task is one measurement in a process of its own. Tasks with one label repeat
// the same measurement.
type task struct {
	label string
	of    variant // what it loads; skipped if verifying that failed
	args  []string
}

// A child is a process that was started.
type child struct {
	task   task
	cmd    *exec.Cmd
	stop   context.CancelFunc
	in     io.WriteCloser
	out    *bufio.Reader
	stderr bytes.Buffer
}

// Limits; what is slower is killed. Tests use smaller ones.
var (
	startLimit = 150 * time.Second // to import torch and make a context, several processes at once
	workLimit  = 45 * time.Second  // to load, and a second more for every 400 MB
)

// beginChild starts a process, which is killed after limit.
func (r *run) beginChild(t task, limit time.Duration) (*child, error) {
	if r.opt.Python == "" {
		return nil, lackError(noPython)
	}
	ctx, stop := context.WithTimeout(r.Ctx, limit)
	c := &child{task: t, stop: stop, cmd: exec.CommandContext(ctx, r.opt.Python,
		append([]string{r.workerPath("rig_device.py"), strconv.FormatInt(time.Now().UnixNano(), 10)}, t.args...)...)}
	c.cmd.WaitDelay = 5 * time.Second
	c.cmd.Stderr = &c.stderr
	in, err := c.cmd.StdinPipe()
	if err == nil {
		c.in = in
		var out io.ReadCloser
		if out, err = c.cmd.StdoutPipe(); err == nil {
			c.out = bufio.NewReader(out)
			err = c.cmd.Start()
		}
	}
	if err != nil {
		stop()
		return nil, errs.New(errs.ErrEngine, "%s: %v", r.opt.Python, err)
	}
	return c, nil
}

// readLine reads one line; an early end is an error with the process's last output.
func (c *child) readLine() (string, error) {
	text, err := c.out.ReadString('\n')
	if err == nil {
		return strings.TrimSpace(text), nil
	}
	wait := c.cmd.Wait()
	lines := strings.Split(strings.TrimSpace(c.stderr.String()), "\n")
	return "", errs.New(errs.ErrEngine, "%s: ended, or was given up: %v: %s", strings.Join(c.task.args, " "), wait,
		lines[len(lines)-1])
}

// readResult reads the answer.
func (c *child) readResult(text string) (res deviceResult, err error) {
	if text == "" {
		if text, err = c.readLine(); err != nil {
			return res, err
		}
	}
	if err := json.Unmarshal([]byte(text), &res); err != nil {
		return res, errs.New(errs.ErrEngine, "%s printed %q", strings.Join(c.task.args, " "), text)
	}
	if res.Error != "" {
		return res, errs.New(errs.ErrEngine, "%s: %s", c.task.args[0], res.Error)
	}
	if res.Missing != "" {
		return res, lackError("%s", res.Missing)
	}
	return res, nil
}

// endChild kills a process that still runs and waits for it, so that its memory is free
// before the next measurement.
func (c *child) endChild() {
	_ = c.in.Close()
	timer := time.AfterFunc(10*time.Second, c.stop) // it ends by itself, or not
	_ = c.cmd.Wait()
	timer.Stop()
	c.stop()
}

// outcome is what the tasks of one label gave.
type outcome struct {
	results []deviceResult
	err     error // the first error; what had been measured before it counts
}

// taskTurns runs tasks one after the other, each in a fresh process. Several
// processes start at once and wait, so that the time to import torch is spent once
// for each group; while one is measured, the others sleep. before is called right
// before each one starts to work.
func (r *run) taskTurns(m *model, tasks []task, before func() error) map[string]*outcome {
	all := map[string]*outcome{}
	wrong := map[variant]error{} // the verify that failed
	note := func(t task, res *deviceResult, err error) {
		o := all[t.label]
		if o == nil {
			o = &outcome{}
			all[t.label] = o
		}
		if err != nil && o.err == nil {
			o.err = err
		}
		if err == nil && res != nil {
			o.results = append(o.results, *res)
		}
	}
	atOnce := max(2, min(8, r.Threads/2))
	for len(tasks) > 0 {
		n := min(atOnce, len(tasks))
		group := tasks[:n]
		tasks = tasks[n:]
		limit := startLimit + time.Duration(n)*r.longestTime(m)
		children := make([]*child, n)
		for i, t := range group {
			if err := r.outOfTime(); err != nil {
				note(t, nil, err)
				continue
			}
			c, err := r.beginChild(t, limit)
			if err != nil {
				note(t, nil, err)
				continue
			}
			children[i] = c
		}
		early := make([]string, n) // results of those that failed to start
		for i, c := range children {
			if c == nil {
				continue
			}
			text, err := c.readLine()
			if err != nil {
				note(c.task, nil, err)
				c.endChild()
				children[i] = nil
			} else if text != "ready" {
				early[i] = text
			}
		}
		for i, c := range children {
			if c == nil {
				continue
			}
			err := wrong[c.task.of]
			if err == nil {
				err = r.outOfTime()
			}
			if err == nil && before != nil && early[i] == "" {
				err = before()
			}
			var res deviceResult
			if err == nil {
				killer := time.AfterFunc(r.longestTime(m), c.stop)
				_, _ = io.WriteString(c.in, "go\n") // result reports a child that is gone
				res, err = c.readResult(early[i])
				killer.Stop()
			}
			if err != nil && strings.HasSuffix(c.task.args[0], "verify") {
				wrong[c.task.of] = err
			}
			note(c.task, &res, err)
			c.endChild()
		}
	}
	return all
}

// longestTime is how long one process may work on a model.
func (r *run) longestTime(m *model) time.Duration {
	return workLimit + time.Duration(m.bytes/400e6)*time.Second
}

// outOfTime is the reason why nothing more is started.
func (r *run) outOfTime() error {
	if err := r.Stopped(); err != nil {
		return err
	}
	if time.Since(r.Began) > r.opt.Limit {
		return lackError("the %.0f s of this run were over", r.opt.Limit.Seconds())
	}
	return nil
}

// fromStart runs one measurement that counts from the start of its process.
func (r *run) fromStart(m *model, t task) (deviceResult, error) {
	if err := r.outOfTime(); err != nil {
		return deviceResult{}, err
	}
	c, err := r.beginChild(t, r.longestTime(m))
	if err != nil {
		return deviceResult{}, err
	}
	defer c.endChild()
	return c.readResult("")
}

// setSpread sets a row's value to the median of what get gives of each result, and
// its range.
func (o *outcome) setSpread(row *measure.Row, get func(deviceResult) float64) {
	var all []float64
	for _, res := range o.results {
		all = append(all, get(res))
	}
	row.Value, row.Runs = measure.Middle(all), len(all)
	row.Low, row.High = slices.Min(all), slices.Max(all)
	if row.Note == "" {
		row.Note = o.results[0].Note
	}
}
