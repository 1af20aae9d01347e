package bench

// This file generates weights, loads files and compares them, and opens devices.

import (
	"bytes"
	"fmt"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/overwire/overwire/gosrc/device/cuda"
	"github.com/overwire/overwire/gosrc/device/cuda/driver"
	"github.com/overwire/overwire/gosrc/device/cuda/queue"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/regular"
	"github.com/overwire/overwire/gosrc/load"
	"github.com/overwire/overwire/gosrc/save"
	"github.com/overwire/overwire/gosrc/weights"
)

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
func (r *run) makeWeights(kind string, size int64, seed uint64) (in []save.Input, total int64, err error) {
	all, err := weights.Make(weights.Options{Kind: kind, Size: size, Seed: seed, Threads: r.Threads})
	if err != nil {
		return nil, 0, err
	}
	in, total = Inputs(all)
	return in, total, nil
}

// loadFile loads a whole file into new memory on opt's device. It does not memory-map the file. It calls fn, if not
// nil, with each tensor's bytes, and frees the memory. fn must be nil for a GPU.
func (r *run) loadFile(path string, opt load.Options, fn func(*load.Model, [][]byte) error) error {
	isMapped := false
	m, err := load.Open(r.ctx, load.Spec{URIs: []string{path}, Map: &isMapped, Storage: r.Storage})
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
			return errs.New(errs.ErrEngine, "%s: tensor %d has no memory", path, i)
		}
		defer mem.Release()
		if mem.Bytes > 0 {
			data[i] = mem.Slice()
		}
	}
	return fn(m, data)
}

// compareLoaded loads a file and compares it with the saved tensors.
func (r *run) compareLoaded(path string, in []save.Input) error {
	want := map[string]*save.Input{}
	for i := range in {
		want[in[i].Name] = &in[i]
	}
	return r.loadFile(path, load.Options{}, func(m *load.Model, data [][]byte) error {
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
func (r *run) readTensors(path string) (in []save.Input, err error) {
	err = r.loadFile(path, load.Options{}, func(m *load.Model, data [][]byte) error {
		for i, t := range m.Index().Tensors {
			in = append(in, save.Input{Name: t.Name, DType: t.DType, Shape: t.Shape, Data: bytes.Clone(data[i])})
		}
		return nil
	})
	return in, err
}

// measureRatio saves tensors to a compressed file, loads it, compares every byte, and returns a row with the ratio and
// the field entropy. Tied tensors are stored once, but the entropy counts each of them.
func (r *run) measureRatio(path string, in []save.Input) (Row, error) {
	rep, err := save.Write(r.ctx, nil, save.Spec{Path: path, Compress: true, Threads: r.Threads}, in)
	if err != nil {
		return Row{}, err
	}
	if err := r.compareLoaded(path, in); err != nil {
		return Row{}, err
	}
	var entropy, total float64
	for _, t := range in {
		entropy += min(fieldEntropy(t.DType, t.Data), float64(len(t.Data)))
		total += float64(len(t.Data))
	}
	return Row{Value: rep.Ratio, Unit: "x", Floor: entropy / total, FloorName: "the entropy of the coded field"}, nil
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

// fileSystemOf returns the type of a folder's file system.
func fileSystemOf(dir string) string {
	fileSystem, err := regular.IdentifyFolder(dir)
	if err != nil {
		return "unknown"
	}
	return fileSystem.Name
}

// freeBytes returns how many bytes are free for the run's folder, or -1 if unknown.
func (r *run) freeBytes() int64 {
	var disk unix.Statfs_t
	if err := unix.Statfs(r.folder, &disk); err != nil {
		return -1
	}
	return int64(disk.Bavail) * disk.Bsize
}
