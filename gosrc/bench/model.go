package bench

// This file generates weights, loads files and compares them.

import (
	"bytes"
	"context"

	"golang.org/x/sys/unix"

	"github.com/overwire/overwire/gosrc/device/cuda/driver"
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
