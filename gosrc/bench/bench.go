// Package bench measures what overwire promises and prints each figure beside
// the floor that the same machine showed in the same run: what copying,
// reading or touching that memory costs without us.
//
// Bytes are compared before anything is timed. GB/s are 10^9 bytes of tensors,
// not of files. A figure is the median of several runs, of several fresh
// processes where a process has a part in it. Rows that lose are printed like
// rows that win, and rows that cannot be measured say why.
package bench

import (
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"time"

	"github.com/overwire/overwire/gosrc/codec/x16"
	"github.com/overwire/overwire/gosrc/device/cuda"
	"github.com/overwire/overwire/gosrc/fault"
	"github.com/overwire/overwire/gosrc/internal/atomicfile"
	"github.com/overwire/overwire/gosrc/job"
)

// Options choose what is measured. The zero value measures everything at the
// sizes of docs/benchmarks.md.
type Options struct {
	What    string // "codec", "load", "cold", "import", "many", "net", "tensors"; "" or "all": each
	Size    int64  // tensor bytes of the load rows; 0: 4 GB
	File    string // real F32 weights for the codec rows, "" for none
	Repeat  int    // runs of each measurement; 0: 5
	Dir     string // for files of up to twice Size; "": the system's temporary folder
	Python  string // interpreter with overwire in it; "": rows that need one are not measured
	Threads int    // 0: all cores
	// Device, if not "", asks for the rows of loads to that device ("cuda",
	// "cuda:1", "cpu") and for no others: those of Parts, or of all.
	Device string
	Only   []string
	// Limit ends them: what has not begun by then is not measured. 0: 450 s.
	Limit time.Duration
	Trace string // file that gets the Chrome trace of one load of compressed bf16
	// Out, if not "", is a file that gets the report as JSON, anew after every
	// row: nothing is lost if the run is cut off.
	Out string
	// Begin, if not nil, gets the report when its machine and floors are known,
	// and Row gets every row as soon as it is measured.
	Begin func(*Report)
	Row   func(Row)
}

// Whats are the values of Options.What.
var Whats = []string{"all", "codec", "load", "cold", "many", "net", "tensors", "import"}

// A Row is one line of the table.
type Row struct {
	Group string  `json:"group"`
	Name  string  `json:"name"`
	Value float64 `json:"value"`
	Unit  string  `json:"unit"`
	// Floor is what the machine gives without us, in the same unit, and Share
	// is Value / Floor. Zero when there is none.
	Floor     float64 `json:"floor,omitempty"`
	FloorName string  `json:"floor_name,omitempty"`
	Share     float64 `json:"share,omitempty"`
	// Runs is how many processes Value is the median of, Low and High their range.
	Runs int     `json:"runs,omitempty"`
	Low  float64 `json:"low,omitempty"`
	High float64 `json:"high,omitempty"`
	// Goal says what the project wants of this row; Reached is nil when it
	// wants nothing or nothing was measured.
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
	Rows    []Row   `json:"rows"`
	Seconds float64 `json:"seconds"`
	// Device is what Options.Device named, and Failures are the steps of its
	// rows that went wrong; the others were measured all the same.
	Device   *Device  `json:"device,omitempty"`
	Failures []string `json:"failures,omitempty"`
}

// Machine is what the figures were measured on.
type Machine struct {
	OS      string `json:"os"`
	Arch    string `json:"arch"`
	CPU     string `json:"cpu"`
	Cores   int    `json:"cores"`
	Decoder string `json:"decoder"` // the best that this CPU has
	THP     string `json:"transparent_huge_pages"`
	Go      string `json:"go"`
}

// ThisMachine describes the machine.
func ThisMachine() Machine {
	return Machine{
		OS: runtime.GOOS, Arch: runtime.GOARCH, CPU: cpuName(), Cores: runtime.GOMAXPROCS(0),
		Decoder: x16.Using().String(), THP: thp(), Go: runtime.Version(),
	}
}

// run is one run of the benchmark.
type run struct {
	began  time.Time
	ctx    context.Context
	job    *job.Job
	opt    Options
	dir    string
	report Report
	// Of the rows of a device: the GPU, nil for the host, the threads that
	// loads get (0: as many as they want), and rates by group and variant.
	gpu     *cuda.Device
	threads int
	rates   map[string]float64
	out     error // of writing Options.Out
}

