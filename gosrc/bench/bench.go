// Package bench measures what users want to know about a machine: compression ratios, and how fast weights are saved
// and loaded, to the host or to a GPU. In the same run it measures the limits of memory, files and the PCIe link.
//
// Every load goes through the engine, from the page cache into newly allocated memory. Bytes are compared before any
// time is measured. GB/s are 10^9 bytes of tensors, not of files, per second.
package bench

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"
	"time"
	"unsafe"

	"github.com/overwire/overwire/gosrc/device/cpu"
	"github.com/overwire/overwire/gosrc/device/cuda"
	"github.com/overwire/overwire/gosrc/device/cuda/driver"
	"github.com/overwire/overwire/gosrc/device/cuda/queue"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/format"
	"github.com/overwire/overwire/gosrc/job"
	"github.com/overwire/overwire/gosrc/load"
	"github.com/overwire/overwire/gosrc/save"
)

// Options select what is measured. The zero value measures loads to the host with 2 GB of generated weights.
type Options struct {
	Device  string        // device of the loads: "cuda", "cuda:1" or "cpu"; "" means "cpu"
	File    string        // file with the user's weights, to also measure their ratio; "" means none
	Size    int64         // tensor bytes of the loads
	Repeat  int           // runs of each measurement; 0 means 5
	Threads int           // 0 means all cores
	Dir     string        // parent of the run's folder; "" means the system's temporary folder
	Storage format.Access // access to the user's files

	// Begin, if not nil, is called with the report when its head is complete. Row, if not nil, is called with
	// each measured row.
	Begin func(*Report)
	Row   func(Row)
}

// kinds are the kinds of weights for the measurement of ratios.
var kinds = []struct{ kind, name string }{
	{"llama-bf16", "bf16 weights"},
	{"fp16", "fp16 weights"},
	{"fp32", "fp32 weights"},
	{"fp8-e4m3", "fp8 weights (e4m3)"},
	{"int8", "int8 weights"},
}

// sampleBytes is the size of the weights for the measurement of ratios.
const sampleBytes = 64 << 20

type run struct {
	Options // all defaults are filled in
	timer
	job    *job.Job // may be nil
	folder string   // contains only the files of this run
	report Report
	gpu    *cuda.Device // nil for loads to the host
	// Rates in GB/s: copies to the GPU, and reading the page cache plus copying to the GPU.
	wire, baseline float64
}

// Run runs all measurements. It removes its files before it returns. Errors are those of the
// measured operations, or errs.ErrIO if there is too little space in the folder.
func Run(ctx context.Context, j *job.Job, opt Options) (Report, error) {
	began := time.Now()
	if opt.Size <= 0 {
		opt.Size = 2e9
	}
	if opt.Repeat <= 0 {
		opt.Repeat = 5
	}
	if opt.Threads <= 0 {
		opt.Threads = runtime.GOMAXPROCS(0)
	}
	folder, err := os.MkdirTemp(opt.Dir, "overwire-bench-")
	if err != nil {
		return Report{}, errs.New(errs.ErrIO, "%v", err)
	}
	defer os.RemoveAll(folder)
	r := &run{Options: opt, timer: timer{ctx, opt.Repeat}, job: j, folder: folder}
	r.report.Machine = ThisMachine()
	for _, step := range []func() error{
		r.openDevice, r.estimateTime, r.measureMachine, r.measureSizes, r.measureLoads,
	} {
		if err := step(); err != nil {
			return r.report, err
		}
		if err := r.stopError(); err != nil {
			return r.report, err
		}
	}
	r.report.Seconds = time.Since(began).Seconds()
	return r.report, nil
}

// addRow adds a row to the report and calls Row with it.
func (r *run) addRow(row Row) {
	if row.Floor > 0 {
		row.Share = row.Value / row.Floor
	}
	r.report.Rows = append(r.report.Rows, row)
	if r.Row != nil {
		r.Row(row)
	}
}

func (r *run) pathOf(name string) string { return filepath.Join(r.folder, name) }

// floorBytes returns how much memory the measurements of the machine use.
func (r *run) floorBytes() int64 { return max(32<<20, min(512<<20, r.Size>>20<<20)) }

// bytesNeeded returns the maximum size of the run's files.
func (r *run) bytesNeeded() int64 { return 3*r.Size + r.floorBytes() + 64<<20 }

