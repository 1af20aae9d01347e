package main

// This file measures loads from the page cache, and the cost of a tensor.

import (
	"fmt"

	"github.com/overwire/overwire/gosrc/load"
	"github.com/overwire/overwire/gosrc/measure"
	"github.com/overwire/overwire/gosrc/save"
	"github.com/overwire/overwire/gosrc/tensor"
)

// writeSame writes a file, loads it back and compares every byte.
func (r *run) writeSame(path string, compress bool, in []save.Input) (save.Report, error) {
	rep, err := save.Write(r.Ctx, r.Job, save.Spec{Path: path, Compress: compress, Threads: r.Threads}, in)
	if err != nil {
		return rep, err
	}
	return rep, r.Same(path, in)
}

// measureLoads measures a save, and whole loads from the page cache.
func (r *run) measureLoads() error {
	in, total, err := r.Make("llama-bf16", r.Size, 2)
	if err != nil {
		return err
	}
	plain, err := r.writeSame(r.Path("plain.safetensors"), false, in)
	if err != nil {
		return err
	}
	path := r.Path("big.safetensors")
	rep, err := r.writeSame(path, true, in)
	if err != nil {
		return err
	}
	in = nil
	r.Add(measure.Row{Group: "load", Name: "compress and save, all cores, with fsync",
		Value: measure.Rate(total, rep.Seconds), Unit: "GB/s",
		Floor: measure.Rate(total, plain.Seconds), FloorName: "the same, plain",
		Note: fmt.Sprintf("one run; ratio %.4f", rep.Ratio)})
	on, off, err := r.alternateChecks(func(noCheck bool) error {
		return r.Loaded(path, load.Options{Threads: r.Threads, NoCheck: noCheck}, nil)
	})
	if err != nil {
		return err
	}
	r.Add(measure.Row{Group: "load", Name: fmt.Sprintf("load %.1f GB compressed bf16, all cores", float64(total)/1e9),
		Value: measure.Rate(total, on), Unit: "GB/s",
		Floor: r.Report.Floors.RawCopy, FloorName: "pread to fresh memory"})
	cost := 100 * (on/off - 1)
	r.Add(measure.Row{Group: "load", Name: "cost of the checksums", Value: cost, Unit: "%",
		Goal: "<= 3 %", Reached: atMost(cost, 3)})
	one, err := r.Speed(total, func() error { return r.Loaded(path, load.Options{Threads: 1}, nil) })
	if err != nil {
		return err
	}
	r.Add(measure.Row{Group: "load", Name: "the same on one core", Value: one, Unit: "GB/s",
		Floor: r.Report.Floors.CopyOne, FloorName: "memcpy one core"})
	if r.opt.Trace == "" {
		return nil
	}
	return r.Loaded(path, load.Options{Threads: r.Threads, Trace: r.opt.Trace}, nil)
}

// alternateChecks returns the median seconds of loads with and without checksums, which
// alternate, so that a drifting machine does not choose for us. A first pair only warms up.
func (r *run) alternateChecks(load func(noCheck bool) error) (on, off float64, err error) {
	var seconds [2][]float64
	for n := range r.Repeat + 1 {
		for i, noCheck := range []bool{false, true} {
			if err := r.outOfTime(); err != nil {
				return 0, 0, err
			}
			s, err := measure.Timed(func() error { return load(noCheck) })
			if err != nil {
				return 0, 0, err
			}
			if n > 0 {
				seconds[i] = append(seconds[i], s)
			}
		}
	}
	return measure.Middle(seconds[0]), measure.Middle(seconds[1]), nil
}

// measureMany measures the cost of a tensor beside its bytes: a model of 18,867 small
// tensors against the same bytes in one tensor.
func (r *run) measureMany() error {
	in, _, err := r.Make("moe-bf16", min(r.Size, 128<<20), 3)
	if err != nil {
		return err
	}
	var joined []byte
	for _, t := range in {
		joined = append(joined, t.Data...)
	}
	one := []save.Input{{Name: "all", DType: tensor.BF16, Shape: []int64{int64(len(joined) / 2)}, Data: joined}}
	path := r.Path("many.safetensors")
	for _, compress := range []bool{true, false} {
		var seconds [2]float64
		for i, in := range [][]save.Input{in, one} {
			if _, err := r.writeSame(path, compress, in); err != nil {
				return err
			}
			if seconds[i], err = r.Median(func() error {
				return r.Loaded(path, load.Options{Threads: r.Threads}, nil)
			}); err != nil {
				return err
			}
		}
		what := map[bool]string{true: "compressed", false: "plain, not mapped"}[compress]
		r.Add(measure.Row{Group: "many", Name: fmt.Sprintf("%d tensors, %s: each beside its bytes", len(in), what),
			Value: 1e6 * (seconds[0] - seconds[1]) / float64(len(in)), Unit: "us"})
	}
	return nil
}
