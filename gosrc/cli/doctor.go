package cli

// This file defines the doctor command, which examines the machine and its GPUs.

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/overwire/overwire/gosrc/bench"
	"github.com/overwire/overwire/gosrc/codec/x16"
	"github.com/overwire/overwire/gosrc/device/cuda"
	"github.com/overwire/overwire/gosrc/device/cuda/driver"
	"github.com/overwire/overwire/gosrc/device/cuda/queue"
	"github.com/overwire/overwire/gosrc/device/gds"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/hostmem"
	"github.com/overwire/overwire/gosrc/internal/nodes"
	"github.com/overwire/overwire/gosrc/internal/spawn"
	"github.com/overwire/overwire/gosrc/knob"
	"github.com/overwire/overwire/gosrc/load"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/tensorizer"
	"golang.org/x/sys/cpu"
)

var doctorVerb = &verb{
	name: "doctor", args: "[MODEL...]", most: -1,
	short: "report the machine, the GPUs and the settings in use",
	long: `
Prints versions, CPU features and the decoder in use, cores, huge pages, memory
and its limit, NUMA nodes if there are several, the GPUs with their NUMA nodes (or why
none can be used), whether GPUDirect Storage works here, the configured preload, and every setting
that is not at its default. --env prints every setting: environment variable, value and
meaning. --measure adds the rate of pinned copies to each GPU. If you name a model
(files, a folder or an index.json), doctor says whether its weights fit on each GPU. If
not, it shows how overwire.offload would run the model there: with the compressed weights
on the GPU or on the host, how much memory each needs, and what it costs. A fifth of each
GPU is reserved for the model's activations.`,
	example: "overwire doctor --env",
	options: append([]option{
		{name: "env", doc: "print every environment variable that overwire reads"},
		{name: "measure", doc: "measure copies from pinned host memory to each GPU (about a second per GPU)"},
		storageOption,
	}, decryptOptions...),
	run: func(c *call) error {
		d := Diagnose(c.env, c.is("measure"))
		if len(c.args) > 0 {
			model, err := diagnoseModel(c, d.GPU.Devices)
			if err != nil {
				return err
			}
			d.Model = model
		}
		return c.show(d, func(w io.Writer) { d.text(w, c.is("env")) })
	},
}

// A Diagnosis is what doctor reports.
type Diagnosis struct {
	Version  string        `json:"version"`
	Python   string        `json:"python,omitempty"`
	Machine  bench.Machine `json:"machine"`
	Features []string      `json:"cpu_features"`
	Cipher   string        `json:"cipher"` // library that decrypts .tensors files
	Memory   Memory        `json:"memory"`
	Nodes    []nodes.Node  `json:"nodes"` // NUMA nodes and their cores; empty if unknown
	GPU      GPU           `json:"gpu"`
	Preload  Preload       `json:"preload"`
	Model    *Model        `json:"model,omitempty"` // the model named on the command line
	GDS      gds.Report    `json:"gpudirect_storage"`
	Engine   string        `json:"engine"` // "ok", or the panic that disabled the engine
	Workers  int           `json:"goroutines"`
	Settings []knob.Row    `json:"settings"`
	Advice   []string      `json:"advice"`
}

// Memory describes host memory, in bytes. Limit is the cgroup's limit, or 0 if it has none.
type Memory struct {
	Total     int64 `json:"total"`
	Available int64 `json:"available"`
	Limit     int64 `json:"limit"`
}

// Preload describes the load that a new process would start at import.
type Preload struct {
	Path   string `json:"path"`
	From   string `json:"from"` // the environment variable that sets Path
	Device string `json:"device"`
	Off    bool   `json:"off"`    // switched off by OVERWIRE_NO_PRELOAD
	Exists bool   `json:"exists"` // also true for URLs, which are not checked

	wrong error // why Path cannot be loaded
}

