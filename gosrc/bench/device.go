package bench

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/overwire/overwire/gosrc/device/cuda"
	"github.com/overwire/overwire/gosrc/fault"
	"github.com/overwire/overwire/gosrc/save"
	"github.com/overwire/overwire/gosrc/weights"
)

// Parts are the values of Options.Only, in the order in which they are measured.
// peers is left out unless it is named: others' loads take longer than all else.
var Parts = []string{"floors", "kernel", "bf16", "start", "cold", "net", "many", "kinds", "tensors", "peers"}

// Device is what the rows of Options.Device were measured on.
type Device struct {
	Name string            `json:"name"` // as given: "cuda:0"
	Info []cuda.DeviceInfo `json:"info,omitempty"`
	// Wire is the rate of pinned copies of a slot's size and Across that of
	// copies inside the device's memory, both in GB/s of bytes copied.
	Wire   float64 `json:"wire,omitempty"`
	Across float64 `json:"across,omitempty"`
	Files  string  `json:"files"` // the file system of the models: "tmpfs", "ext4"
}

// openDevice opens what Options.Device names.
func (r *run) openDevice() error {
	d := &Device{Name: r.opt.Device, Files: fileSystem(r.dir)}
	r.report.Device = d
	kind, number, _ := strings.Cut(d.Name, ":")
	index := 0
	if number != "" {
		n, err := strconv.Atoi(number)
		if err != nil {
			return fault.New(fault.ErrArgument, "device %q: expected \"cpu\", \"cuda\" or \"cuda:N\"", d.Name)
		}
		index = n
	}
	switch kind {
	case "cpu":
		return nil
	case "cuda":
		var err error
		if r.gpu, err = cuda.Open(index); err != nil {
			return err
		}
		d.Name = fmt.Sprintf("cuda:%d", index)
		r.opt.Device = d.Name
		d.Info, err = cuda.Info()
		return err
	}
	return fault.New(fault.ErrArgument, "device %q: expected \"cpu\", \"cuda\" or \"cuda:N\"", d.Name)
}

// device measures loads to a device. Each part is by itself: one that fails
// leaves a row that says so, and the others are measured; the first failure is
// returned at the end.
func (r *run) device() error {
	if err := r.openDevice(); err != nil {
		return err
	}
	r.touchAhead()
	if err := r.floors(); err != nil {
		return err
	}
	if r.opt.Begin != nil {
		r.opt.Begin(&r.report)
	}
	r.part("floors", "floors of the device", r.deviceFloors)
	r.part("kernel", "the decoder alone", r.kernels)
	if r.wanted("bf16") || r.wanted("start") || r.wanted("cold") || r.wanted("net") {
		r.step("bf16", "making the model", func() error { return r.withModel("bf16", "llama-bf16", r.opt.Size, r.big) })
	}
	r.part("many", "making the model", func() error {
		return r.withModel("many", "moe-bf16", r.opt.Size/100*77, r.manySmall)
	})
	for _, kind := range []string{"fp16", "fp32", "fp8-e4m3"} {
		r.part("kinds", "making the "+kind+" model", func() error {
			return r.withModel("kinds", kind, r.opt.Size/4, func(m *model) { r.pairs("kinds", m, []variant{packed}, 0) })
		})
	}
	r.part("tensors", "tensorizer's files", r.deviceTensors)
	if slices.Contains(r.opt.Only, "peers") {
		r.step("peers", "making the model", func() error { return r.withModel("peers", "llama-bf16", r.opt.Size, r.beside) })
		r.step("peers", "making the model", func() error { return r.withModel("peers", "moe-bf16", r.opt.Size/100*77, r.beside) })
	}
	if err := r.stopped(); err != nil {
		return err
	}
	if len(r.report.Failures) > 0 {
		return fault.New(fault.ErrEngine, "%d steps failed, the first: %s", len(r.report.Failures), r.report.Failures[0])
	}
	return nil
}

