package main

// This file measures whole loads to a device.

import (
	"fmt"
	"hash/crc32"
	"time"

	"github.com/overwire/overwire/gosrc/device/cpu"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/load"
	"github.com/overwire/overwire/gosrc/measure"
)

// measureLargeModel measures the large model: whole loads, and the same over HTTP.
func (r *run) measureLargeModel(m *model) {
	if r.isWanted("bf16") {
		r.measureVariants("bf16", m, packed, plain)
		r.runStep("bf16", "checksums, and a traced load", func() error { return r.traceLoads(m) })
	}
	if r.isWanted("net") {
		r.runStep("net", "loads over HTTP", func() error { return r.netDevice(m) })
	}
}

func (r *run) measureManySmall(m *model) {
	many := r.measureVariants("many", m, packed, plain)[packed]
	r.runStep("many", "the cost of a tensor", func() error {
		large := r.large[packed]
		if many == 0 || large == 0 {
			return lackError("needs the rates of bf16 and many in the same run")
		}
		r.Add(measure.Row{Group: "many", Name: "a tensor beside its bytes", Unit: "us",
			Value: 1e6 * float64(m.bytes) / 1e9 * (1/many - 1/large) / float64(m.tensors),
			Note:  fmt.Sprintf("%.1f GB/s against %.1f", many, large)})
		return nil
	})
}

// linkLimit is the rate at which tensor bytes can arrive over the link, and its name.
// 0: not known.
func (r *run) linkLimit(m *model, v variant) (float64, string) {
	wire := r.Report.Device.Wire
	switch {
	case r.gpu == nil:
		return r.Report.Floors.RawCopy, "pread to fresh memory"
	case wire > 0 && v == packed:
		return wire / m.ratio, fmt.Sprintf("the wire / %.3f", m.ratio)
	}
	return wire, "the wire"
}

// measureVariants measures loads of a model after its bytes were compared, and returns
// their rates.
func (r *run) measureVariants(group string, m *model, variants ...variant) map[variant]float64 {
	rates := map[variant]float64{}
	for _, v := range variants {
		name := m.name(v)
		r.runStep(group, name, func() error {
			if err := r.compareModel(m, m.files[v]); err != nil {
				return err
			}
			row := measure.Row{Group: group, Name: name, Unit: "GB/s"}
			if err := r.timeLoads(&row, m, m.files[v]); err != nil {
				return err
			}
			row.Floor, row.FloorName = r.linkLimit(m, v)
			if goal := map[variant]float64{packed: 0.955, plain: 0.97}[v]; group == "bf16" { // packed: 80 of 55.6
				r.setGoal(&row, fmt.Sprintf(">= %.3f x floor", goal), atLeast(row.Value, goal*row.Floor))
			} else if of := r.large[v]; group == "many" && of > 0 {
				r.setGoal(&row, fmt.Sprintf(">= 0.88 x the large model = %.1f", 0.88*of), atLeast(row.Value, 0.88*of))
			}
			r.Add(row)
			rates[v] = row.Value
			return nil
		})
	}
	if group == "bf16" {
		r.large = rates
	}
	return rates
}

// setGoal sets the project's goal for loads to a GPU; the host has its own rows
// elsewhere.
func (r *run) setGoal(row *measure.Row, text string, reached *bool) {
	if r.gpu != nil {
		row.Goal, row.Reached = text, reached
	}
}

// loadModel loads files to the device, and frees them.
func (r *run) loadModel(files []string, opt load.Options) (rep load.Report, err error) {
	if err := r.outOfTime(); err != nil {
		return rep, err
	}
	opt.Device, opt.Threads = r.opt.Device, r.opt.Threads
	return r.Load(files, opt, nil)
}

// timeLoads measures loads of files. The first is that of a process that has loaded
// before: it compared the bytes.
func (r *run) timeLoads(row *measure.Row, m *model, files []string) error {
	seconds, err := r.Median(func() error { _, err := r.loadModel(files, load.Options{}); return err })
	row.Value = measure.Rate(m.bytes, seconds)
	return err
}

// compareModel loads files to the device and compares every tensor with what was saved.
func (r *run) compareModel(m *model, files []string) error {
	opened, err := load.Open(r.Ctx, load.Spec{URIs: files})
	if err != nil {
		return err
	}
	defer opened.Close()
	mem, err := opened.LoadWhole(r.Ctx, nil, load.Options{Device: r.opt.Device, Threads: r.opt.Threads})
	if err != nil {
		return err
	}
	defer cpu.Release(mem)
	for i, t := range opened.Index().Tensors {
		data := make([]byte, mem[i].Bytes)
		if r.gpu == nil {
			copy(data, mem[i].Slice())
		} else if err = r.gpu.Read(data, mem[i]); err != nil {
			return err
		}
		if crc32.ChecksumIEEE(data) != m.sums[t.Name] {
			return errs.New(errs.ErrEngine, "tensor %q did not come back bit for bit", t.Name)
		}
	}
	return nil
}

// traceLoads measures the cost of checksums, and where the time of one traced load goes.
func (r *run) traceLoads(m *model) error {
	on, off, err := r.alternateChecks(func(noCheck bool) error {
		_, err := r.loadModel(m.files[packed], load.Options{NoCheck: noCheck})
		return err
	})
	if err != nil {
		return err
	}
	row := measure.Row{Group: "bf16", Name: "cost of the checksums", Value: 100 * (on/off - 1), Unit: "%"}
	r.setGoal(&row, "<= 2 %", atMost(row.Value, 2))
	r.Add(row)
	file := r.opt.Trace
	if file == "" {
		file = r.Path("trace.json")
	}
	start := time.Now()
	rep, err := r.loadModel(m.files[packed], load.Options{Trace: file})
	s := time.Since(start).Seconds()
	if err != nil {
		return err
	}
	if rep.Trace == nil {
		return errs.New(errs.ErrEngine, "a traced load has no trace")
	}
	note := fmt.Sprintf("%d workers:", rep.Stages.Workers)
	for _, g := range rep.Trace.Stages {
		note += fmt.Sprintf(" %s %.3f s", g.Verb, g.Seconds)
	}
	row = measure.Row{Group: "bf16", Name: "traced load", Value: measure.Rate(m.bytes, s), Unit: "GB/s", Note: note}
	if c := rep.Trace.Copy; c != nil {
		row.Name, row.Value, row.Unit = "traced load: the copy stream is busy", 100*c.Busy/s, "%"
		row.Note = fmt.Sprintf("%.4f s of %.4f; %d gaps, %.4f s, the longest %.4f; %.4f before the first copy, %.4f "+
			"after the last; %s", c.Busy, s, c.Gaps, c.Idle, c.Longest, c.Lead, c.Tail, note)
	}
	r.Add(row)
	return nil
}
