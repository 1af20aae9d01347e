package measure

// This file makes weights, loads them back and compares them, and opens devices.

import (
	"bytes"
	"fmt"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/overwire/overwire/gosrc/device/cuda"
	"github.com/overwire/overwire/gosrc/device/cuda/driver"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/load"
	"github.com/overwire/overwire/gosrc/save"
	"github.com/overwire/overwire/gosrc/weights"
)

// Inputs are generated weights as save takes them, and their bytes.
func Inputs(all []weights.Tensor) (in []save.Input, total int64) {
	in = make([]save.Input, len(all))
	for i, t := range all {
		in[i] = save.Input{Name: t.Name, DType: t.DType, Shape: t.Shape, Data: t.Data}
		total += int64(len(t.Data))
	}
	return in, total
}

// Make generates weights of a kind.
func (r *Run) Make(kind string, size int64, seed uint64) (in []save.Input, total int64, err error) {
	all, err := weights.Make(weights.Options{Kind: kind, Size: size, Seed: seed, Threads: r.Threads})
	if err != nil {
		return nil, 0, err
	}
	in, total = Inputs(all)
	return in, total, nil
}

// Load opens files, loads all of them into fresh memory of the options' device,
// calls fn, if not nil, with the bytes by tensor, and frees them. Nothing is
// mapped. fn must be nil for a GPU.
func (r *Run) Load(uris []string, opt load.Options, fn func(*load.Model, [][]byte) error) (rep load.Report, err error) {
	isMapped := false
	m, err := load.Open(r.Ctx, load.Spec{URIs: uris, Map: &isMapped, Storage: r.Storage})
	if err != nil {
		return rep, err
	}
	defer m.Close()
	l, err := m.Start(nil, opt)
	if err != nil {
		return rep, err
	}
	defer l.Close()
	if _, err := l.Job().Wait(-1); err != nil {
		return rep, err
	}
	rep, _ = l.Job().Value().(load.Report)
	if fn == nil {
		return rep, nil
	}
	data := make([][]byte, l.Len())
	for i := range data {
		mem, _, _, ok := l.Take(i)
		if !ok {
			return rep, errs.New(errs.ErrEngine, "%s: tensor %d has no memory", strings.Join(uris, ", "), i)
		}
		defer mem.Release()
		if mem.Bytes > 0 {
			data[i] = mem.Slice()
		}
	}
	return rep, fn(m, data)
}

// Loaded is Load of one file without the report.
func (r *Run) Loaded(path string, opt load.Options, fn func(*load.Model, [][]byte) error) error {
	_, err := r.Load([]string{path}, opt, fn)
	return err
}

// Same loads a file and compares it with what was saved.
func (r *Run) Same(path string, in []save.Input) error {
	want := map[string]*save.Input{}
	for i := range in {
		want[in[i].Name] = &in[i]
	}
	return r.Loaded(path, load.Options{}, func(m *load.Model, data [][]byte) error {
		if len(data) != len(in) {
			return errs.New(errs.ErrEngine, "%s: %d tensors came back of %d", path, len(data), len(in))
		}
		for i, t := range m.Index().Tensors {
			if w := want[t.Name]; w == nil || w.DType != t.DType || !bytes.Equal(w.Data, data[i]) {
				return errs.New(errs.ErrEngine, "%s: tensor %q did not come back bit for bit", path, t.Name)
			}
		}
		return nil
	})
}

// File loads a file's tensors into Go's memory.
func (r *Run) File(path string) (in []save.Input, err error) {
	err = r.Loaded(path, load.Options{}, func(m *load.Model, data [][]byte) error {
		for i, t := range m.Index().Tensors {
			in = append(in, save.Input{Name: t.Name, DType: t.DType, Shape: t.Shape, Data: bytes.Clone(data[i])})
		}
		return nil
	})
	return in, err
}

// Ratio saves tensors compressed in a file, loads them back, compares every
// byte, and returns the row of their size beside the field entropy. Tied tensors
// are stored once; the entropy counts each.
func (r *Run) Ratio(path string, in []save.Input) (Row, error) {
	rep, err := save.Write(r.Ctx, nil, save.Spec{Path: path, Compress: true, Threads: r.Threads}, in)
	if err != nil {
		return Row{}, err
	}
	if err := r.Same(path, in); err != nil {
		return Row{}, err
	}
	var entropy, total float64
	for _, t := range in {
		entropy += min(FieldEntropy(t.DType, t.Data), float64(len(t.Data)))
		total += float64(len(t.Data))
	}
	return Row{Value: rep.Ratio, Unit: "x", Floor: entropy / total, FloorName: "field entropy"}, nil
}

// Device is the destination of the load rows.
type Device struct {
	Name string              `json:"name"` // "cuda:0"
	Info []driver.DeviceInfo `json:"info,omitempty"`
	// Wire is the rate of pinned copies of a slot's size and Across that of
	// copies inside the device's memory, both in GB/s of bytes copied.
	Wire   float64 `json:"wire,omitempty"`
	Across float64 `json:"across,omitempty"`
	Files  string  `json:"files"` // the file system of the models: "tmpfs", "ext4"
}

// OpenDevice opens a device by its name, "cpu", "cuda" or "cuda:N", and notes it
// in the report; nil is the host.
func (r *Run) OpenDevice(name string) (*cuda.Device, error) {
	d := &Device{Name: name, Files: FileSystem(r.Folder)}
	r.Report.Device = d
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

// ToDevice is the rate of pinned copies to a queue's device, n bytes at a time.
func (r *Run) ToDevice(queue *cuda.Queue, n int64) (float64, error) {
	count := int(max(16<<20, min(r.Size, 4<<30)) / n)
	v, err := r.MedianOf(func() (float64, error) {
		took, err := queue.Floor(n, count)
		return took.Seconds(), err
	})
	if err != nil {
		return 0, err
	}
	return Rate(n*int64(count), v), nil
}

// FileSystem names the kind of file system that a folder lies in.
func FileSystem(dir string) string {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return "unknown"
	}
	switch st.Type {
	case unix.TMPFS_MAGIC:
		return "tmpfs"
	case unix.EXT4_SUPER_MAGIC:
		return "ext4"
	case unix.XFS_SUPER_MAGIC:
		return "xfs"
	case unix.BTRFS_SUPER_MAGIC:
		return "btrfs"
	case unix.OVERLAYFS_SUPER_MAGIC:
		return "overlay"
	}
	return fmt.Sprintf("%#x", st.Type)
}

// Free is how many bytes fit into the run's folder, -1 if that is not known.
func (r *Run) Free() int64 {
	var disk unix.Statfs_t
	if err := unix.Statfs(r.Folder, &disk); err != nil {
		return -1
	}
	return int64(disk.Bavail) * disk.Bsize
}
