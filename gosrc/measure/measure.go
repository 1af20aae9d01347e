// Package measure is how figures are measured: a run with a folder of its own,
// floors of the same machine in the same run, medians, and rows that say what was
// measured.
//
// Measurements compare bytes before they time anything. GB/s are 10^9 bytes of
// tensors, not of files. Rows that lose are shown like rows that win, and rows that
// cannot be measured say why.
package measure

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"time"

	"github.com/overwire/overwire/gosrc/codec/x16"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/format"
	"github.com/overwire/overwire/gosrc/internal/atomicfile"
	"github.com/overwire/overwire/gosrc/job"
)

// Options are common to all measurements.
type Options struct {
	Size    int64         // tensor bytes of the load rows
	Repeat  int           // runs of each measurement; 0: 5
	Threads int           // 0: all cores
	Dir     string        // where the run makes its folder; "": the system's temporary folder
	Storage format.Access // how files that the user names are reached
	// Out, if not "", is a file that gets the report as JSON, rewritten after every
	// row, so that an interrupted run loses nothing.
	Out string
	// Begin, if not nil, is called with the report when its head is known, and Row
	// with every row as soon as it is measured.
	Begin func(*Report)
	Row   func(Row)
}

// A Row is one figure.
type Row struct {
	Group string  `json:"group"`
	Name  string  `json:"name"`
	Value float64 `json:"value"`
	Unit  string  `json:"unit"`
	// Floor is the rate of the bare operation, in the same unit, and Share is Value
	// / Floor. Zero when there is none.
	Floor     float64 `json:"floor,omitempty"`
	FloorName string  `json:"floor_name,omitempty"`
	Share     float64 `json:"share,omitempty"`
	// Goal is the project's goal for this row; Reached is nil if there is none or
	// nothing was measured. Only the rig sets them.
	Goal    string `json:"goal,omitempty"`
	Reached *bool  `json:"reached,omitempty"`
	Note    string `json:"note,omitempty"`
	// Missing is why the row was not measured.
	Missing string `json:"missing,omitempty"`
}

// A Report is a whole run.
type Report struct {
	Machine Machine `json:"machine"`
	Floors  Floors  `json:"floors"`
	// Estimate is how many seconds the run was expected to take; 0: not estimated.
	Estimate float64 `json:"estimate,omitempty"`
	Rows     []Row   `json:"rows"`
	Seconds  float64 `json:"seconds"`
	// Device is the device of the load rows, nil for the host. Failures are the
	// steps that failed while the others were measured.
	Device   *Device  `json:"device,omitempty"`
	Failures []string `json:"failures,omitempty"`
}

// Machine is what the figures were measured on.
type Machine struct {
	OS      string `json:"os"`
	Arch    string `json:"arch"`
	CPU     string `json:"cpu"`
	Cores   int    `json:"cores"`
	Decoder string `json:"decoder"` // the best decoder of this CPU
	THP     string `json:"transparent_huge_pages"`
	Go      string `json:"go"`
}

// ThisMachine describes the machine.
func ThisMachine() Machine {
	return Machine{
		OS: runtime.GOOS, Arch: runtime.GOARCH, CPU: cpuName(), Cores: runtime.GOMAXPROCS(0),
		Decoder: x16.Using().String(), THP: hugePagesSetting(), Go: runtime.Version(),
	}
}

// A Run is one run: its options with all defaults filled in, its folder, its
// report.
type Run struct {
	Options
	Ctx    context.Context
	Job    *job.Job // may be nil
	Folder string   // contains only the files of this run
	Began  time.Time
	Report Report
	out    error // of writing Options.Out
}

// Start begins a run. Close it.
func Start(ctx context.Context, j *job.Job, opt Options) (*Run, error) {
	if opt.Repeat <= 0 {
		opt.Repeat = 5
	}
	if opt.Threads <= 0 {
		opt.Threads = runtime.GOMAXPROCS(0)
	}
	folder, err := os.MkdirTemp(opt.Dir, "overwire-bench-")
	if err != nil {
		return nil, errs.New(errs.ErrIO, "%v", err)
	}
	return &Run{Options: opt, Ctx: ctx, Job: j, Folder: folder, Began: time.Now(),
		Report: Report{Machine: ThisMachine()}}, nil
}

// Close removes the run's files.
func (r *Run) Close() { os.RemoveAll(r.Folder) }

// Finish returns the report of a run that is complete.
func (r *Run) Finish() Report {
	r.Report.Seconds = time.Since(r.Began).Seconds()
	return r.Report
}

// Add keeps a row and shows it.
func (r *Run) Add(row Row) {
	if row.Floor > 0 {
		row.Share = row.Value / row.Floor
	}
	r.Report.Rows = append(r.Report.Rows, row)
	r.Report.Seconds = time.Since(r.Began).Seconds()
	if r.Row != nil {
		r.Row(row)
	}
	if r.Out != "" && r.out == nil {
		r.out = r.writeOut()
	}
}

// writeOut replaces the report's file. Its first error ends the run.
func (r *Run) writeOut() error {
	b, err := json.MarshalIndent(r.Report, "", "  ")
	if err == nil {
		err = atomicfile.Write(r.Ctx, r.Out, append(b, '\n'))
	}
	if err != nil {
		return errs.New(errs.ErrIO, "%v", err)
	}
	return nil
}

// Missing adds a row that could not be measured.
func (r *Run) Missing(group, name, why string) { r.Add(Row{Group: group, Name: name, Missing: why}) }

// Path is a file of this run.
func (r *Run) Path(name string) string { return filepath.Join(r.Folder, name) }

// Stopped returns the error of a cancelled run, or that of writing its report.
func (r *Run) Stopped() error {
	if r.Ctx.Err() != nil {
		return errs.New(errs.ErrCancelled, "bench")
	}
	return r.out
}

// Median runs fn Repeat times and returns the median of its seconds.
func (r *Run) Median(fn func() error) (float64, error) {
	return r.MedianOf(func() (float64, error) { return Timed(fn) })
}

// MedianOf is Median for functions that return their own seconds.
func (r *Run) MedianOf(fn func() (float64, error)) (float64, error) {
	all := make([]float64, 0, r.Repeat)
	for range r.Repeat {
		if err := r.Stopped(); err != nil {
			return 0, err
		}
		s, err := fn()
		if err != nil {
			return 0, err
		}
		all = append(all, s)
	}
	return Middle(all), nil
}

// Speed is the median GB/s of fn over n bytes.
func (r *Run) Speed(n int64, fn func() error) (float64, error) {
	s, err := r.Median(fn)
	if err != nil {
		return 0, err
	}
	return Rate(n, s), nil
}

// Middle is the median.
func Middle(all []float64) float64 {
	all = slices.Clone(all)
	slices.Sort(all)
	n := len(all)
	return (all[(n-1)/2] + all[n/2]) / 2
}

// Rate is GB/s.
func Rate(bytes int64, seconds float64) float64 { return float64(bytes) / seconds / 1e9 }

// Timed returns the seconds that fn took.
func Timed(fn func() error) (float64, error) {
	start := time.Now()
	err := fn()
	return time.Since(start).Seconds(), err
}

// Number shows three significant digits, ratios four.
func Number(v float64) string {
	switch {
	case v < 0, v >= 10:
		return fmt.Sprintf("%.1f", v)
	case v >= 1.01:
		return fmt.Sprintf("%.2f", v)
	}
	return fmt.Sprintf("%.4f", v)
}
