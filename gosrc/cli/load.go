package cli

// This file defines the load command, which times a load or predicts what it would need, and describes the run command.

import (
	"fmt"
	"io"
	"slices"

	"github.com/dustin/go-humanize"
	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/format"
	"github.com/overwire/overwire/gosrc/load"
	"github.com/overwire/overwire/gosrc/pipeline"
	"github.com/overwire/overwire/gosrc/plan"
	"github.com/overwire/overwire/gosrc/stored"
)

var traceOption = option{name: "trace", value: "FILE",
	doc: "write a Chrome trace of the (last) load; overwire inspect --html turns it into a page"}

var loadVerb = &verb{
	name: "load", args: "SRC...", least: 1, most: -1,
	short: "load a model and report how long it took",
	long: `
Loads every tensor of files, a folder or an index.json into host or GPU memory, as
load_file does, prints the time and the rate, and frees the memory. If a folder has models
in subfolders, it loads all of them. With --trace it also prints the time of each stage
and, on a GPU, how long the copy stream was idle. On the CPU, plain files are memory-mapped
and not read, so no rate is printed. Set OVERWIRE_MMAP=off to read them.

--plan loads nothing and does not touch the GPU: it prints how much memory the load would
need, and how much the weights would need compressed on the device or on the host, with
overwire.offload, and what that costs. --plan --keep SIZE also prints how much
overwire.offload would keep on the device and how much it would stream. It recognizes the
model's blocks by their tensor names. doctor says which of these fits on a GPU.`,
	example: "overwire load model.ow.safetensors --device cuda --repeat 3 --trace trace.json",
	options: append([]option{
		{name: "device", value: "DEVICE", words: devices, doc: "cpu (default), cuda, cuda:1"},
		{name: "repeat", value: "N", lo: 1, hi: 1000, doc: "number of consecutive loads (default 1)"},
		{name: "plan", doc: "read only headers, and print how much memory the load would need"},
		{
			name: "keep", value: "SIZE", size: true, none: true,
			doc: "with --plan: also print what overwire.offload(keep=SIZE) would keep and stream",
		},
		traceOption, threadsOption, storageOption,
	}, decryptOptions...),
	run: runLoad,
}

// runLoad runs the command. It reports one load.Report for each load.
func runLoad(c *call) error {
	_, keeps := c.opts["keep"]
	switch {
	case c.is("plan") && (c.opts["trace"] != "" || c.opts["repeat"] != ""):
		return usage("--plan loads nothing: omit --trace and --repeat")
	case c.is("plan"):
		return planLoad(c)
	case keeps:
		return usage("--keep needs --plan")
	}
	repeat := c.number("repeat", 1)
	reports := make([]load.Report, 0, repeat)
	for n := range repeat {
		opt := load.Options{Device: c.opts["device"], Threads: c.threads()}
		if n == repeat-1 {
			opt.Trace = c.opts["trace"]
		}
		rep, err := loadOnce(c, opt)
		if err != nil {
			return err
		}
		reports = append(reports, rep)
	}
	return c.show(map[string]any{"loads": reports}, func(w io.Writer) {
		for _, r := range reports {
			mappedText, rate := "", "  "+rateText(r.Bytes-r.Mapped, r.Seconds)
			switch r.Mapped {
			case 0:
			case r.Bytes:
				mappedText, rate = ", mapped, not read", ""
			default:
				mappedText = fmt.Sprintf(", %s of them mapped, not read", bytesText(r.Mapped))
			}
			fmt.Fprintf(w, "%s, %s%s, %.4f s%s\n", countText(r.Tensors, "tensor"), bytesText(r.Bytes), mappedText,
				r.Seconds, rate)
		}
		if sum := reports[repeat-1].Trace; sum != nil {
			printTrace(w, sum, reports[repeat-1].Stages.Workers)
		}
	})
}

// openModel opens a model, or all models in the subfolders of a folder.
func openModel(c *call, uris []string, storage format.Access) (*load.Model, error) {
	return stored.ExpandFolders(c.ctx, uris, storage.Options, func(uris []string) (*load.Model, error) {
		return load.Open(c.ctx, load.Spec{URIs: uris, Storage: storage})
	})
}

func loadOnce(c *call, opt load.Options) (rep load.Report, err error) {
	m, err := openModel(c, c.args, c.storage)
	if err != nil {
		return rep, err
	}
	defer m.Close()
	l, err := m.Start(nil, opt)
	if err != nil {
		return rep, err
	}
	defer l.Close()
	if err := l.AwaitEnd(c.ctx); err != nil {
		return rep, err
	}
	rep, _ = l.Job().Value().(load.Report)
	return rep, nil
}

