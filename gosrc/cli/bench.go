package cli

// This file defines the bench command.

import (
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/overwire/overwire/gosrc/bench"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/save"
	"github.com/overwire/overwire/gosrc/verify"
	"github.com/overwire/overwire/gosrc/weights"
)

var benchVerb = &verb{
	name: "bench", args: "[--device DEVICE] | gen KIND OUT", least: 0, most: 3,
	words: [][]string{{"gen"}, kindNames()},
	short: "measure compression and load speed on this machine, or generate test weights",
	long: `
Measures how small weights become, and how fast they are saved and loaded, to host
memory or, with --device, to a GPU. Each load is shown next to the limit that memory or
the PCIe link sets, measured in the same run. The loaded bytes are checked before anything
is timed. The first line estimates how long the run takes. bench needs slightly more than
twice --size in the temporary folder and three times --size in memory. Loads read from
the page cache.

With --device cuda, and if torch is installed, bench also measures each load function:
load_file, safe_open, bundles, the drop-in replacements for other libraries, and those
libraries themselves if they are installed. These rows run in random order. Each shows the
first and the second load of a fresh process, and the device memory used in addition to
the tensors. bench also measures saving (save_file to one file and to eight, wait=False,
compress_pickle, dcp, safetensors, torch.save), next to pwrite of the same number of bytes.

gen writes realistic weights as a plain safetensors file:
` + kindsText(),
	example: `overwire bench
overwire bench --device cuda --size 8GB --dir /dev/shm
overwire bench --file model.safetensors
overwire bench --ranks auto --size 16GB --dir /dev/shm
overwire bench gen llama-bf16 --size 1GB weights.safetensors`,
	options: []option{
		{name: "size", value: "SIZE", size: true, doc: "tensor bytes to save and load (default 2GB), or to generate"},
		{name: "device", value: "DEVICE", words: devices, doc: "device to load to: cuda, cuda:1, cpu (default cpu)"},
		{name: "file", value: "FILE", doc: "also measure how small this file becomes"},
		{name: "repeat", value: "N", lo: 1, hi: 1000, doc: "runs of each measurement (default 5)"},
		{name: "dir", value: "DIR", doc: "folder for temporary files"},
		{name: "ranks", value: "N", words: []string{"auto"},
			doc: "measure N processes (or auto) that load at the same time, each to its own GPU; needs torch"},
		{name: "faces", value: "NAMES", doc: "measure only functions with one of these comma-separated words in " +
			"their names"},
		{name: "seed", value: "N", hi: 1 << 62, doc: "gen: random seed"},
		{name: "force", short: "f", doc: "gen: replace OUT if it exists"},
		storageOption,
		threadsOption,
	},
	run: func(c *call) error {
		switch {
		case len(c.args) > 0 && c.args[0] == "gen":
			return generateWeights(c)
		case c.opts["ranks"] != "":
			return errs.New(errs.ErrNotSupported, "bench --ranks needs the overwire command of the Python package")
		case len(c.args) > 0:
			return usage("bench %s: write overwire bench, or overwire bench gen KIND OUT", c.args[0])
		}
		return runBench(c)
	},
}

func kindNames() (names []string) {
	for _, k := range weights.Kinds() {
		names = append(names, k.Name)
	}
	return names
}

func kindsText() string {
	var b strings.Builder
	for _, k := range weights.Kinds() {
		fmt.Fprintf(&b, "  %-11s %s\n", k.Name, k.Doc)
	}
	return b.String()
}

// runBench runs bench without gen.
func runBench(c *call) error {
	opt := bench.Options{Device: c.opts["device"], File: c.opts["file"], Dir: c.opts["dir"], Size: c.size("size"),
		Repeat: c.number("repeat", 0), Threads: c.threads(), Storage: c.storage}
	if opt.File != "" { // invalid options are reported before anything is measured
		if _, err := verify.Inspect(c.ctx, []string{opt.File}, c.storage); err != nil {
			return err
		}
	}
	if !c.is("json") { // rows appear as they are measured
		group := ""
		opt.Begin = func(rep *bench.Report) { bench.WriteHead(c.stdout, rep) }
		opt.Row = func(row bench.Row) {
			if row.Group != group {
				group = row.Group
				fmt.Fprintf(c.stdout, "%s\n", group)
			}
			bench.WriteRow(c.stdout, row)
		}
	}
	rep, err := bench.Run(c.ctx, c.job, opt)
	if err != nil {
		return err
	}
	return c.show(rep, func(w io.Writer) { fmt.Fprintf(w, "%.0f s\n", rep.Seconds) })
}

// generateWeights writes weights of one kind.
func generateWeights(c *call) error {
	if len(c.args) != 3 {
		return usage("write: overwire bench gen KIND OUT [--size SIZE]; kinds:\n%s", kindsText())
	}
	opt := weights.Options{Kind: c.args[1], Size: c.size("size"), Threads: c.threads(),
		Seed: uint64(c.number("seed", 0))}
	if _, err := weights.Find(opt.Kind); err != nil {
		return usage("unknown kind of weights %q; kinds:\n%s", opt.Kind, kindsText())
	}
	out := c.args[2]
	if !c.is("force") {
		if err := refuseExisting(c, out); err != nil {
			return err
		}
	}
	start := time.Now()
	all, err := weights.Make(opt)
	if err != nil {
		return err
	}
	generation := time.Since(start).Seconds()
	in, total := bench.Inputs(all)
	rep, err := save.Write(c.ctx, c.job, save.Spec{Path: out, Threads: opt.Threads,
		Metadata: map[string]string{"format": "pt", "made_by": fmt.Sprintf("overwire bench gen %s --seed %d", opt.Kind,
			opt.Seed)}}, in)
	if err != nil {
		return err
	}
	return c.show(rep, func(w io.Writer) {
		fmt.Fprintf(w, "%s: %s, %s, generated at %s, written in %.2f s\n", out, countText(rep.Tensors, "tensor"),
			bytesText(total), rateText(total, generation), rep.Seconds)
	})
}
