package main

// This file measures loads to a device, in parts.

import (
	"errors"
	"fmt"
	"hash/crc32"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"
	"time"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/measure"
	"github.com/overwire/overwire/gosrc/save"
)

// Parts are the values of Options.Only, in the order in which they are measured.
var Parts = []string{"floors", "kernel", "bf16", "net", "many", "kinds"}

// measureDevice measures loads to a device. The parts are independent: one that fails
// leaves a row that says so, and the others are measured; the first failure is
// returned at the end.
func (r *run) measureDevice() (err error) {
	if r.gpu, err = r.OpenDevice(r.opt.Device); err != nil {
		return err
	}
	r.opt.Device = r.Report.Device.Name
	if r.gpu != nil {
		defer func() { _ = r.gpu.Trim() }()
	}
	r.touchAhead()
	if err := r.MeasureFloors(); err != nil {
		return err
	}
	if r.Begin != nil {
		r.Begin(&r.Report)
	}
	r.runPart("floors", "floors of the device", r.deviceFloors)
	r.runPart("kernel", "the decoder alone", r.measureKernels)
	if r.isWanted("bf16") || r.isWanted("net") {
		r.runStep("bf16", "making the model", func() error {
			return r.withModel("bf16", "llama-bf16", r.Size, r.measureLargeModel)
		})
	}
	r.runPart("many", "making the model", func() error {
		return r.withModel("many", "moe-bf16", r.Size/100*77, r.measureManySmall)
	})
	for _, kind := range []string{"fp16", "fp32", "fp8-e4m3"} {
		r.runPart("kinds", "making the "+kind+" model", func() error {
			return r.withModel("kinds", kind, r.Size/4, func(m *model) { r.measureVariants("kinds", m, packed) })
		})
	}
	if err := r.Stopped(); err != nil {
		return err
	}
	if len(r.Report.Failures) > 0 {
		return errs.New(errs.ErrEngine, "%d steps failed, the first: %s", len(r.Report.Failures), r.Report.Failures[0])
	}
	return nil
}

func (r *run) isWanted(part string) bool {
	return len(r.opt.Only) == 0 || slices.Contains(r.opt.Only, part)
}

// runPart is step for a part that Options.Only may leave out. The floors of the device
// are never left out, since the others are compared with them.
func (r *run) runPart(part, name string, fn func() error) {
	if part == "floors" || r.isWanted(part) {
		r.runStep(part, name, fn)
	}
}

// runStep runs fn, unless the run was stopped or its time is up. An error becomes a
// row and a failure, and the run continues.
func (r *run) runStep(group, name string, fn func() error) {
	if r.Stopped() != nil {
		return
	}
	err := r.outOfTime()
	if err == nil {
		err = fn()
	}
	var lacking *lackingError
	switch {
	case err == nil || r.Stopped() != nil:
	case errors.As(err, &lacking):
		r.Missing(group, name, lacking.why)
	default:
		r.Report.Failures = append(r.Report.Failures, fmt.Sprintf("%s, %s: %v", group, name, err))
		r.Missing(group, name, "FAILED: "+errs.Message(err))
	}
}

// outOfTime is the reason why nothing more is started.
func (r *run) outOfTime() error {
	if err := r.Stopped(); err != nil {
		return err
	}
	if time.Since(r.Began) > r.opt.Limit && r.opt.Device != "" {
		return lackError("the %.0f s of this run were over", r.opt.Limit.Seconds())
	}
	return nil
}

// A lackingError says why something cannot be measured on this machine.
type lackingError struct{ why string }

func (e *lackingError) Error() string { return e.why }

func lackError(format string, args ...any) error { return &lackingError{fmt.Sprintf(format, args...)} }

// A model is one set of weights, plain and compressed.
type model struct {
	kind    string
	bytes   int64 // of tensors
	tensors int
	ratio   float64 // of the compressed files to those bytes
	files   map[variant][]string
	sums    map[string]uint32 // CRC-32 by tensor
}

// A variant is how a model is stored.
type variant string

const (
	packed variant = "compressed"
	plain  variant = "plain"
)

func (m *model) name(v variant) string {
	return fmt.Sprintf("%.1f GB %s, %s", float64(m.bytes)/1e9, m.kind, v)
}

// withModel makes weights, writes them in four shards or fewer, calls fn, and
// removes the files.
func (r *run) withModel(group, kind string, size int64, fn func(*model)) error {
	dir := r.Path(kind)
	defer os.RemoveAll(dir)
	if free := r.Free(); free >= 0 && free < 2*size+64<<20 {
		return lackError("%.1f GB are free in %s, and it takes %.1f", float64(free)/1e9, r.Folder, 2*float64(size)/1e9)
	}
	m, err := r.makeModel(dir, group, kind, size)
	if err != nil {
		return err
	}
	fn(m)
	return nil
}

func (r *run) makeModel(dir, group, kind string, size int64) (*model, error) {
	start := time.Now()
	in, total, err := r.Make(kind, size, 4)
	if err != nil {
		return nil, err
	}
	defer debug.FreeOSMemory() // after the weights are gone
	made := time.Since(start).Seconds()
	m := &model{kind: kind, bytes: total, tensors: len(in), files: map[variant][]string{},
		sums: map[string]uint32{}}
	for _, t := range in {
		m.sums[t.Name] = crc32.ChecksumIEEE(t.Data)
	}
	var stored int64
	note := fmt.Sprintf("made at %.1f GB/s", measure.Rate(m.bytes, made))
	for _, v := range []variant{plain, packed} {
		if err := r.Stopped(); err != nil {
			return nil, err
		}
		folder := filepath.Join(dir, string(v))
		if err := os.MkdirAll(folder, 0o700); err != nil {
			return nil, errs.New(errs.ErrIO, "%v", err)
		}
		rep, err := save.Write(r.Ctx, nil, save.Spec{Path: filepath.Join(folder, "model.safetensors"),
			Compress: v == packed,
			Threads:  r.Threads, Shard: m.bytes/4 + m.bytes/32 + 1}, in)
		if err != nil {
			return nil, err
		}
		note += fmt.Sprintf(", written %s at %.1f GB/s", v, measure.Rate(m.bytes, rep.Seconds))
		for _, f := range rep.Files {
			if strings.HasSuffix(f, ".safetensors") {
				m.files[v] = append(m.files[v], f)
			}
		}
		if v == packed {
			stored = rep.BytesOut
		}
	}
	m.ratio = float64(stored) / float64(m.bytes)
	r.Add(measure.Row{Group: group, Name: fmt.Sprintf("%.1f GB %s, %d tensors in %d files: stored / original",
		float64(m.bytes)/1e9, kind, m.tensors, len(m.files[packed])),
		Value: m.ratio, Unit: "x", Note: note})
	return m, nil
}