// openDevice opens the device and checks the space for files.
func (r *run) openDevice() (err error) {
	if r.Device != "" {
		if r.gpu, err = r.openGPU(r.Device); err != nil {
			return err
		}
	}
	if free := freeBytes(r.folder); free >= 0 && free < r.bytesNeeded() {
		return errs.New(errs.ErrIO, "%.1f GB are free in %s, but %.1f GB are needed: choose another folder or a "+
			"smaller size",
			float64(free)/1e9, filepath.Dir(r.folder), float64(r.bytesNeeded())/1e9)
	}
	return nil
}

// openGPU opens the device "cpu", "cuda" or "cuda:N" and records it in the report. It returns nil for the host.
func (r *run) openGPU(name string) (*cuda.Device, error) {
	d := &Device{Name: name, Files: fileSystemOf(r.folder)}
	r.report.Device = d
	kind, number, _ := strings.Cut(name, ":")
	index, err := 0, error(nil)
	if number != "" {
		index, err = strconv.Atoi(number)
	}
	switch {
	case err != nil || kind != "cpu" && kind != "cuda":
		return nil, errs.New(errs.ErrArgument, "device %q: expected \"cpu\", \"cuda\" or \"cuda:N\"", name)
	case kind == "cpu":
		return nil, nil
	}
	gpu, err := cuda.Open(index)
	if err != nil {
		return nil, err
	}
	d.Name = fmt.Sprintf("cuda:%d", index)
	d.Info, err = driver.Info()
	return gpu, err
}

// estimateTime predicts the duration of the run. It does each kind of work once at a small size, and scales the
// times to the whole run.
func (r *run) estimateTime() error {
	n := min(16<<20, r.Size)
	path := r.pathOf("estimate.safetensors")
	var in []save.Input
	var seconds [5]float64
	for i, step := range []func() error{
		func() (err error) { in, _, err = makeWeights("llama-bf16", n, 1, r.Threads); return err },
		func() error {
			_, err := save.Write(r.ctx, r.job, save.Spec{Path: path, Threads: r.Threads}, in)
			return err
		},
		func() error { _, err := r.measureRatio(path, in); return err },
		func() error { return compareLoaded(r.ctx, path, in) },
		func() error { return mapFresh(n, func(m []byte) error { touchPages(m); return nil }) },
	} {
		var err error
		if seconds[i], err = timeOf(step); err != nil {
			return err
		}
	}
	generation, plain, packing, loading, touching := seconds[0], seconds[1], seconds[2], seconds[3], seconds[4]
	times := func(bytes int64) float64 { return float64(bytes) / float64(n) }
	repeat := float64(r.Repeat)
	r.report.Estimate = 1 + times(r.floorBytes())*7*repeat*touching +
		float64(len(kinds))*times(min(sampleBytes, r.Size))*(generation+packing) +
		times(r.Size)*(generation+plain+2*packing+(2*repeat+4)*loading)
	if r.Begin != nil {
		r.Begin(&r.report)
	}
	return nil
}

// measureMachine measures memory, files and the PCIe link without overwire.
func (r *run) measureMachine() error {
	machine := limits{&r.timer, r.Threads, r.floorBytes(), r.pathOf("floor")}
	f, err := machine.measure()
	r.report.Floors = f
	if err != nil {
		return err
	}
	row := Row{Group: "this machine", Unit: "GB/s"}
	row.Name, row.Value, row.Note = "copy memory", f.CopyAll, fmt.Sprintf("one core %s", numberText(f.CopyOne))
	r.addRow(row)
	row.Name, row.Value, row.Note = "read the page cache into fresh memory", f.RawCopy, ""
	r.addRow(row)
	if r.gpu == nil {
		return nil
	}
	slots, err := r.gpu.Queue(queue.DefaultSlots, queue.DefaultSlotBytes)
	if err != nil {
		return err
	}
	defer func() { slots.Close(); _ = r.gpu.Trim() }()
	if r.wire, err = r.measureWire(slots, queue.DefaultSlotBytes); err != nil {
		return err
	}
	r.report.Device.Wire = r.wire
	row.Name, row.Value = "copy pinned memory to "+r.report.Device.Name, r.wire
	r.addRow(row)
	return nil
}

// measureWire returns the rate of copies from pinned memory to a queue's device, with n bytes per copy.
func (r *run) measureWire(queue *queue.Queue, n int64) (float64, error) {
	count := int(max(16<<20, min(r.Size, 4<<30)) / n)
	v, err := r.medianOf(func() (float64, error) {
		took, err := queue.MeasureLink(n, count)
		return took.Seconds(), err
	})
	if err != nil {
		return 0, err
	}
	return rateOf(n*int64(count), v), nil
}

