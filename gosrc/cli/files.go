package cli

import (
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/dustin/go-humanize"

	"github.com/overwire/overwire/gosrc/fault"
	"github.com/overwire/overwire/gosrc/save"
	"github.com/overwire/overwire/gosrc/source/open"
)

var writeOptions = append([]option{
	{name: "output", short: "o", value: "OUT", doc: "file or folder to write"},
	{name: "force", short: "f", doc: "write over what is there"},
	{name: "shard", value: "SIZE", doc: "most tensor bytes in one file, e.g. 5GB (default: as the source)"},
	storageOption,
	threadsOption,
}, decryptOptions...)

var partsOption = option{name: "parts", value: "P", doc: "column parts: 1, 2, 4 or 8, so that slices of dimension 1 are read alone"}

var compressVerb = &verb{
	name: "compress", args: "SRC... -o OUT", least: 1, most: -1,
	short: "write tensors compressed, without loss",
	long: `
Reads safetensors files, a folder of shards or an index.json, and writes them
in the overwire container: still safetensors files, whose tensors are stored
compressed where that gains something. Every bit comes back. OUT is complete
or absent, whatever happens meanwhile. A folder becomes a folder that keeps its
file names, its index.json and its small companions (config, tokenizer), with the
folders below it, such as the parts of a diffusers pipeline. Other files over
64 MiB and weights in other files are not copied, and are listed.`,
	example: "overwire compress model.safetensors -o model.ow.safetensors",
	options: append(slices.Clone(writeOptions), partsOption),
	run:     func(c *call) error { return c.convert(true) },
}

var decompressVerb = &verb{
	name: "decompress", args: "SRC... -o OUT", least: 1, most: -1,
	short: "write plain safetensors again",
	long: `
Reads compressed (or plain) files and writes plain safetensors files that any
reader takes, bit for bit what was compressed.`,
	example: "overwire decompress model.ow.safetensors -o model.safetensors",
	options: slices.Clone(writeOptions),
	run:     func(c *call) error { return c.convert(false) },
}

var convertVerb = &verb{
	name: "convert", args: "SRC... -o OUT --to FORMAT", least: 1, most: -1,
	short: "change format, shards or column parts",
	long: `
Streams tensors from any number of files into one file, several shards or a
folder. --to overwire compresses, --to safetensors writes plain. An OUT that
ends in .tensors becomes a file of tensorizer's, encrypted if a key or password
is given for it; of a source that is one, types, modules and every dtype stay.`,
	example: `overwire convert model-0000*.safetensors -o model.safetensors --to overwire --parts 4
overwire convert model.tensors -o secret.tensors --encrypt-key file:model.key`,
	options: slices.Concat(writeOptions, []option{partsOption,
		{name: "to", value: "FORMAT", doc: "overwire (default) or safetensors"}}, encryptOptions),
	run: func(c *call) error {
		switch to := c.opts["to"]; to {
		case "", "overwire":
			return c.convert(true)
		case "safetensors":
			return c.convert(false)
		default:
			return usage("--to %s: overwire or safetensors", to)
		}
	},
}

// convert is compress, decompress and convert.
func (c *call) convert(compress bool) error {
	out := c.opts["output"]
	if out == "" {
		return usage("%s needs -o OUT", c.verb.name)
	}
	storage, err := c.storage()
	if err != nil {
		return err
	}
	spec := save.Spec{Path: out, Compress: compress, Storage: storage}
	if spec.Threads, err = c.threads(); err != nil {
		return err
	}
	if spec.Parts, err = c.number("parts", 0, 1, 8); err != nil {
		return err
	}
	if spec.Shard, err = c.size("shard"); err != nil {
		return err
	}
	if !c.is("force") {
		check := free
		if open.Writable(out) {
			check = func(out string) error { return c.freeFar(out, storage.Options) }
		}
		if err := check(out); err != nil {
			return err
		}
	}
	rep, err := save.Convert(c.ctx, c.job, c.args, out, spec)
	if err != nil {
		return err
	}
	return c.show(rep, func(w io.Writer) {
		for _, f := range rep.Files {
			fmt.Fprintf(w, "%s\n", f)
		}
		for _, f := range rep.Left {
			fmt.Fprintf(w, "not copied: %s\n", f)
		}
		fmt.Fprintf(w, "%s -> %s  %.4f of it  %s tensors, %s compressed, %s aliases  %.2f s  %s\n",
			bytesText(rep.BytesIn), bytesText(rep.BytesOut), rep.Ratio, humanize.Comma(int64(rep.Tensors)),
			humanize.Comma(int64(rep.Compressed)), humanize.Comma(int64(rep.Aliases)), rep.Seconds, rateText(rep.BytesIn, rep.Seconds))
	})
}

// free refuses to write over a file, or into a folder that has something in it.
func free(out string) error {
	info, err := os.Stat(out)
	if err != nil {
		return nil // absent, or the save will say what is wrong
	}
	if info.IsDir() {
		if list, err := os.ReadDir(out); err != nil || len(list) == 0 {
			return nil
		}
	}
	return usage("%s exists; give --force to write over it", out)
}