func printTrace(w io.Writer, s *pipeline.Summary, workers int64) {
	what := map[string]string{
		"open": "open and index", "stage": "wait for a slot", "submit": "submit to the device",
		"permit": "wait for a connection", "answer": "wait for the response", "land": "tensors complete",
	}
	t := table(w)
	fmt.Fprintf(t, "stage\ttimes\tseconds\tlongest\tbytes\t(%.4f s, %s; seconds are summed over all workers)\n",
		s.Seconds, countText(workers, "worker"))
	for _, g := range s.Stages {
		name := g.Verb
		if text, ok := what[name]; ok {
			name += ": " + text
		}
		fmt.Fprintf(t, "%s\t%s\t%.4f\t%.4f\t%s\t\n", name, humanize.Comma(int64(g.Spans)), g.Seconds, g.Longest,
			bytesText(g.Bytes))
	}
	t.Flush()
	if g := s.Copy; g != nil {
		copyStage := slices.IndexFunc(s.Stages, func(x pipeline.StageSum) bool { return x.Verb == "copy" })
		fmt.Fprintf(w, "copy stream: busy %.4f s at %s; idle %.4f s in %s, the longest %.4f s; %.4f s before "+
			"the first copy, %.4f s after the last\n",
			g.Busy, rateText(s.Stages[copyStage].Bytes, g.Busy), g.Idle,
			countText(g.Gaps, "gap"), g.Longest, g.Lead, g.Tail)
	}
}

// planReport is the JSON document that load --plan prints.
type planReport struct {
	Tensors int           `json:"tensors"`
	Bytes   int64         `json:"bytes"`   // size of all tensors after the load
	Stored  int64         `json:"stored"`  // bytes to read or map
	Peak    int64         `json:"peak"`    // maximum tensor memory during the load
	Staging int64         `json:"staging"` // memory for slots on the device
	Pinned  int64         `json:"pinned"`  // host memory for a GPU's slots
	Tiers   []plan.Tier   `json:"tiers"`
	Offload *plan.Offload `json:"offload,omitempty"`
}

// planLoad runs load --plan.
func planLoad(c *call) error {
	q := load.Prospect{Device: c.opts["device"]}
	if q.Device != "" {
		if _, err := device.Number(q.Device); err != nil {
			return err
		}
	}
	keep := c.size("keep")
	q.Keep = &keep
	m, err := openModel(c, c.args, c.storage)
	if err != nil {
		return err
	}
	defer m.Close()
	estimate, err := load.EstimateMemory(m, nil, q)
	if err != nil {
		return err
	}
	r := planReport{
		Tensors: len(estimate.Bytes), Peak: estimate.Peak, Staging: estimate.Staging, Pinned: estimate.Pinned,
		Tiers: estimate.Tiers,
	}
	if _, there := c.opts["keep"]; there {
		r.Offload = estimate.Offload
	}
	for i, n := range estimate.Bytes {
		r.Bytes += n
		r.Stored += m.Index().Tensors[i].Stored
	}
	return c.show(r, func(w io.Writer) {
		fmt.Fprintf(w, "%s, %s, read or mapped as %s\n", countText(r.Tensors, "tensor"), bytesText(r.Bytes),
			bytesText(r.Stored))
		fmt.Fprintf(w, "load: %s at peak, slots of %s\n", bytesText(r.Peak), bytesText(r.Staging))
		if r.Offload != nil {
			fmt.Fprintf(w, "offload: %s\n", offloadText(r.Offload))
		}
		for _, t := range r.Tiers {
			fmt.Fprintf(w, "weights %s: %s\n", tierNames[t.Where], tierText(t))
		}
	})
}

// tierNames maps the names of tiers to their descriptions.
var tierNames = map[string]string{"resident": "resident", "device": "compressed on the device",
	"host": "compressed on the host"}

// tierText describes the memory and the cost of a tier.
func tierText(t plan.Tier) string {
	text := bytesText(t.Device) + " on the device"
	if t.Host > 0 {
		text += ", " + bytesText(t.Host) + " on the host"
	}
	text += "; " + t.Cost
	if t.Group != "" {
		text += "; " + t.Group
	}
	return text
}

// offloadText describes an offload's memory on the device and the host, in two lines.
func offloadText(o *plan.Offload) string {
	if len(o.Blocks) == 0 {
		return fmt.Sprintf("nothing is streamed: %s on the device", bytesText(o.DeviceBytes()))
	}
	return fmt.Sprintf("%s on the device (%s outside blocks, %s of kept blocks, a ring of %s)\n"+
		"streamed: %s (%s), from %s to %s, with at most %s of host memory",
		bytesText(o.DeviceBytes()), bytesText(o.Rest), bytesText(o.Kept), bytesText(o.Ring),
		countText(len(o.Blocks), "block"), bytesText(o.Streamed), o.Blocks[0], o.Blocks[len(o.Blocks)-1],
		bytesText(o.Stored))
}