// measureSizes measures compression ratios.
func (r *run) measureSizes() error {
	add := func(name string, in []save.Input) error {
		row, err := r.measureRatio(r.pathOf("sizes.safetensors"), in)
		if err != nil {
			return err
		}
		row.Group, row.Name = "size", name
		r.addRow(row)
		return r.stopError()
	}
	for _, k := range kinds {
		in, _, err := makeWeights(k.kind, min(sampleBytes, r.Size), 1, r.Threads)
		if err != nil {
			return err
		}
		if err := add(k.name, in); err != nil {
			return err
		}
	}
	if r.File == "" {
		return nil
	}
	in, err := readTensors(r.ctx, load.Spec{URIs: []string{r.File}, Storage: r.Storage})
	if err != nil {
		return err
	}
	return add(filepath.Base(r.File)+"'s weights", in)
}

// measureRatio saves tensors to a compressed file, loads it, compares every byte, and returns a row with the ratio and
// the field entropy. Tied tensors are stored once, but the entropy counts each of them.
func (r *run) measureRatio(path string, in []save.Input) (Row, error) {
	rep, err := save.Write(r.ctx, nil, save.Spec{Path: path, Compress: true, Threads: r.Threads}, in)
	if err != nil {
		return Row{}, err
	}
	if err := compareLoaded(r.ctx, path, in); err != nil {
		return Row{}, err
	}
	var entropy, total float64
	for _, t := range in {
		entropy += min(fieldEntropy(t.DType, t.Data), float64(len(t.Data)))
		total += float64(len(t.Data))
	}
	return Row{Value: rep.Ratio, Unit: "x", Floor: entropy / total, FloorName: "the entropy of the coded field"}, nil
}

// measureLoads measures saving and loading of a model, compressed and plain.
func (r *run) measureLoads() error {
	in, total, err := makeWeights("llama-bf16", r.Size, 2, r.Threads)
	if err != nil {
		return err
	}
	files := map[bool]string{false: r.pathOf("plain.safetensors"), true: r.pathOf("compressed.safetensors")}
	var speed [2]float64
	ratio := 1.0
	for i, compress := range []bool{false, true} {
		rep, err := save.Write(r.ctx, r.job, save.Spec{Path: files[compress], Compress: compress, Threads: r.Threads},
			in)
		if err != nil {
			return err
		}
		speed[i], ratio = rateOf(total, rep.Seconds), rep.Ratio
		if err := compareLoaded(r.ctx, files[compress], in); err != nil {
			return err
		}
	}
	r.addRow(Row{Group: "save", Name: fmt.Sprintf("compress and save %s of bf16", sizeText(total)),
		Value: speed[1], Unit: "GB/s", Floor: speed[0], FloorName: "saving uncompressed"})
	if err := r.saveInBackground(in, total); err != nil {
		return err
	}
	in = nil
	debug.FreeOSMemory() // leave the machine's memory to the loads
	if r.gpu != nil {
		defer func() { _ = r.gpu.Trim() }()
		if err := r.measureBaseline(files[false], total); err != nil {
			return err
		}
	}
	for _, x := range []struct {
		compress bool
		name     string
		ratio    float64
	}{{true, "compressed", ratio}, {false, "plain", 1}} {
		if err := r.measureLoad(files[x.compress], x.name, total, x.ratio); err != nil {
			return err
		}
	}
	return nil
}

// measureBaseline measures how fast a file's bytes can be copied from the page cache to GPU memory. It uses the best of
// several numbers of threads and slot sizes.
func (r *run) measureBaseline(path string, n int64) error {
	m, err := r.gpu.Alloc([]int64{n})
	if err != nil {
		return err
	}
	defer m[0].Release()
	for _, threads := range []int{8, 12} {
		for _, x := range []Reading{{Step: ReadStep, Each: SlotsEach}, {Step: 2 * ReadStep, Each: 2}} {
			x.Path, x.Hi, x.GPU, x.Threads = path, n, r.gpu.Index(), min(threads, r.Threads)
			x.To = uint64(uintptr(m[0].Ptr))
			rate, err := r.rateOfReading(x)
			if err != nil {
				return err
			}
			r.baseline = max(r.baseline, rate)
		}
	}
	r.report.Device.Baseline = r.baseline
	r.addRow(Row{Group: "this machine", Name: "read the page cache and copy it to " + r.report.Device.Name,
		Value: r.baseline, Unit: "GB/s"})
	return nil
}

