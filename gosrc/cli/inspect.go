package cli

// This file defines the inspect command, including --digests and --html.

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/dustin/go-humanize"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/atomicfile"
	"github.com/overwire/overwire/gosrc/internal/modelfiles"
	"github.com/overwire/overwire/gosrc/internal/regular"
	"github.com/overwire/overwire/gosrc/page"
	"github.com/overwire/overwire/gosrc/save"
	"github.com/overwire/overwire/gosrc/stored"
	"github.com/overwire/overwire/gosrc/verify"
)

var inspectVerb = &verb{
	name: "inspect", args: "SRC...", least: 1, most: -1,
	short: "list tensors with dtypes, shapes, sizes and codecs, print digests, or write an HTML page",
	long: `
Reads only headers and indexes. Plain safetensors and GGUF files work as well. With
--estimate it also reads samples of the tensors, to predict what compress would save.
"ratio" is stored / original bytes. "stored as" is "plain", "alias" (the tensor shares the
bytes of another one), or the codec and the element type. --html writes a self-contained
page with a map of the tensors.

--digests prints a 128-bit digest of each tensor's bytes instead. overwire.digest(tensors)
in Python computes the same digest for tensors in host or GPU memory. You can compare two
files, or a file with a running model, even if they are stored in different formats.
Digests detect accidental changes, but they are not cryptographic.

If SRC is a trace written by load --trace or OVERWIRE_TRACE, --html writes a page that
shows what each worker and each GPU queue did, and when.`,
	example: `overwire inspect model.ow.safetensors --summary
overwire inspect model.ow.safetensors --filter '*.mlp.*' --top 5
overwire load m.safetensors --trace t.json && overwire inspect t.json --html t.html`,
	options: slices.Concat([]option{{name: "summary", short: "s", doc: "print totals only, not each tensor"},
		{name: "filter", value: "GLOB", doc: "list and count only tensors with matching names, e.g. '*.mlp.*'"},
		{name: "top", value: "N", lo: 1, hi: 1 << 30, doc: "list the N largest tensors of each file"},
		{name: "estimate", short: "e", doc: "predict what compress would save"},
		{name: "digests", doc: "print a digest of each tensor's bytes"},
		{name: "html", value: "FILE", doc: "write a page with a map of the tensors instead of listing them"},
		storageOption}, decryptOptions),
	run: runInspect,
}

// runInspect runs the command.
func runInspect(c *call) error {
	glob := cmp.Or(c.opts["filter"], "*")
	if _, err := path.Match(glob, ""); err != nil {
		return usage("--filter %s: invalid pattern: * matches any characters, ? one, [abc] one of these", glob)
	}
	switch out := c.opts["html"]; {
	case glob != "*" && c.is("estimate"):
		return usage("--estimate covers whole files: omit --filter")
	case c.opts["top"] != "" && (c.is("digests") || c.is("summary")):
		return usage("--top cannot be combined with --digests or --summary")
	case c.is("digests") && (out != "" || c.is("estimate")):
		return usage("--digests cannot be combined with --html or --estimate")
	case c.is("digests"):
		return printDigests(c, glob)
	case out != "" && len(c.args) == 1 && isTrace(c.args[0]):
		return writeTracePage(c, c.args[0], out)
	}
	if out := c.opts["html"]; out != "" {
		if err := atomicfile.RefuseOtherKind(out, pageHead); err != nil {
			return err
		}
	}
	in, err := verify.Inspect(c.ctx, c.args, c.storage)
	if err != nil {
		return err
	}
	in.DescribeOriginals(c.env.Copies)
	in.KeepTensors(func(name string) bool { return globMatches(glob, name) })
	if out := c.opts["html"]; out != "" {
		text, err := page.Model(in)
		if err == nil {
			err = atomicfile.Write(c.ctx, out, text)
		}
		if err != nil {
			return err
		}
	}
	shortenList(c, in)
	answer := struct {
		*verify.Inspection
		Estimate *stored.Total `json:"estimate,omitempty"`
	}{Inspection: in}
	if c.is("estimate") {
		sum, err := save.Estimate(c.ctx, c.args, c.storage)
		if err != nil {
			return err
		}
		answer.Estimate = &sum
	}
	return c.show(answer, func(w io.Writer) {
		printInspection(w, in)
		if out := c.opts["html"]; out != "" {
			fmt.Fprintf(w, "%s: open it in a browser\n", out)
		}
		if sum := answer.Estimate; sum != nil {
			fmt.Fprintf(w, "compress would turn %[2]s into about %[1]s, %.1[3]f %% less\n", bytesText(sum.Stored),
				bytesText(sum.Bytes), 100*(1-sum.Ratio))
		}
	})
}

