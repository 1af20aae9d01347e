package cli

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/overwire/overwire/gosrc/bench"
	"github.com/overwire/overwire/gosrc/save"
	"github.com/overwire/overwire/gosrc/weights"
)

var benchVerb = &verb{
	name: "bench", args: "[codec|load|cold|many|net|tensors|import|all] | --device DEVICE | gen KIND OUT", least: 0, most: 3,
	short: "measure, each figure beside the machine's floor; or make weights",
	long: `
Measures ratios, coder, loads, cost of a tensor and of the import, and prints
every figure beside what copying or reading the same memory costs in the same
run. Bytes are compared before anything is timed. Needs about twice --size in
the temporary folder and three times in memory.

--device measures loads to a GPU (or, for comparison, to "cpu") and nothing
else: pinned copies and disk beside loads of 16 GB in fresh processes, first and
second, warm and cold, many small tensors, start-up, memory, and safetensors in
the same run. About 6 minutes, 35 GB of disk and 50 GB of memory, or less with
--size; what fails or is not there has a row that says so.

gen writes realistic weights as a plain safetensors file:
` + kindsText(),
	example: `overwire bench codec --file model.safetensors
overwire bench load --size 4GB --repeat 5 --json
overwire bench --device cuda --out report.json --trace trace.json
overwire bench gen llama-bf16 --size 1GB weights.safetensors`,
	options: []option{
		{name: "size", value: "SIZE", doc: "tensor bytes of the load rows (default 4GB; of a device 16.06GB), or to generate"},
		{name: "device", value: "DEVICE", doc: "measure loads to cuda, cuda:1, cpu"},
		{name: "only", value: "PARTS", doc: "of the device's rows: " + strings.Join(bench.Parts, ",")},
		{name: "limit", value: "SECONDS", doc: "of the device's rows: begin nothing more after that (default 450)"},
		{name: "out", value: "FILE", doc: "write the report as JSON too, anew after every row"},
		traceOption,
		{name: "file", value: "FILE", doc: "real F32 weights for the codec rows"},
		{name: "repeat", value: "N", doc: "runs of each measurement (default 5)"},
		{name: "dir", value: "DIR", doc: "folder for temporary files"},
		{name: "seed", value: "N", doc: "of the generated weights"},
		{name: "force", short: "f", doc: "gen: write over what is there"},
		threadsOption,
	},
	run: func(c *call) error {
		if len(c.args) > 0 && c.args[0] == "gen" {
			return c.generate()
		}
		return c.measure()
	},
}

func kindsText() string {
	var b strings.Builder
	for _, k := range weights.Kinds() {
		fmt.Fprintf(&b, "  %-11s %s\n", k.Name, k.Doc)
	}
	return b.String()
}

func (c *call) measure() error {
	opt := bench.Options{File: c.opts["file"], Dir: c.opts["dir"], Python: c.env.Python}
	switch len(c.args) {
	case 0:
	case 1:
		opt.What = c.args[0]
	default:
		return usage("bench measures one thing: %s", strings.Join(bench.Whats, ", "))
	}
	if opt.What != "" && !slices.Contains(bench.Whats, opt.What) {
		return usage("bench %s: not one of %s, gen", opt.What, strings.Join(bench.Whats, ", "))
	}
	var err error
	if opt.Size, err = c.size("size"); err != nil {
		return err
	}
	if opt.Repeat, err = c.number("repeat", 0, 1, 1000); err != nil {
		return err
	}
	if opt.Threads, err = c.threads(); err != nil {
		return err
	}
	opt.Device, opt.Out, opt.Trace = c.opts["device"], c.opts["out"], c.opts["trace"]
	if only := c.opts["only"]; only != "" {
		opt.Only = strings.Split(only, ",")
	}
	if opt.Device == "" && (opt.Only != nil || c.opts["limit"] != "") {
		return usage("--only and --limit go with --device")
	}
	for _, part := range opt.Only {
		if !slices.Contains(bench.Parts, part) {
			return usage("--only %s: not of %s", part, strings.Join(bench.Parts, ","))
		}
	}
	limit, err := c.number("limit", 0, 1, 1e6)
	if err != nil {
		return err
	}
	opt.Limit = time.Duration(limit) * time.Second
	if !c.is("json") { // rows appear as they are measured
		group := ""
		opt.Begin = func(rep *bench.Report) { rep.Text(c.stdout) }
		opt.Row = func(r bench.Row) {
			if r.Group != group {
				group = r.Group
				fmt.Fprintf(c.stdout, "%s\n", group)
			}
			r.Text(c.stdout)
		}
	}
	rep, err := bench.Run(c.ctx, c.job, opt)
	if err != nil && len(rep.Failures) == 0 {
		return err
	}
	if shown := c.show(rep, func(w io.Writer) { fmt.Fprintf(w, "%.0f s\n", rep.Seconds) }); shown != nil {
		return shown
	}
	if err != nil {
		return &shownError{err}
	}
	return nil
}

// generate writes made weights.
func (c *call) generate() error {
	if len(c.args) != 3 {
		return usage("write: overwire bench gen KIND OUT [--size SIZE]; kinds:\n%s", kindsText())
	}
	opt := weights.Options{Kind: c.args[1]}
	if _, err := weights.Find(opt.Kind); err != nil {
		return usage("no kind of weights is called %q; kinds:\n%s", opt.Kind, kindsText())
	}
	var err error
	if opt.Size, err = c.size("size"); err != nil {
		return err
	}
	if opt.Threads, err = c.threads(); err != nil {
		return err
	}
	seed, err := c.number("seed", 0, 0, 1<<62)
	if err != nil {
		return err
	}
	opt.Seed = uint64(seed)
	out := c.args[2]
	if !c.is("force") {
		if err := free(out); err != nil {
			return err
		}
	}
	start := time.Now()
	all, err := weights.Make(opt)
	if err != nil {
		return err
	}
	made := time.Since(start).Seconds()
	in := make([]save.Input, len(all))
	var total int64
	for i, t := range all {
		in[i] = save.Input{Name: t.Name, DType: t.DType, Shape: t.Shape, Data: t.Data}
		total += int64(len(t.Data))
	}
	rep, err := save.Write(c.ctx, c.job, save.Spec{Path: out, Threads: opt.Threads,
		Metadata: map[string]string{"format": "pt", "made_by": fmt.Sprintf("overwire bench gen %s --seed %d", opt.Kind, seed)}}, in)
	if err != nil {
		return err
	}
	return c.show(rep, func(w io.Writer) {
		fmt.Fprintf(w, "%s: %d tensors, %s, made at %s, written in %.2f s\n", out, rep.Tensors, bytesText(total), rateText(total, made), rep.Seconds)
	})
}