// rateOfReading returns the median rate of a Reading to a GPU, with newly allocated slots.
func (r *run) rateOfReading(x Reading) (float64, error) {
	n := int64(x.Threads*x.Each) * x.Step
	p, length, err := cpu.Map(n)
	if err != nil {
		return 0, err
	}
	slots := unsafe.Slice((*byte)(p), n)
	touchPages(slots)
	if err := r.gpu.Register(slots); err != nil {
		cpu.Unmap(p, length)
		return 0, err
	}
	defer r.gpu.Unregister(slots, func() { cpu.Unmap(p, length) })
	x.Slots = uint64(uintptr(p))
	return r.medianRate(x.Hi-x.Lo, func() error { return x.Run(r.ctx) })
}

// saveInBackground measures the time until tensors may be modified during a background save.
func (r *run) saveInBackground(in []save.Input, total int64) error {
	path := r.pathOf("background.safetensors")
	spec := save.Spec{Path: path, Compress: true, Threads: r.Threads, Staging: &save.Staging{}}
	rep, err := save.Write(r.ctx, r.job, spec, in)
	if err != nil {
		return err
	}
	r.addRow(Row{Group: "save", Name: "in the background, until the tensors may change",
		Value: rateOf(total, rep.Staged), Unit: "GB/s",
		Floor: rateOf(total, rep.Seconds), FloorName: "until the file is complete"})
	if err := compareLoaded(r.ctx, path, in); err != nil {
		return err
	}
	return errs.FromOS(os.Remove(path))
}

// measureLoad measures the first load of a file, which also prepares state that later loads reuse, and the
// median of later loads.
func (r *run) measureLoad(path, name string, total int64, ratio float64) error {
	opt := load.Options{Device: r.Device, Threads: r.Threads}
	once := func() error { return loadFile(r.ctx, load.Spec{URIs: []string{path}}, opt, nil) }
	first, err := timeOf(once)
	if err != nil {
		return err
	}
	seconds, err := r.medianTime(once)
	if err != nil {
		return err
	}
	row := Row{Group: "load", Name: fmt.Sprintf("load %s of %s bf16", sizeText(total), name),
		Value: rateOf(total, seconds), Unit: "GB/s",
		Floor: r.report.Floors.RawCopy, FloorName: "reading as many bytes from the page cache",
		Note: fmt.Sprintf("first load at %s", numberText(rateOf(total, first)))}
	if r.gpu != nil {
		row.Floor, row.FloorName = r.baseline/ratio, "reading and copying as many bytes"
	}
	r.addRow(row)
	return nil
}

// sizeText formats a size in GB, or in MB below one GB.
func sizeText(n int64) string {
	if n < 1e9 {
		return fmt.Sprintf("%.0f MB", float64(n)/1e6)
	}
	return fmt.Sprintf("%.1f GB", float64(n)/1e9)
}

// WriteHead prints the machine, the GPUs, and the expected duration.
func WriteHead(w io.Writer, rep *Report) {
	m := rep.Machine
	fmt.Fprintf(w, "%s, %d cores, %s/%s, decoder %s\n", m.CPU, m.Cores, m.OS, m.Arch, m.Decoder)
	if rep.Device != nil {
		for _, g := range rep.Device.Info {
			fmt.Fprintf(w, "cuda:%d is %s, PCIe %d x%d\n", g.Index, g.Name, g.LinkGen, g.LinkWidth)
		}
	}
	fmt.Fprintf(w, "this takes about %.0f s\n", max(1, rep.Estimate))
}

// WriteRow prints one row: the operation, the result, and the limit.
func WriteRow(w io.Writer, row Row) {
	value := numberText(row.Value)
	switch {
	case row.Unit == "x":
		fmt.Fprintf(w, "  %s: %.3f of their size; %s: %.3f\n", row.Name, row.Value, row.FloorName, row.Floor)
		return
	case row.Floor > 0:
		value = fmt.Sprintf("%s %s, %.2f of %s", value, row.Unit, row.Share, row.FloorName)
	default:
		value += " " + row.Unit
	}
	if row.Note != "" {
		value += " (" + row.Note + ")"
	}
	fmt.Fprintf(w, "  %s: %s\n", row.Name, value)
}
