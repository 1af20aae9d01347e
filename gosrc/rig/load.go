package main

// This file measures loads from the page cache, and the cost of a tensor.

import (
	"encoding/json"
	"fmt"
	"hash/crc32"
	"os"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/load"
	"github.com/overwire/overwire/gosrc/measure"
	"github.com/overwire/overwire/gosrc/save"
	"github.com/overwire/overwire/gosrc/tensor"
)

const (
	bigPlain      = "big-plain.safetensors"
	bigCompressed = "big.safetensors"
	bigSums       = "big-sums.json"
)

// makeBig writes the model of the load rows, plain and compressed, and its
// tensors' checksums for other processes to compare.
func (r *run) makeBig() (int64, error) {
	in, total, err := r.Make("llama-bf16", r.Size, 2)
	if err != nil {
		return 0, err
	}
	write := func(name string, compress bool) (save.Report, error) {
		return save.Write(r.Ctx, r.Job, save.Spec{Path: r.Path(name), Compress: compress, Threads: r.Threads}, in)
	}
	plain, err := write(bigPlain, false)
	if err != nil {
		return 0, err
	}
	rep, err := write(bigCompressed, true)
	if err != nil {
		return 0, err
	}
	r.Add(measure.Row{Group: "load", Name: "compress and save, all cores, with fsync",
		Value: measure.Rate(total, rep.Seconds), Unit: "GB/s",
		Floor: measure.Rate(total, plain.Seconds), FloorName: "the same, plain",
		Note: fmt.Sprintf("one run; ratio %.4f", rep.Ratio)})
	if err := r.Same(r.Path(bigCompressed), in); err != nil {
		return 0, err
	}
	return total, r.writeSums(bigSums, in)
}

// writeSums writes the CRC-32 (zlib's, which Python has) of every tensor.
func (r *run) writeSums(name string, in []save.Input) error {
	sums := map[string]uint32{}
	for _, t := range in {
		sums[t.Name] = crc32.ChecksumIEEE(t.Data)
	}
	b, err := json.Marshal(sums)
	if err == nil {
		err = os.WriteFile(r.Path(name), b, 0o600)
	}
	if err != nil {
		return errs.New(errs.ErrIO, "%v", err)
	}
	return nil
}

// measureLoads measures whole loads from the page cache.
func (r *run) measureLoads() error {
	total, err := r.makeBig()
	if err != nil {
		return err
	}
	gb := float64(total) / 1e9
	rates := map[bool]float64{}
	// On and off alternating, so that a drifting machine does not choose for us.
	var on, off []float64
	for range r.Repeat {
		for _, noCheck := range []bool{false, true} {
			if err := r.Stopped(); err != nil {
				return err
			}
			s, err := measure.Timed(func() error {
				return r.Loaded(r.Path(bigCompressed), load.Options{Threads: r.Threads, NoCheck: noCheck}, nil)
			})
			if err != nil {
				return err
			}
			if noCheck {
				off = append(off, s)
			} else {
				on = append(on, s)
			}
		}
	}
	rates[true], rates[false] = measure.Rate(total, measure.Middle(on)), measure.Rate(total, measure.Middle(off))
	r.Add(measure.Row{Group: "load", Name: fmt.Sprintf("load %.1f GB compressed bf16, all cores, Go alone", gb),
		Value: rates[true], Unit: "GB/s",
		Floor: r.Report.Floors.RawCopy, FloorName: "pread to fresh memory"})
	r.Add(measure.Row{Group: "load", Name: "cost of the checksums",
		Value: 100 * (measure.Middle(on)/measure.Middle(off) - 1), Unit: "%",
		Goal: "<= 3 %", Reached: atMost(100*(measure.Middle(on)/measure.Middle(off)-1), 3)})
	one, err := r.Speed(total, func() error { return r.Loaded(r.Path(bigCompressed), load.Options{Threads: 1}, nil) })
	if err != nil {
		return err
	}
	r.Add(measure.Row{Group: "load", Name: "the same on one core", Value: one, Unit: "GB/s",
		Floor: r.Report.Floors.CopyOne, FloorName: "memcpy one core"})
	if r.opt.Trace != "" {
		if err := r.Loaded(r.Path(bigCompressed), load.Options{Threads: r.Threads, Trace: r.opt.Trace},
			nil); err != nil {
			return err
		}
	}
	if err := r.pythonLoad(total, gb); err != nil {
		return err
	}
	return r.pythonPlain(total, gb)
}

const (
	manyFile = "many.safetensors"
	oneFile  = "one.safetensors"
	manySums = "many-sums.json"

	manyPlain = "many-plain.safetensors"
	onePlain  = "one-plain.safetensors"
)

// many measures the cost of a tensor beside its bytes: a model of 18,867 small
// tensors against the same bytes in one tensor.
func (r *run) many() error {
	in, _, err := r.Make("moe-bf16", min(r.Size, 128<<20), 3)
	if err != nil {
		return err
	}
	var joined []byte
	for _, t := range in {
		joined = append(joined, t.Data...)
	}
	one := []save.Input{{Name: "all", DType: tensor.BF16, Shape: []int64{int64(len(joined) / 2)}, Data: joined}}
	for _, w := range []struct {
		name     string
		in       []save.Input
		compress bool
	}{{manyFile, in, true}, {oneFile, one, true}, {manyPlain, in, false}, {onePlain, one, false}} {
		spec := save.Spec{Path: r.Path(w.name), Compress: w.compress, Threads: r.Threads}
		if _, err := save.Write(r.Ctx, nil, spec, w.in); err != nil {
			return err
		}
		if err := r.Same(r.Path(w.name), w.in); err != nil {
			return err
		}
	}
	if err := r.writeSums(manySums, in); err != nil {
		return err
	}
	for _, c := range []struct{ what, many, one string }{{"compressed", manyFile, oneFile},
		{"plain, not mapped", manyPlain, onePlain}} {
		var seconds [2]float64
		for i, name := range []string{c.many, c.one} {
			if seconds[i], err = r.Median(func() error {
				return r.Loaded(r.Path(name), load.Options{Threads: r.Threads},
					nil)
			}); err != nil {
				return err
			}
		}
		r.Add(measure.Row{Group: "many", Name: fmt.Sprintf("%d tensors, %s: each beside its bytes, Go alone", len(in),
			c.what),
			Value: 1e6 * (seconds[0] - seconds[1]) / float64(len(in)), Unit: "us"})
	}
	if err := r.measureHeaders(); err != nil {
		return err
	}
	return r.pythonMany(len(in))
}
