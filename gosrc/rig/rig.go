// The rig measures what the engine promises, for its developers: each figure beside
// the floor of the same machine in the same run, and beside its goal. It is a program
// of its own and no part of the library: `make rig` builds build/bin/overwire-rig.
//
// A figure is the median of several runs in this process. What a program in Python
// sees, and other libraries, are measured by `overwire bench --device` and by
// tests/benches.
package main

import (
	"context"
	"slices"
	"time"

	"github.com/overwire/overwire/gosrc/device/cuda"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/job"
	"github.com/overwire/overwire/gosrc/measure"
)

// Options choose what is measured. The zero value measures everything at the sizes
// of docs/benchmarks.md and its pages.
type Options struct {
	measure.Options        // Size 0: 4 GB, to a device 16.06
	What            string // one of Whats; "" or "all": each
	File            string // real F32 weights for the codec rows, "" for none
	// Device, if not "", measures only loads to that device ("cuda", "cuda:1",
	// "cpu"): the parts in Only, or all.
	Device string
	Only   []string
	// Limit is the time for them: what has not started by then is skipped. 0: 450
	// s.
	Limit time.Duration
	Trace string // path for the Chrome trace of one load of compressed bf16
}

// Whats are the values of Options.What.
var Whats = []string{"all", "codec", "load", "many", "net"}

// run is one run of the rig.
type run struct {
	*measure.Run
	opt Options
	// For the rows of a device: the GPU, nil for the host, and the rates of the large model.
	gpu   *cuda.Device
	large map[variant]float64
}

func (opt *Options) checkOptions() error {
	if opt.What == "" {
		opt.What = "all"
	}
	if !slices.Contains(Whats, opt.What) {
		return errs.New(errs.ErrArgument, "nothing to measure is called %q", opt.What)
	}
	if opt.Device != "" && opt.What != "all" {
		return errs.New(errs.ErrArgument, "the rows of a device are measured by themselves, not with %q", opt.What)
	}
	for _, part := range opt.Only {
		if !slices.Contains(Parts, part) {
			return errs.New(errs.ErrArgument, "no part is called %q", part)
		}
	}
	if opt.Size == 0 && opt.Device != "" {
		opt.Size = 16_060_000_000
	}
	if opt.Size == 0 {
		opt.Size = 4e9
	}
	if opt.Limit <= 0 {
		opt.Limit = 450 * time.Second
	}
	return nil
}

// Run measures. It removes its files before it returns.
func Run(ctx context.Context, j *job.Job, opt Options) (measure.Report, error) {
	if err := opt.checkOptions(); err != nil {
		return measure.Report{}, err
	}
	m, err := measure.Start(ctx, j, opt.Options)
	if err != nil {
		return measure.Report{}, err
	}
	defer m.Close()
	r := &run{Run: m, opt: opt, large: map[variant]float64{}}
	if opt.Device != "" {
		err := r.measureDevice()
		return r.Finish(), err
	}
	for _, g := range []struct {
		name string
		run  func() error
	}{
		{"floors", r.MeasureFloors}, {"codec", r.measureCodec}, {"load", r.measureLoads}, {"many", r.measureMany},
		{"net", r.measureNet},
	} {
		if g.name != "floors" && opt.What != "all" && opt.What != g.name {
			continue
		}
		if err := g.run(); err != nil {
			return r.Report, err
		}
		if g.name == "floors" && opt.Begin != nil {
			opt.Begin(&r.Report)
		}
	}
	return r.Finish(), nil
}

// atLeast and atMost report whether a goal is reached.
func atLeast(v, goal float64) *bool { ok := v >= goal; return &ok }
func atMost(v, goal float64) *bool  { ok := v <= goal; return &ok }