// Diagnose examines the machine and queries the NVIDIA driver, if there is one. It creates
// CUDA contexts and measures copies only if wire is set.
func Diagnose(env Env, wire bool) Diagnosis {
	d := Diagnosis{
		Version: Version, Python: strings.TrimSpace(env.PythonVersion + " " + env.Python),
		Machine:  bench.ThisMachine(),
		Features: features(), Cipher: tensorizer.Cipher(), Memory: memory(), GDS: gds.Probe(), Engine: "ok",
		Workers: spawn.Running(), Settings: knob.Table(), Advice: []string{},
		Nodes: append([]nodes.Node{}, nodes.Read(tables)...), GPU: diagnoseGPU(wire),
	}
	if err := spawn.Poisoned(); err != nil {
		d.Engine = err.Error()
	}
	d.Preload = Preload{Path: knob.Preload.Get(), Device: knob.PreloadDevice.Get(), Off: knob.NoPreload.Get()}
	for i, r := range d.Settings {
		if r.Name == knob.Preload.Name() {
			d.Preload.From = r.From
		}
		d.Settings[i].Value = errs.Redact(errs.RedactURI(r.Value)) // users paste this output into issues
	}
	if d.Preload.Path != "" {
		d.Preload.look()
	}
	d.advise()
	return d
}

// look checks whether the source exists and can be opened, and hides secrets in its name.
func (p *Preload) look() {
	path := p.Path
	p.Path = errs.RedactURI(path)
	if p.Exists = source.Remote(path); p.Exists {
		return
	}
	if _, err := os.Stat(path); err != nil {
		return
	}
	p.Exists = true
	if slices.Contains([]string{".pkl", ".pth", ".csv"}, filepath.Ext(path)) {
		return // only Python can resolve these names
	}
	m, err := load.Open(context.Background(), load.Spec{URIs: []string{path}})
	if p.wrong = err; err == nil {
		m.Close()
	}
}

func (d *Diagnosis) advise() {
	add := func(format string, args ...any) { d.Advice = append(d.Advice, fmt.Sprintf(format, args...)) }
	if x16.Using() == x16.Scalar {
		add("the slow scalar decoder is in use: this CPU has neither AVX2 nor NEON, or the build has no SIMD code " +
			"(on x86-64, build with GOEXPERIMENT=simd)")
	}
	if d.Machine.THP == "never" {
		add("transparent huge pages are off, so touching new memory takes several times longer: set them to madvise")
	}
	if p := d.Preload; p.Path != "" && !p.Off && !p.Exists {
		add("%s names %s, which does not exist", p.From, p.Path)
	} else if p.wrong != nil && !p.Off {
		add("%s names a source that cannot be loaded: %s", p.From, errs.Message(p.wrong))
	}
	adviseGPU(d, add)
	if d.Machine.Cores == 1 {
		add("with only one core, overwire cannot read and decode at the same time")
	}
}

// features lists the CPU features that overwire can use.
func features() []string {
	out := []string{}
	for _, f := range []struct {
		has  bool
		name string
	}{
		{cpu.X86.HasSSE42, "sse4.2"}, {cpu.X86.HasAVX2, "avx2"}, {cpu.X86.HasBMI2, "bmi2"},
		{cpu.X86.HasAVX512F, "avx512f"}, {cpu.X86.HasAVX512BW, "avx512bw"}, {cpu.X86.HasAVX512VBMI, "avx512vbmi"},
		{cpu.X86.HasAVX512VBMI2, "avx512vbmi2"}, {cpu.X86.HasAVX512GFNI, "gfni"},
		{cpu.ARM64.HasASIMD, "neon"}, {cpu.ARM64.HasCRC32, "crc32"},
	} {
		if f.has {
			out = append(out, f.name)
		}
	}
	return out
}

func memory() Memory {
	total, _ := hostmem.Field("/proc/meminfo", "MemTotal:")
	available, _ := hostmem.Field("/proc/meminfo", "MemAvailable:")
	m := Memory{Total: total << 10, Available: available << 10}
	for _, p := range []string{"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"} {
		if n, ok := hostmem.Field(p, ""); ok && n < m.Total {
			m.Limit = n
		}
	}
	return m
}

