package main

// This file measures other loaders of plain files beside ours.

import (
	"github.com/overwire/overwire/gosrc/measure"
)

import "fmt"

// peers are other loaders of plain files, by their names on PyPI; what is not
// installed says so in its row. workers/rig_device.py knows how each is called.
var peers = []string{"instanttensor", "safetensors", "fastsafetensors", "runai-model-streamer"}

// measureBeside measures plain loads of ours and of others, each in fresh processes,
// alternating, every byte compared.
func (r *run) measureBeside(m *model) {
	r.runStep("peers", m.kind+": beside other loaders", func() error {
		dev := r.opt.Device
		tasks := []task{{"verify", plain, append([]string{"verify", dev, m.sums}, m.files[plain]...)}}
		for range r.Repeat {
			tasks = append(tasks, task{"ours", plain, append([]string{"load", dev}, m.files[plain]...)},
				task{"load_file", plain, append([]string{"peer", dev}, m.files[plain]...)})
			for _, p := range peers {
				tasks = append(tasks, task{p, plain, append([]string{"with", dev, p, m.sums}, m.files[plain]...)})
			}
		}
		all := r.taskTurns(m, tasks, nil)
		if err := all["verify"].err; err != nil {
			return err
		}
		best := 0.0 // of the others
		for _, label := range append([]string{"load_file"}, peers...) {
			name := fmt.Sprintf("%s, %.1f GB plain, %d tensors", label, float64(m.bytes)/1e9, m.tensors)
			switch label {
			case "load_file":
				name = "safetensors' " + name
			case "safetensors":
				name = "safetensors' prefetch" + name[len(label):]
			}
			best = max(best, r.addBothRows(m, name, all[label], 0))
		}
		if len(all["ours"].results) == 0 {
			return all["ours"].err
		}
		r.addBothRows(m, fmt.Sprintf("overwire, %.1f GB plain, %d tensors", float64(m.bytes)/1e9, m.tensors),
			all["ours"], best)
		return nil
	})
}

// addBothRows adds the rows of a first and a second load, and returns the rate of the
// second. best, if not 0, is the rate it should exceed.
func (r *run) addBothRows(m *model, name string, o *outcome, best float64) float64 {
	if len(o.results) == 0 {
		// A failure of another loader is no failure of this run.
		r.runStep("peers", name, func() error { return lackError("%v", o.err) })
		return 0
	}
	var row measure.Row
	for _, w := range whichLoad {
		row = measure.Row{Group: "peers", Name: name + ": " + w.name, Unit: "GB/s"}
		o.setSpread(&row, func(res deviceResult) float64 { return measure.Rate(res.Bytes, w.of(res)) })
		row.Floor, row.FloorName = r.linkLimit(m, plain)
		if best > 0 && w.name == "second load" {
			r.goal(&row, fmt.Sprintf(">= the others' best, %.1f", best), atLeast(row.Value, best))
		}
		r.Add(row)
	}
	return row.Value
}