func (r *run) wanted(part string) bool {
	return len(r.opt.Only) == 0 || slices.Contains(r.opt.Only, part)
}

// part is step for a part that Options.Only may leave out. The floors of the
// device are what the others are held against: they are never left out.
func (r *run) part(part, name string, fn func() error) {
	if part == "floors" || r.wanted(part) {
		r.step(part, name, fn)
	}
}

// step does one thing, unless the run was stopped or its time is up. What goes
// wrong becomes a row and a failure, and the run goes on.
func (r *run) step(group, name string, fn func() error) {
	if r.stopped() != nil {
		return
	}
	if time.Since(r.began) > r.opt.Limit {
		r.missing(group, name, fmt.Sprintf("the %.0f s of this run were over", r.opt.Limit.Seconds()))
		return
	}
	err := fn()
	var lacking *lackingError
	switch {
	case err == nil || r.stopped() != nil:
	case errors.As(err, &lacking):
		r.missing(group, name, lacking.why)
	default:
		r.report.Failures = append(r.report.Failures, fmt.Sprintf("%s, %s: %v", group, name, err))
		r.missing(group, name, "FAILED: "+fault.Redact(err.Error()))
	}
}

// A lackingError says why something cannot be measured on this machine.
type lackingError struct{ why string }

func (e *lackingError) Error() string { return e.why }

func lacking(format string, args ...any) error { return &lackingError{fmt.Sprintf(format, args...)} }

// A model is one set of weights, plain and compressed.
type model struct {
	kind    string
	bytes   int64 // of tensors
	tensors int
	ratio   float64 // of the compressed files to those bytes
	files   map[variant][]string
	sums    string
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
	dir := r.path(kind)
	defer os.RemoveAll(dir)
	var disk unix.Statfs_t
	if err := unix.Statfs(r.dir, &disk); err == nil {
		if free := int64(disk.Bavail) * disk.Bsize; free < 2*size+64<<20 {
			return lacking("%.1f GB are free in %s, and it takes %.1f", float64(free)/1e9, r.dir, 2*float64(size)/1e9)
		}
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
	all, err := weights.Make(weights.Options{Kind: kind, Size: size, Seed: 4, Threads: r.opt.Threads})
	if err != nil {
		return nil, err
	}
	defer freeMemory()
	made := time.Since(start).Seconds()
	in := inputs(all)
	m := &model{kind: kind, tensors: len(in), files: map[variant][]string{}, sums: filepath.Join(dir, "sums.json")}
	for _, t := range in {
		m.bytes += int64(len(t.Data))
	}
	var stored int64
	note := fmt.Sprintf("made at %.1f GB/s", rate(m.bytes, made))
	for _, v := range []variant{plain, packed} {
		if err := r.stopped(); err != nil {
			return nil, err
		}
		folder := filepath.Join(dir, string(v))
		if err := os.MkdirAll(folder, 0o700); err != nil {
			return nil, fault.New(fault.ErrIO, "%v", err)
		}
		rep, err := save.Write(r.ctx, nil, save.Spec{Path: filepath.Join(folder, "model.safetensors"), Compress: v == packed,
			Threads: r.opt.Threads, Shard: m.bytes/4 + m.bytes/32 + 1}, in)
		if err != nil {
			return nil, err
		}
		note += fmt.Sprintf(", written %s at %.1f GB/s", v, rate(m.bytes, rep.Seconds))
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
	if err := r.writeSums(filepath.Join(kind, "sums.json"), in); err != nil {
		return nil, err
	}
	r.add(Row{Group: group, Name: fmt.Sprintf("%.1f GB %s, %d tensors in %d files: stored / original", float64(m.bytes)/1e9, kind, m.tensors, len(m.files[packed])),
		Value: m.ratio, Unit: "x", Note: note})
	return m, nil
}

// fileSystem names the kind of file system that a folder lies in.
func fileSystem(dir string) string {
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