func (d *Diagnosis) text(w io.Writer, env bool) {
	t := table(w)
	line := func(name, format string, args ...any) { fmt.Fprintf(t, "%s\t%s\n", name, fmt.Sprintf(format, args...)) }
	line("overwire", "%s, %s", d.Version, d.Machine.Go)
	if d.Python != "" {
		line("python", "%s", d.Python)
	}
	line("machine", "%s, %s, %s/%s", d.Machine.CPU, countText(d.Machine.Cores, "core"), d.Machine.OS, d.Machine.Arch)
	line("features", "%s", strings.Join(d.Features, " "))
	line("cipher", "%s", d.Cipher)
	line("decoder", "%s", d.Machine.Decoder)
	line("huge pages", "%s", d.Machine.THP)
	limit := "no limit"
	if d.Memory.Limit > 0 {
		limit = "limit " + bytesText(d.Memory.Limit)
	}
	line("memory", "%s, %s available, %s", bytesText(d.Memory.Total), bytesText(d.Memory.Available), limit)
	if len(d.Nodes) > 1 {
		list := make([]string, len(d.Nodes))
		for i, n := range d.Nodes {
			list[i] = fmt.Sprintf("node %d with %s", n.Number, countText(len(n.Cores), "core"))
		}
		line("nodes", "%s", strings.Join(list, ", "))
	}
	d.GPU.text(len(d.Nodes) > 1, line)
	switch p := d.Preload; {
	case p.Path == "":
		line("preload", "none")
	case p.Off:
		line("preload", "switched off by %s; %s names %s", knob.NoPreload.Name(), p.From, p.Path)
	case !p.Exists:
		line("preload", "%s to %s, set by %s: not found", p.Path, p.Device, p.From)
	default:
		line("preload", "%s to %s, set by %s", p.Path, p.Device, p.From)
	}
	real := "unavailable"
	if d.GDS.Usable {
		real = "libcufile " + d.GDS.Version + ", nvidia-fs " + d.GDS.Module
	}
	line("gpudirect storage", "%s: %s", real, d.GDS.Why)
	if d.Model != nil {
		d.Model.writeLines(d.Memory.Available, line)
	}
	line("engine", "%s", d.Engine)
	t.Flush()
	for _, a := range d.Advice {
		fmt.Fprintf(w, "advice: %s\n", a)
	}
	for _, s := range d.Settings {
		if !env && s.From == "" {
			continue
		}
		names := s.Name
		if len(s.Aliases) > 0 {
			names += fmt.Sprintf(" (with the nyacomp drop-in: %s)", strings.Join(s.Aliases, ", "))
		}
		from := ""
		if s.From != "" {
			from = ", set by " + s.From
		}
		fmt.Fprintf(w, "\n%s = %s%s\n    %s\n    %s; default %s; more: docs/%s\n",
			names, safe(s.Value), from, s.Doc, s.Type, s.Default, s.Page)
	}
}

// GPU is doctor's report on CUDA.
type GPU struct {
	// Reason explains why no GPU can be used; "" if one can.
	Reason  string      `json:"reason,omitempty"`
	Driver  string      `json:"driver,omitempty"` // the kernel module's version: "580.159.03"
	CUDA    string      `json:"cuda,omitempty"`   // the CUDA version that the driver supports: "13.0"
	Devices []GPUDevice `json:"devices"`
}

// A GPUDevice describes one GPU, and how overwire would use it.
type GPUDevice struct {
	driver.DeviceInfo
	// Kernels is the kernel code for this GPU: "sm_90", or "PTX", which the driver compiles at first use. If it is "",
	// no code fits, and Unusable explains why.
	Kernels  string `json:"kernels,omitempty"`
	Unusable string `json:"unusable,omitempty"`
	// Unplaced explains why slots or readers cannot be placed on the GPU's NUMA node. It is "" if they can be placed
	// there, or if the host has only one node.
	Unplaced string `json:"unplaced,omitempty"`
	// Wire is the measured rate of pinned copies to the GPU in GB/s; 0 means not measured.
	Wire float64 `json:"wire,omitempty"`
}

// tables is the root of the files that describe the host's NUMA nodes. Tests replace it.
var tables = nodes.System

// wireTime is roughly how long copies to one device are measured.
const wireTime = 200 * time.Millisecond