// A Model is doctor's report on a model: whether its weights fit on each GPU.
type Model struct {
	Path  string     `json:"path"`
	Bytes int64      `json:"bytes"`
	GPUs  []ModelFit `json:"gpus"`
}

// A ModelFit describes how a model would run on one GPU.
type ModelFit struct {
	Index int `json:"index"`
	// Fits means that the weights leave a fifth of the GPU for activations.
	Fits bool `json:"fits"`
	// Where names the fastest tier that leaves a fifth of the GPU free. It is "resident" or a value for the argument
	// `where` of overwire.offload. "" means that the model cannot run.
	Where string `json:"where"`
	// Keep and Room are arguments of overwire.offload that use the free memory, except for that fifth.
	Keep int64 `json:"keep"`
	Room int64 `json:"room"`
	// Tiers are the kinds of memory that the weights can be in. Offload describes an offload of all blocks. It is nil
	// if the weights fit or the model cannot run.
	Tiers   []plan.Tier   `json:"tiers"`
	Offload *plan.Offload `json:"offload,omitempty"`
}

// diagnoseModel reports how the model that the arguments name would run on each GPU.
func diagnoseModel(c *call, devices []GPUDevice) (*Model, error) {
	m, err := openModel(c, c.args, c.storage)
	if err != nil {
		return nil, err
	}
	defer m.Close()
	keep := int64(0)
	all, err := load.EstimateMemory(m, nil, load.Prospect{Keep: &keep})
	if err != nil {
		return nil, err
	}
	r := &Model{Path: errs.RedactURI(c.args[0]), Bytes: all.Peak, GPUs: []ModelFit{}}
	for _, d := range devices {
		fit, room := ModelFit{Index: d.Index, Tiers: all.Tiers}, d.Memory/5*4
		for _, t := range all.Tiers {
			if t.Device > room {
				continue
			}
			switch fit.Where = t.Where; t.Where {
			case "resident":
				fit.Fits = true
			case "device":
				fit.Keep, fit.Offload = room-t.Device, all.Offload // kept blocks never need larger slots
			case "host":
				fit.Where, fit.Room, fit.Offload = "auto", room-t.Device, all.Offload
			}
			break
		}
		r.GPUs = append(r.GPUs, fit)
	}
	return r, nil
}

func (m *Model) writeLines(available int64, line func(name, format string, args ...any)) {
	line("model", "%s, %s", m.Path, bytesText(m.Bytes))
	if len(m.GPUs) == 0 {
		fits := "fits"
		if m.Bytes > available {
			fits = "does not fit"
		}
		line("model on the host", "%s in the available memory", fits)
	}
	for _, fit := range m.GPUs {
		line(fmt.Sprintf("model on cuda:%d", fit.Index), "%s", fit.describeFit())
	}
	if n := int64(len(m.GPUs)); n > 1 && m.GPUs[0].Where == "auto" {
		host := m.GPUs[0].Tiers[2].Host
		line("model on all GPUs", "overwire.offload(model, group=): at most %s on the host for each of %d ranks, "+
			"together %s instead of %s", bytesText((host+n-1)/n), n, bytesText(host), bytesText(n*host))
	}
}

func (fit *ModelFit) describeFit() string {
	options := ""
	switch fit.Where {
	case "resident":
		return "fits"
	case "device":
		options = fmt.Sprintf(`where="device", keep=%d`, fit.Keep)
	case "auto":
		options = fmt.Sprintf(`where="auto", room=%d`, fit.Room)
	default:
		return "does not fit, and overwire.offload cannot run it here either: its smallest ring does not fit"
	}
	text := fmt.Sprintf(`does not fit: overwire.offload(model, "cuda:%d", %s)`, fit.Index, options)
	for _, t := range fit.Tiers[1:] {
		text += fmt.Sprintf("; weights %s: %s", tierNames[t.Where], tierText(t))
	}
	return text
}

// runVerb is for help and completion. Python executes the command without the engine (python/overwire/_run.py).
var runVerb = &verb{
	name: "run", args: "[--] PROGRAM ARGUMENTS...", least: 0, most: -1,
	short: "run an unmodified program with safetensors reading through overwire",
	long: `
Starts a program with the safetensors package patched to read through overwire, as
overwire.patch_safetensors() does. Compressed files then load like plain ones in
transformers, diffusers and everything else that uses safetensors. The patch reaches the
program and its child processes through PYTHONPATH; their Python must have overwire
installed. Nothing else changes. The exit status is that of the program.`,
	example: "overwire run python main.py --listen",
	run: func(*call) error {
		return errs.New(errs.ErrNotSupported, "run needs the overwire command of the Python package")
	},
}
