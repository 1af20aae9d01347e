package cli

// This file defines the load command, which times a load.

import (
	"fmt"
	"io"
	"slices"

	"github.com/dustin/go-humanize"

	"github.com/overwire/overwire/gosrc/format"
	"github.com/overwire/overwire/gosrc/load"
	"github.com/overwire/overwire/gosrc/pipeline"
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
		"permit": "wait for a connection", "answer": "wait for the response",
		"land": "tensors complete",
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