// Run measures. Its files are gone when it returns.
func Run(ctx context.Context, j *job.Job, opt Options) (Report, error) {
	start := time.Now()
	if opt.What == "" {
		opt.What = "all"
	}
	if !slices.Contains(Whats, opt.What) {
		return Report{}, fault.New(fault.ErrArgument, "nothing to measure is called %q", opt.What)
	}
	if opt.Device != "" && opt.What != "all" {
		return Report{}, fault.New(fault.ErrArgument, "the rows of a device are measured by themselves, not with %q", opt.What)
	}
	for _, part := range opt.Only {
		if !slices.Contains(Parts, part) {
			return Report{}, fault.New(fault.ErrArgument, "no part is called %q", part)
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
	if opt.Repeat <= 0 {
		opt.Repeat = 5
	}
	threads := opt.Threads
	if opt.Threads <= 0 {
		opt.Threads = runtime.GOMAXPROCS(0)
	}
	dir, err := os.MkdirTemp(opt.Dir, "overwire-bench-")
	if err != nil {
		return Report{}, fault.New(fault.ErrIO, "%v", err)
	}
	defer os.RemoveAll(dir)
	r := &run{began: start, ctx: ctx, job: j, opt: opt, dir: dir, threads: threads, rates: map[string]float64{}}
	r.report.Machine = ThisMachine()
	if opt.Device != "" {
		err := r.device()
		r.report.Seconds = time.Since(start).Seconds()
		return r.report, err
	}
	for _, g := range []struct {
		name string
		run  func() error
	}{
		{"floors", r.floors}, {"codec", r.codec}, {"load", r.load}, {"cold", r.cold}, {"many", r.many}, {"net", r.net},
		{"tensors", r.tensors},
		{"import", r.imports},
	} {
		if g.name != "floors" && opt.What != "all" && opt.What != g.name || g.name == "floors" && opt.What == "import" {
			continue
		}
		if err := g.run(); err != nil {
			return r.report, err
		}
		if g.name == "floors" && opt.Begin != nil {
			opt.Begin(&r.report)
		}
	}
	r.report.Seconds = time.Since(start).Seconds()
	return r.report, nil
}

// add keeps a row and shows it.
func (r *run) add(row Row) {
	if row.Floor > 0 {
		row.Share = row.Value / row.Floor
	}
	r.report.Rows = append(r.report.Rows, row)
	r.report.Seconds = time.Since(r.began).Seconds()
	if r.opt.Row != nil {
		r.opt.Row(row)
	}
	if r.opt.Out != "" && r.out == nil {
		r.out = r.writeOut()
	}
}

// writeOut replaces the report's file. Its first error ends the run.
func (r *run) writeOut() error {
	b, err := json.MarshalIndent(r.report, "", "  ")
	if err == nil {
		err = atomicfile.Write(r.opt.Out, append(b, '\n'))
	}
	if err != nil {
		return fault.New(fault.ErrIO, "%v", err)
	}
	return nil
}

// missing adds a row that could not be measured.
func (r *run) missing(group, name, why string) { r.add(Row{Group: group, Name: name, Missing: why}) }

func (r *run) path(name string) string { return filepath.Join(r.dir, name) }

// stopped returns the error of a cancelled run.
func (r *run) stopped() error {
	if r.ctx.Err() != nil {
		return fault.New(fault.ErrCancelled, "bench")
	}
	return r.out
}

// median runs fn so many times and returns the median of its seconds.
func (r *run) median(fn func() error) (float64, error) {
	return r.medianOf(func() (float64, error) {
		start := time.Now()
		err := fn()
		return time.Since(start).Seconds(), err
	})
}

// medianOf is median for functions that know their time themselves.
func (r *run) medianOf(fn func() (float64, error)) (float64, error) {
	all := make([]float64, 0, r.opt.Repeat)
	for range r.opt.Repeat {
		if err := r.stopped(); err != nil {
			return 0, err
		}
		s, err := fn()
		if err != nil {
			return 0, err
		}
		all = append(all, s)
	}
	return middle(all), nil
}

func middle(all []float64) float64 {
	all = slices.Clone(all)
	slices.Sort(all)
	n := len(all)
	return (all[(n-1)/2] + all[n/2]) / 2
}

// atLeast and atMost say whether a goal is reached.
func atLeast(v, goal float64) *bool { ok := v >= goal; return &ok }
func atMost(v, goal float64) *bool  { ok := v <= goal; return &ok }

// rate is GB/s.
func rate(bytes int64, seconds float64) float64 { return float64(bytes) / seconds / 1e9 }

func timed(fn func() error) (float64, error) {
	start := time.Now()
	err := fn()
	return time.Since(start).Seconds(), err
}
