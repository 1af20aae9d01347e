package bench

// This file generates weights, loads files and compares them. It defines the report of a run and its rows, and computes
// medians and the field entropy, which is the size that X16 could reach without storing tables.

import (
	"bytes"
	"context"
	"fmt"
	"math"
	"math/bits"
	"runtime"
	"slices"
	"time"

	"github.com/overwire/overwire/gosrc/codec/x16"
	"github.com/overwire/overwire/gosrc/device/cuda/driver"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/regular"
	"github.com/overwire/overwire/gosrc/load"
	"github.com/overwire/overwire/gosrc/save"
	"github.com/overwire/overwire/gosrc/tensor"
	"github.com/overwire/overwire/gosrc/weights"
	"golang.org/x/sys/unix"
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

// fieldEntropy returns the minimum size of data with a coder like X16: the order-0 entropy of the coded field, with
// separate, free tables for every tensor, plus the other bits raw. Constant byte planes are free. For integers it is
// the minimum over the modes that docs/format.md allows. It is not a bound for other coders: a coder that also codes
// the other bits can need fewer bytes.
func fieldEntropy(d tensor.DType, data []byte) float64 {
	switch d {
	case tensor.BF16:
		return codedBytes(data, 2, 7, 8)
	case tensor.F16:
		return codedBytes(data, 2, 10, 5)
	case tensor.F32, tensor.C64:
		return codedBytes(data, 4, 23, 8)
	case tensor.F8E4M3, tensor.F8E4M3FNUZ:
		return codedBytes(data, 1, 3, 4)
	case tensor.F8E5M2, tensor.F8E5M2FNUZ:
		return codedBytes(data, 1, 2, 5)
	case tensor.I8, tensor.U8:
		return min(codedBytes(data, 1, 4, 4), nibbleBytes(data), fieldBytes(data, 1, 0, 8),
			fieldBytes(data, 1, 0, 4)+fieldBytes(data, 1, 4, 4))
	case tensor.F4:
		return nibbleBytes(data)
	case tensor.F8E8M0, tensor.Bool:
		return fieldBytes(data, 1, 0, 8)
	}
	return float64(len(data))
}

// codedBytes returns the size of elements of width bytes if bits lo..lo+n-1 are coded.
func codedBytes(data []byte, width int, lo, n uint) float64 {
	return fieldBytes(data, width, lo, n) + float64(len(data)/width)*planeBytes(data, width, ^(uint32(1<<n-1)<<lo))
}

// fieldBytes returns the entropy in bytes of bits lo..lo+n-1 over all elements.
func fieldBytes(data []byte, width int, lo, n uint) float64 {
	counts := make([]int64, 1<<n)
	mask := uint32(1<<n - 1)
	for i := 0; i+width <= len(data); i += width {
		counts[readElement(data[i:], width)>>lo&mask]++
	}
	return entropyBytes(counts)
}

func nibbleBytes(data []byte) float64 {
	counts := make([]int64, 16)
	for _, b := range data {
		counts[b&15]++
		counts[b>>4]++
	}
	return entropyBytes(counts)
}

// planeBytes returns the size in bytes of the bits in mask, per element. Byte planes that are constant in all
// elements are free, except in elements of one byte.
func planeBytes(data []byte, width int, mask uint32) float64 {
	var or, and uint32 = 0, math.MaxUint32
	for i := 0; i+width <= len(data); i += width {
		v := readElement(data[i:], width)
		or |= v
		and &= v
	}
	changing := (or &^ and) & mask
	n := 0
	for b := 0; b < width*8; b += 8 {
		if changing>>b&0xff != 0 || width == 1 {
			n += bits.OnesCount32(mask >> b & 0xff)
		}
	}
	return float64(n) / 8
}

func readElement(p []byte, width int) uint32 {
	switch width {
	case 1:
		return uint32(p[0])
	case 2:
		return uint32(p[0]) | uint32(p[1])<<8
	}
	return uint32(p[0]) | uint32(p[1])<<8 | uint32(p[2])<<16 | uint32(p[3])<<24
}

// entropyBytes returns the total entropy of the counted values in bytes.
func entropyBytes(counts []int64) float64 {
	var sum int64
	for _, c := range counts {
		sum += c
	}
	bits := 0.0
	for _, c := range counts {
		if c > 0 {
			bits -= float64(c) * math.Log2(float64(c)/float64(sum))
		}
	}
	return bits / 8
}

// Inputs converts generated weights to inputs of save, and returns their total bytes.
func Inputs(all []weights.Tensor) (in []save.Input, total int64) {
	in = make([]save.Input, len(all))
	for i, t := range all {
		in[i] = save.Input{Name: t.Name, DType: t.DType, Shape: t.Shape, Data: t.Data}
		total += int64(len(t.Data))
	}
	return in, total
}

// makeWeights generates weights as inputs of a save, and returns their total bytes.
func makeWeights(kind string, size int64, seed uint64, threads int) (in []save.Input, total int64, err error) {
	all, err := weights.Make(weights.Options{Kind: kind, Size: size, Seed: seed, Threads: threads})
	if err != nil {
		return nil, 0, err
	}
	in, total = Inputs(all)
	return in, total, nil
}

// loadFile loads a whole file into new memory on opt's device. It does not memory-map the file. It calls fn, if not
// nil, with each tensor's bytes, and frees the memory. fn must be nil for a GPU.
func loadFile(ctx context.Context, spec load.Spec, opt load.Options, fn func(*load.Model, [][]byte) error) error {
	isMapped := false
	spec.Map = &isMapped
	m, err := load.Open(ctx, spec)
	if err != nil {
		return err
	}
	defer m.Close()
	l, err := m.Start(nil, opt)
	if err != nil {
		return err
	}
	defer l.Close()
	if _, err := l.Job().Wait(-1); err != nil || fn == nil {
		return err
	}
	data := make([][]byte, l.Len())
	for i := range data {
		mem, _, _, ok := l.Take(i)
		if !ok {
			return errs.New(errs.ErrEngine, "%s: tensor %d has no memory", spec.URIs[0], i)
		}
		defer mem.Release()
		if mem.Bytes > 0 {
			data[i] = mem.Slice()
		}
	}
	return fn(m, data)
}

// compareLoaded loads a file and compares it with the saved tensors.
func compareLoaded(ctx context.Context, path string, in []save.Input) error {
	want := map[string]*save.Input{}
	for i := range in {
		want[in[i].Name] = &in[i]
	}
	return loadFile(ctx, load.Spec{URIs: []string{path}}, load.Options{}, func(m *load.Model, data [][]byte) error {
		if len(data) != len(in) {
			return errs.New(errs.ErrEngine, "%s: loaded %d of %d tensors", path, len(data), len(in))
		}
		for i, t := range m.Index().Tensors {
			if w := want[t.Name]; w == nil || w.DType != t.DType || !bytes.Equal(w.Data, data[i]) {
				return errs.New(errs.ErrEngine, "%s: loading tensor %q did not restore it bit for bit", path, t.Name)
			}
		}
		return nil
	})
}

// readTensors loads a file's tensors into Go memory.
func readTensors(ctx context.Context, spec load.Spec) (in []save.Input, err error) {
	err = loadFile(ctx, spec, load.Options{}, func(m *load.Model, data [][]byte) error {
		for i, t := range m.Index().Tensors {
			in = append(in, save.Input{Name: t.Name, DType: t.DType, Shape: t.Shape, Data: bytes.Clone(data[i])})
		}
		return nil
	})
	return in, err
}

// Device is the destination of the measured loads.
type Device struct {
	Name string              `json:"name"` // "cuda:0"
	Info []driver.DeviceInfo `json:"info,omitempty"`
	// Wire is the rate in GB/s of copies from pinned memory, with one slot per copy.
	Wire float64 `json:"wire,omitempty"`
	// Baseline is the best rate in GB/s of copying bytes from the page cache to the GPU without decoding.
	Baseline float64 `json:"baseline,omitempty"`
	Files    string  `json:"files"` // file system of the model files, such as "tmpfs" or "ext4"
}

// fileSystemOf returns the type of a folder's file system.
func fileSystemOf(dir string) string {
	fileSystem, err := regular.IdentifyFolder(dir)
	if err != nil {
		return "unknown"
	}
	return fileSystem.Name
}

// freeBytes returns how many bytes are free for a folder, or -1 if unknown.
func freeBytes(folder string) int64 {
	var disk unix.Statfs_t
	if err := unix.Statfs(folder, &disk); err != nil {
		return -1
	}
	return int64(disk.Bavail) * disk.Bsize
}