var inspectVerb = &verb{
	name: "inspect", args: "SRC...", least: 1, most: -1,
	short: "show tensors, dtypes, sizes, ratios and codecs",
	long: `
Reads headers and indexes only, of plain safetensors files too. The ratio is
stored / original; the coding is "plain", "alias" or codec/transform.`,
	example: "overwire inspect model.ow.safetensors --summary",
	options: []option{{name: "summary", short: "s", doc: "totals only, no line for each tensor"}, storageOption},
	run: func(c *call) error {
		storage, err := c.storage()
		if err != nil {
			return err
		}
		result, err := save.Inspect(c.ctx, c.args, storage)
		if err != nil {
			return err
		}
		in, ok := result.(*save.Inspection)
		if !ok {
			return fault.New(fault.ErrEngine, "inspect gave a %T", result)
		}
		if c.is("summary") {
			for i := range in.Sources {
				in.Sources[i].Tensors = nil
			}
		}
		return c.show(in, func(w io.Writer) { inspected(w, in) })
	},
}

// inspected prints a table of tensors for each file, and totals.
func inspected(w io.Writer, in *save.Inspection) {
	for _, f := range in.Sources {
		fmt.Fprintf(w, "%s: %s, %s\n", fault.Redact(f.URI), f.Format, bytesText(f.Size))
		for _, k := range sorted(f.Metadata) {
			fmt.Fprintf(w, "  %s = %s\n", safe(k), safe(f.Metadata[k]))
		}
		if len(f.Tensors) == 0 {
			continue
		}
		t := table(w)
		fmt.Fprint(t, "  tensor\tdtype\tshape\tbytes\tstored\tratio\tcoding\n")
		for _, x := range f.Tensors {
			coding := x.Coding
			if x.AliasOf != "" {
				coding += " of " + safe(x.AliasOf)
			}
			fmt.Fprintf(t, "  %s\t%s\t%s\t%s\t%s\t%.4f\t%s\n", safe(x.Name), x.DType, shapeText(x.Shape),
				bytesText(x.Bytes), bytesText(x.Stored), x.Ratio, coding)
		}
		t.Flush()
	}
	t := table(w)
	fmt.Fprint(t, "total\ttensors\tbytes\tstored\tratio\n")
	for _, d := range sorted(in.Totals) {
		sum := in.Totals[d]
		if d == "" {
			d = "all"
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%.4f\n", d, humanize.Comma(int64(sum.Tensors)), bytesText(sum.Bytes), bytesText(sum.Stored), sum.Ratio)
	}
	t.Flush()
}

var verifyVerb = &verb{
	name: "verify", args: "SRC...", least: 1, most: -1,
	short: "prove that files are whole",
	long: `
Of compressed files, looks at every byte: checksums of chunks, decoding, and
the hash of every tensor; of .tensors files too, those that are encrypted need
their key. Plain safetensors files hold no checksums, so only
their structure can be proven, and the report says so. The first damage ends
it with status 1 and names file, tensor, chunk and offset.`,
	example: "overwire verify model.ow.safetensors && echo whole",
	options: append([]option{storageOption}, decryptOptions...),
	run: func(c *call) error {
		storage, err := c.storage()
		if err != nil {
			return err
		}
		rep, err := save.Verify(c.ctx, c.job, c.args, storage)
		if err != nil {
			return err
		}
		return c.show(rep, func(w io.Writer) {
			for _, f := range rep.Files {
				fmt.Fprintf(w, "%s: %s, %s verified, %s tensors, %s\n", fault.Redact(f.URI), f.Format, f.Checked,
					humanize.Comma(int64(f.Tensors)), bytesText(f.Bytes))
			}
			if rep.Note != "" {
				fmt.Fprintf(w, "note: %s\n", rep.Note)
			}
			fmt.Fprintf(w, "ok  %.2f s  %s\n", rep.Seconds, rateText(rep.Bytes, rep.Seconds))
		})
	},
}

func table(w io.Writer) *tabwriter.Writer { return tabwriter.NewWriter(w, 0, 0, 2, ' ', 0) }

func bytesText(n int64) string { return humanize.Bytes(uint64(max(0, n))) }

func rateText(n int64, seconds float64) string {
	if seconds <= 0 {
		return "-"
	}
	return fmt.Sprintf("%.2f GB/s", float64(n)/seconds/1e9)
}

func shapeText(shape []int64) string {
	words := make([]string, len(shape))
	for i, d := range shape {
		words[i] = fmt.Sprint(d)
	}
	return "[" + strings.Join(words, ",") + "]"
}

// safe shows text out of a file without letting it steer the terminal or
// break the table.
func safe(s string) string {
	const most = 200
	clean := strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f || r >= 0x80 && r < 0xa0 {
			return '?'
		}
		return r
	}, s)
	if r := []rune(clean); len(r) > most {
		return string(r[:most]) + "..."
	}
	return clean
}

func sorted[V any](m map[string]V) []string {
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}