// diagnoseGPU queries the driver. With measure it also times copies to each GPU, which creates a context there.
func diagnoseGPU(measure bool) GPU {
	version, _ := os.ReadFile("/sys/module/nvidia/version") // may be unreadable
	g := GPU{Driver: strings.TrimSpace(string(version)), Devices: []GPUDevice{}}
	info, err := driver.Info()
	if err != nil {
		g.Reason = reasonText(err)
		return g
	}
	for _, d := range info {
		g.CUDA = d.Driver
		one := GPUDevice{DeviceInfo: d, Kernels: cuda.KernelCodeFor(d.Compute),
			Unplaced: nodes.Near(tables, func() string {
				return d.PCI
			}).Refused()}
		if one.Kernels == "" {
			one.Unusable = fmt.Sprintf("compute capability %s; overwire needs 8.0 or later", d.Compute)
		} else if measure {
			if one.Wire, err = wire(d.Index); err != nil {
				one.Unusable = reasonText(err)
			}
		}
		g.Devices = append(g.Devices, one)
	}
	return g
}

// reasonText returns an error's text without its class. The report says that it is about a GPU.
func reasonText(err error) string {
	return strings.TrimPrefix(errs.Message(err), errs.ErrDevice.Error()+": ")
}

// wire measures the rate of pinned copies in GB/s. Each copy is one slot.
func wire(index int) (float64, error) {
	d, err := cuda.Open(index)
	if err != nil {
		return 0, err
	}
	defer func() { _ = d.Trim() }() // the rate is known; a lost device shows up later
	l, err := d.Queue(queue.DefaultSlots, queue.DefaultSlotBytes)
	if err != nil {
		return 0, err
	}
	defer l.Close()
	count := queue.DefaultSlots
	for {
		took, err := l.MeasureLink(queue.DefaultSlotBytes, count)
		if err != nil {
			return 0, err
		}
		if took >= wireTime/2 {
			return float64(count) * queue.DefaultSlotBytes / took.Seconds() / 1e9, nil
		}
		count *= 4
	}
}

func adviseGPU(d *Diagnosis, add func(format string, args ...any)) {
	if d.GPU.Reason != "" && d.GPU.Driver != "" {
		add("NVIDIA driver %s is installed, but this process cannot use it: if this is a container, start it with "+
			"GPUs (--gpus all, or the NVIDIA runtime)", d.GPU.Driver)
	}
	for _, g := range d.GPU.Devices {
		if g.Unplaced != "" {
			add("cuda:%d is on NUMA node %d, but its slots cannot be placed there and may be on another node: "+
				"%s", g.Index, g.Node,
				g.Unplaced)
		}
		if g.LinkWidth > 0 && g.LinkWidth < 16 && !g.Coherent {
			add("cuda:%d has only %s of 16: this link limits loads", g.Index, countText(g.LinkWidth, "PCIe lane"))
		}
	}
}

func (g *GPU) text(several bool, line func(name, format string, args ...any)) {
	driver := "driver " + g.Driver
	if g.Driver == "" {
		driver = "driver of unknown version"
	}
	if g.Reason != "" {
		line("gpu", "none: %s", g.Reason)
		return
	}
	line("gpu", "%s, for CUDA %s", driver, g.CUDA)
	for _, d := range g.Devices {
		link := "unknown link"
		if d.LinkWidth > 0 && d.LinkGen > 0 {
			link = fmt.Sprintf("PCIe %d x%d", d.LinkGen, d.LinkWidth)
		}
		if d.Coherent { // it also has a PCIe link, but transfers use NVLink-C2C
			link = "coherent link"
		}
		at := d.PCI
		if several && d.Node >= 0 {
			at = fmt.Sprintf("%s on NUMA node %d", at, d.Node)
		}
		usable := "kernels " + d.Kernels
		switch {
		case d.Unusable != "":
			usable = "UNUSABLE: " + d.Unusable
		case d.Wire > 0:
			usable += fmt.Sprintf(", copies measured at %.1f GB/s", d.Wire)
		}
		line(fmt.Sprintf("cuda:%d", d.Index), "%s, %s, compute %s, %s, %s at %s, %s", d.Name,
			bytesText(d.Memory), d.Compute, countText(d.Processors, "processor"), link, at, usable)
	}
}
