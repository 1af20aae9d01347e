package main

// This file measures whole loads to a device, their memory and their start.

import (
	"fmt"
	"time"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/load"
	"github.com/overwire/overwire/gosrc/measure"
)

// measureLargeModel measures the large model: whole loads beside those of other libraries, the
// memory of a load, what precedes it, and the same from a cold disk.
func (r *run) measureLargeModel(m *model) {
	if r.isWanted("bf16") {
		r.runStep("bf16", "loads without Python", func() error { return r.goLoads(m) })
		r.measurePairs("bf16", m, []variant{packed, plain}, 3)
		r.runStep("bf16", "memory of a load", func() error { return r.measureMemory(m) })
	}
	if r.isWanted("start") {
		r.runStep("start", "from the start of the process", func() error { return r.measureStarts(m) })
	}
	if r.isWanted("cold") {
		r.runStep("cold", "from a cold disk", func() error { return r.coldDevice(m) })
	}
	if r.isWanted("net") {
		r.runStep("net", "loads over HTTP", func() error { return r.netDevice(m) })
	}
}

// manySmall measures a model of very many tensors.
func (r *run) manySmall(m *model) {
	r.measurePairs("many", m, []variant{packed, plain}, 1)
	r.runStep("many", "the cost of a tensor", func() error {
		at, bf16 := r.rates["many "+string(packed)], r.rates["bf16 "+string(packed)]
		if at == 0 || bf16 == 0 {
			return lackError("needs the rates of bf16 and many in the same run")
		}
		us := 1e6 * float64(m.bytes) / 1e9 * (1/at - 1/bf16) / float64(m.tensors)
		row := measure.Row{Group: "many", Name: "a tensor beside its bytes, Python included, second load", Value: us,
			Unit: "us",
			Note: fmt.Sprintf("%.1f GB/s against %.1f", at, bf16)}
		r.goal(&row, "<= 1.5", atMost(us, 1.5))
		r.Add(row)
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

// measurePairs measures first and second loads of a model in fresh processes, alternating,
// after the bytes were compared, and n runs of the peers beside them.
func (r *run) measurePairs(group string, m *model, variants []variant, peers int) {
	r.runStep(group, m.kind+": whole loads", func() error {
		dev := r.opt.Device
		var tasks []task
		for _, v := range variants {
			tasks = append(tasks, task{"verify " + string(v), v,
				append([]string{"verify", dev, m.sums}, m.files[v]...)})
		}
		for n := range max(r.Repeat, peers) {
			for _, v := range variants {
				if n < r.Repeat {
					tasks = append(tasks, task{string(v), v, append([]string{"load", dev}, m.files[v]...)})
				}
			}
			if n < min(peers, r.Repeat) {
				tasks = append(tasks, task{"peer", plain, append([]string{"peer", dev}, m.files[plain]...)},
					task{"peer-cpu", plain, append([]string{"peer-cpu", dev}, m.files[plain]...)})
			}
		}
		all := r.taskTurns(m, tasks, nil)
		for _, v := range variants {
			name := m.name(v)
			if err := all["verify "+string(v)].err; err != nil {
				r.runStep(group, name, func() error { return err })
				continue
			}
			r.loadRows(group, m, v, all[string(v)])
		}
		for _, p := range [][2]string{{"peer", "safetensors load_file(device)"},
			{"peer-cpu", "safetensors load_file, then .to(device)"}} {
			o := all[p[0]]
			if o == nil {
				continue
			}
			name := fmt.Sprintf("%s, %.1f GB plain", p[1], float64(m.bytes)/1e9)
			if len(o.results) == 0 {
				r.runStep(group, name, func() error { return o.err })
				continue
			}
			for _, w := range whichLoad {
				row := measure.Row{Group: group, Name: name + ": " + w.name, Unit: "GB/s"}
				o.setSpread(&row, func(res deviceResult) float64 { return measure.Rate(res.Bytes, w.of(res)) })
				row.Floor, row.FloorName = r.linkLimit(m, plain)
				r.Add(row)
			}
		}
		return nil
	})
}

// goal sets the project's goal for loads to a GPU; the host has its own rows
// elsewhere.
func (r *run) goal(row *measure.Row, text string, reached *bool) {
	if r.gpu != nil {
		row.Goal, row.Reached = text, reached
	}
}

var whichLoad = []struct {
	name string
	of   func(deviceResult) float64
}{
	{"first load", func(d deviceResult) float64 { return d.First }},
	{"second load", func(d deviceResult) float64 { return d.Second }},
}

// loadRows adds the first and the second load of ours.
func (r *run) loadRows(group string, m *model, v variant, o *outcome) {
	name := m.name(v)
	if o.err != nil {
		r.runStep(group, name, func() error { return o.err })
	}
	if len(o.results) == 0 {
		return
	}
	var rows [2]measure.Row
	for i, w := range whichLoad {
		row := measure.Row{Group: group, Name: name + ": " + w.name, Unit: "GB/s"}
		o.setSpread(&row, func(res deviceResult) float64 { return measure.Rate(res.Bytes, w.of(res)) })
		row.Floor, row.FloorName = r.linkLimit(m, v)
		rows[i] = row
	}
	r.rates[group+" "+string(v)] = rows[1].Value
	r.goal(&rows[0], ">= 0.97 x the second", atLeast(rows[0].Value, 0.97*rows[1].Value))
	goal := func(of float64, share float64, what string) {
		if of > 0 {
			r.goal(&rows[1], fmt.Sprintf(">= %.3f x %s = %.1f", share, what, share*of),
				atLeast(rows[1].Value, share*of))
		}
	}
	switch {
	case group == "bf16" && v == packed:
		goal(rows[1].Floor, 0.955, "floor") // 80 GB/s where the link carries 55.6
	case group == "bf16":
		goal(rows[1].Floor, 0.97, "floor")
	case group == "many":
		goal(r.rates["bf16 "+string(v)], 0.88, "the large model")
	}
	r.Add(rows[0])
	r.Add(rows[1])
}

// goLoads measures loads by the engine alone, the cost of checksums (alternating),
// and where the time of one traced load goes.
func (r *run) goLoads(m *model) error {
	if r.gpu != nil {
		defer func() { _ = r.gpu.Trim() }() // leave the machine to the processes that follow
	}
	var on, off []float64
	once := func(opt load.Options) (rep load.Report, s float64, err error) {
		if err := r.outOfTime(); err != nil {
			return rep, 0, err
		}
		opt.Device, opt.Threads = r.opt.Device, r.threads
		s, err = measure.Timed(func() error {
			rep, err = r.Load(m.files[packed], opt, nil)
			return err
		})
		return rep, s, err
	}
	for n := range r.Repeat + 1 {
		for _, noCheck := range []bool{false, true} {
			_, s, err := once(load.Options{NoCheck: noCheck})
			switch {
			case err != nil:
				return err
			case n == 0: // warms up: the ring is pinned, the kernels are loaded
			case noCheck:
				off = append(off, s)
			default:
				on = append(on, s)
			}
		}
	}
	row := measure.Row{Group: "bf16", Name: m.name(packed) + ": Go alone",
		Value: measure.Rate(m.bytes, measure.Middle(on)), Unit: "GB/s"}
	row.Floor, row.FloorName = r.linkLimit(m, packed)
	r.Add(row)
	cost := 100 * (measure.Middle(on)/measure.Middle(off) - 1)
	row = measure.Row{Group: "bf16", Name: "cost of the checksums", Value: cost, Unit: "%"}
	r.goal(&row, "<= 2 %", atMost(cost, 2))
	r.Add(row)
	file := r.opt.Trace
	if file == "" {
		file = r.Path("trace.json")
	}
	rep, s, err := once(load.Options{Trace: file})
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
	if c := rep.Trace.Copy; c != nil {
		r.Add(measure.Row{Group: "bf16", Name: "traced load: the copy stream is busy", Value: 100 * c.Busy / s,
			Unit: "%",
			Note: fmt.Sprintf("%.4f s of %.4f; %d gaps, %.4f s, the longest %.4f; %.4f before the first copy, %.4f "+
				"after the last; %s",
				c.Busy, s, c.Gaps, c.Idle, c.Longest, c.Lead, c.Tail, note)})
		return nil
	}
	r.Add(measure.Row{Group: "bf16", Name: "traced load", Value: measure.Rate(m.bytes, s), Unit: "GB/s", Note: note})
	return nil
}

// measureMemory is what a load allocates beside its tensors.
func (r *run) measureMemory(m *model) error {
	o := r.taskTurns(m, []task{{"memory", packed, append([]string{"memory", r.opt.Device}, m.files[packed]...)}},
		nil)["memory"]
	if o.err != nil {
		return o.err
	}
	res := o.results[0]
	mib := func(name string, n int64, goal bool) {
		row := measure.Row{Group: "bf16", Name: name, Value: float64(n) / (1 << 20), Unit: "MiB"}
		if goal {
			row.Goal, row.Reached = "<= 128", atMost(row.Value, 128)
		}
		r.Add(row)
	}
	if r.gpu != nil {
		mib("peak of device memory beside the tensors", res.Device, true)
		mib("pinned host memory", res.Pinned, true)
	}
	mib("peak of host memory beside the tensors", res.Host, false)
	return nil
}

// measureStarts measures the time before the first byte: from the start of the process,
// with and without torch, alternating.
func (r *run) measureStarts(m *model) error {
	all := map[string]*outcome{"first": {}, "preload": {}, "torch": {}}
	for n := range r.Repeat + 1 {
		for _, mode := range []string{"first", "preload", "torch"} {
			o := all[mode]
			if o.err != nil {
				continue
			}
			res, err := r.fromStart(m, task{mode, packed, append([]string{mode, r.opt.Device}, m.files[packed]...)})
			if err != nil {
				o.err = err
				continue
			}
			if n > 0 { // the first reads Python's files into memory
				o.results = append(o.results, res)
			}
		}
	}
	firstOf := func(d deviceResult) float64 { return d.First }
	secondOf := func(d deviceResult) float64 { return d.Second }
	r.runStep("start", "process start to first tensor, no torch", func() error {
		o := all["first"]
		if len(o.results) == 0 {
			return o.err
		}
		if o.results[0].Torch {
			return errs.New(errs.ErrEngine, "torch was imported")
		}
		row := measure.Row{Group: "start", Name: "process start to the first tensor there, no torch", Unit: "s"}
		o.setSpread(&row, firstOf)
		r.goal(&row, "<= 0.5", atMost(row.Value, 0.5))
		r.Add(row)
		row = measure.Row{Group: "start", Name: fmt.Sprintf("process start to all %.1f GB there, no torch",
			float64(m.bytes)/1e9), Unit: "s"}
		o.setSpread(&row, secondOf)
		r.Add(row)
		return nil
	})
	r.runStep("start", "process start to usable in torch, preloaded", func() error {
		o, bare := all["preload"], all["torch"]
		if len(o.results) == 0 {
			return o.err
		}
		if len(bare.results) == 0 {
			return bare.err
		}
		var torch measure.Row
		bare.setSpread(&torch, firstOf)
		row := measure.Row{Group: "start", Name: fmt.Sprintf("process start to %.1f GB usable in torch, preloaded",
			float64(m.bytes)/1e9), Unit: "s",
			Floor: torch.Value, FloorName: "import torch alone"}
		o.setSpread(&row, secondOf)
		r.goal(&row, "<= floor + 0.15 s", atMost(row.Value, torch.Value+0.15))
		after := measure.Row{}
		o.setSpread(&after, func(d deviceResult) float64 { return d.Second - d.First })
		row.Note = fmt.Sprintf("%.3f s after torch was imported", after.Value)
		r.Add(row)
		return nil
	})
	return nil
}

// coldDevice measures loads from the disk: the pages of the files are dropped
// before each. Direct reads of the same files are the floor, alternating.
func (r *run) coldDevice(m *model) error {
	const patience = 10 * time.Second // of one read of all the files
	share, err := dropPages(m.files[packed])
	if err != nil {
		return err
	}
	if share > 0.02 {
		return lackError("the pages stay in memory: %.1f %% are resident after they were dropped (%s)", 100*share,
			r.Report.Device.Files)
	}
	files := m.files[packed][:1]
	s, err := r.directRead(files, 16)
	if err != nil {
		return err
	}
	fits := max(1, min(len(m.files[packed]), int(patience.Seconds()/max(s, 1e-6))))
	files = m.files[packed][:fits]
	rounds := max(1, min(r.Repeat, int(60/(2*s*float64(fits)+1))))
	var direct []float64
	worst := 0.0
	var tasks []task
	for range rounds {
		tasks = append(tasks, task{"cold", packed, append([]string{"load", r.opt.Device}, files...)})
	}
	o := r.taskTurns(m, tasks, func() error {
		s, err := r.directRead(files, 16)
		if err != nil {
			return err
		}
		direct = append(direct, s)
		share, err := dropPages(files)
		worst = max(worst, share)
		return err
	})["cold"]
	if len(o.results) == 0 {
		return o.err
	}
	stored, err := sizeOf(files)
	if err != nil {
		return err
	}
	row := measure.Row{Group: "cold", Name: fmt.Sprintf("%.1f GB %s, compressed: from a cold disk",
		float64(o.results[0].Bytes)/1e9, m.kind), Unit: "GB/s",
		Floor: measure.Rate(stored, measure.Middle(direct)), FloorName: "O_DIRECT, 16 threads"}
	o.setSpread(&row, func(d deviceResult) float64 { return measure.Rate(d.Bytes, d.First) })
	r.goal(&row, ">= 1.45 x floor", atLeast(row.Value, 1.45*row.Floor))
	row.Note = fmt.Sprintf("at most %.2f %% of the pages resident before a load, by mincore; %s", 100*worst,
		r.Report.Device.Files)
	r.Add(row)
	return nil
}