// shortenList drops the tensors that --summary, --html and --top do not list.
func shortenList(c *call, in *verify.Inspection) {
	most := c.number("top", 1<<30)
	for i := range in.Sources {
		f := &in.Sources[i]
		if c.is("summary") || c.opts["html"] != "" {
			f.Tensors = []verify.InspectedTensor{}
		}
		if c.opts["top"] != "" {
			slices.SortStableFunc(f.Tensors, func(a, b verify.InspectedTensor) int {
				return cmp.Compare(b.Bytes, a.Bytes)
			})
		}
		f.Tensors = f.Tensors[:min(most, len(f.Tensors))]
	}
}

// globMatches reports whether a glob matches a name. * also matches slashes.
func globMatches(glob, name string) bool {
	noSlash := strings.NewReplacer("/", "\x00")
	ok, _ := path.Match(noSlash.Replace(glob), noSlash.Replace(name)) // inspect has checked the glob
	return ok
}

// printDigests runs inspect --digests.
func printDigests(c *call, glob string) error {
	others := func(name string) bool { return !globMatches(glob, name) } // their bytes are not read
	rep, err := verify.Digests(c.ctx, c.job, c.args, c.storage, others)
	if err != nil {
		return err
	}
	rep.Tensors = slices.DeleteFunc(rep.Tensors, func(t verify.TensorDigest) bool { return others(t.Name) })
	return c.show(rep, func(w io.Writer) {
		for _, t := range rep.Tensors {
			fmt.Fprintf(w, "%s  %s\n", t.Digest, safe(t.Name))
		}
	})
}

// isTrace reports whether a file name is that of a trace: any .json file except a shard index.
func isTrace(file string) bool {
	name, ok := modelfiles.ParseName(filepath.Base(file))
	return strings.HasSuffix(file, ".json") && !strings.HasSuffix(file, modelfiles.IndexSuffix) && !(ok && name.Index)
}

// pageHead is how a page begins. Only a page is replaced by a page.
const pageHead = "<!doctype html>"

// maxTrace is the maximum size of a trace that inspect --html reads.
const maxTrace = 1 << 28

func writeTracePage(c *call, file, out string) error {
	if out == file {
		return usage("%s is the trace itself: give --html another file name", out)
	}
	text, err := regular.Read(file, maxTrace)
	if err != nil {
		return errs.In("inspect", file, err)
	}
	t, err := page.ReadTrace(filepath.Base(file), text)
	if err != nil {
		return errs.In("inspect", file, err)
	}
	if text, err = t.HTML(); err != nil {
		return err
	}
	if err = atomicfile.RefuseOtherKind(out, pageHead); err == nil {
		err = atomicfile.Write(c.ctx, out, text)
	}
	if err != nil {
		return err
	}
	return c.show(map[string]any{"html": out, "spans": t.Spans, "rows": len(t.Rows), "seconds": float64(t.End) / 1e9},
		func(w io.Writer) {
			fmt.Fprintf(w, "%s: %s of %d %s in %.3f s; open it in a browser\n", out,
				countText(t.Spans, "span"), len(t.Rows),
				plural(len(t.Rows), "worker or queue", "workers and queues"), float64(t.End)/1e9)
		})
}

// printInspection prints a table of tensors for each file, and totals.
func printInspection(w io.Writer, in *verify.Inspection) {
	for _, f := range in.Sources {
		fmt.Fprintf(w, "%s: %s, %s\n", place(f.URI), f.Format, bytesText(f.Size))
		for _, k := range slices.Sorted(maps.Keys(f.Metadata)) {
			fmt.Fprintf(w, "  %s = %s\n", safe(k), safe(f.Metadata[k]))
		}
		if len(f.Tensors) == 0 {
			continue
		}
		t := table(w)
		fmt.Fprint(t, "  tensor\tdtype\tshape\tbytes\tstored\tratio\tstored as\n")
		for _, x := range f.Tensors {
			coding := x.Coding
			if x.AliasOf != "" {
				coding += " of " + safe(x.AliasOf)
			}
			sizeText, storedText, ratio := bytesText(x.Bytes), bytesText(x.Stored), fmt.Sprintf("%.4f", x.Ratio)
			if coding == verify.CodingUnknown {
				sizeText, storedText, ratio = "-", "-", "-"
			}
			fmt.Fprintf(t, "  %s\t%s\t%s\t%s\t%s\t%s\t%s\n", safe(x.Name), x.DType, shapeText(x.Shape), sizeText,
				storedText, ratio, coding)
		}
		t.Flush()
	}
	t := table(w)
	fmt.Fprint(t, "total\ttensors\tbytes\tstored\tratio\n")
	for _, d := range slices.Sorted(maps.Keys(in.Totals)) {
		sum := in.Totals[d]
		sizes := fmt.Sprintf("%s\t%s\t%.4f", bytesText(sum.Bytes), bytesText(sum.Stored), sum.Ratio)
		if verify.IsUnknown(d) {
			sizes = "-\t-\t-"
		}
		fmt.Fprintf(t, "%s\t%s\t%s\n", d, humanize.Comma(int64(sum.Tensors)), sizes)
	}
	t.Flush()
}
