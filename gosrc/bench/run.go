package bench

// This file defines the report of a run and its rows, and computes medians.

import (
	"context"
	"fmt"
	"runtime"
	"slices"
	"time"

	"github.com/overwire/overwire/gosrc/codec/x16"
	"github.com/overwire/overwire/gosrc/errs"
)

// A Row is one measured figure.
type Row struct {
	Group string  `json:"group"`
	Name  string  `json:"name"`
	Value float64 `json:"value"`
	Unit  string  `json:"unit"`
	// Floor is the rate of the operation without overwire, in the same unit, and Share is Value /
	// Floor. Both are zero if there is no such operation.
	Floor     float64 `json:"floor,omitempty"`
	FloorName string  `json:"floor_name,omitempty"`
	Share     float64 `json:"share,omitempty"`
	Note      string  `json:"note,omitempty"`
}

// A Report is the result of a run.
type Report struct {
	Machine Machine `json:"machine"`
	Floors  Floors  `json:"floors"`
	// Estimate is the expected duration of the run in seconds. 0 means that there is no estimate.
	Estimate float64 `json:"estimate,omitempty"`
	Rows     []Row   `json:"rows"`
	Seconds  float64 `json:"seconds"`
	// Device is the device of the measured loads, or nil for the host.
	Device *Device `json:"device,omitempty"`
}

// Machine describes the machine on which the figures were measured.
type Machine struct {
	OS      string `json:"os"`
	Arch    string `json:"arch"`
	CPU     string `json:"cpu"`
	Cores   int    `json:"cores"`
	Decoder string `json:"decoder"` // the fastest decoder that this CPU supports
	THP     string `json:"transparent_huge_pages"`
	Go      string `json:"go"`
}

// ThisMachine describes this machine.
func ThisMachine() Machine {
	return Machine{
		OS: runtime.GOOS, Arch: runtime.GOARCH, CPU: cpuName(), Cores: runtime.GOMAXPROCS(0),
		Decoder: x16.Using().String(), THP: hugePagesSetting(), Go: runtime.Version(),
	}
}

// A timer repeats measurements until its context is cancelled.
type timer struct {
	ctx    context.Context
	repeat int // runs of each measurement
}

// stopError returns the error of a cancelled run, or nil.
func (t *timer) stopError() error {
	if t.ctx.Err() != nil {
		return errs.New(errs.ErrCancelled, "by the caller")
	}
	return nil
}

// medianTime calls fn Repeat times and returns the median duration in seconds.
func (t *timer) medianTime(fn func() error) (float64, error) {
	return t.medianOf(func() (float64, error) { return timeOf(fn) })
}

// medianOf is like medianTime for functions that return a duration in seconds.
func (t *timer) medianOf(fn func() (float64, error)) (float64, error) {
	all := make([]float64, 0, t.repeat)
	for range t.repeat {
		if err := t.stopError(); err != nil {
			return 0, err
		}
		s, err := fn()
		if err != nil {
			return 0, err
		}
		all = append(all, s)
	}
	return middleOf(all), nil
}

// medianRate returns the median rate in GB/s of fn, which processes n bytes.
func (t *timer) medianRate(n int64, fn func() error) (float64, error) {
	s, err := t.medianTime(fn)
	if err != nil {
		return 0, err
	}
	return rateOf(n, s), nil
}

// middleOf returns the median.
func middleOf(all []float64) float64 {
	all = slices.Clone(all)
	slices.Sort(all)
	n := len(all)
	return (all[(n-1)/2] + all[n/2]) / 2
}

// rateOf returns a rate in GB/s.
func rateOf(bytes int64, seconds float64) float64 { return float64(bytes) / seconds / 1e9 }

// timeOf returns the seconds that fn took.
func timeOf(fn func() error) (float64, error) {
	start := time.Now()
	err := fn()
	return time.Since(start).Seconds(), err
}

// numberText formats three significant digits, or five for values below 1.01.
func numberText(v float64) string {
	switch {
	case v < 0, v >= 10:
		return fmt.Sprintf("%.1f", v)
	case v >= 1.01:
		return fmt.Sprintf("%.2f", v)
	}
	return fmt.Sprintf("%.4f", v)
}
