package cli

// This file has the verbs that write and examine files: compress, decompress,
// convert, inspect, verify, digest.

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/dustin/go-humanize"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/atomicfile"
	"github.com/overwire/overwire/gosrc/page"
	"github.com/overwire/overwire/gosrc/save"
	"github.com/overwire/overwire/gosrc/source/open"
)

var writeOptions = append([]option{
	{name: "output", short: "o", value: "OUT", doc: "file or folder to write"},
	{name: "force", short: "f", doc: "replace OUT if it exists"},
	{name: "shard", value: "SIZE", size: true, doc: "most tensor bytes in one file, e.g. 5GB (default: the shards of the source)"},
	{name: "quiet", short: "q", doc: "print nothing but errors"},
	{name: "verbose", short: "v", doc: "print the SHA-256 of each original, too"},
	storageOption,
	threadsOption,
}, decryptOptions...)

var partsOption = option{name: "parts", value: "P", lo: 1, hi: 8, doc: "divide columns into 1, 2, 4 or 8 parts, so that a slice along dimension 1 reads only its own"}

var levelOption = option{name: "level", value: "LEVEL", doc: "default, or smaller: 0.2 to 1.5 % of the original smaller, decoded by the CPU alone, and slowly"}

var compressVerb = &verb{
	name: "compress", args: "SRC... -o OUT", least: 1, most: -1,
	short: "compress tensors without loss",
	long: `
Reads safetensors files, a folder of shards, an index.json, or what torch.save wrote
(.bin, .pt, .pth, .ckpt; nothing in it is run), and writes the same tensors
compressed, where compression makes them smaller. decompress gives the same
safetensors files back, byte for byte; reading OUT needs overwire. OUT is complete or
absent, whatever happens meanwhile. A folder becomes a folder: it keeps its file names, its
index.json, its other files (config, tokenizer) and the folders below it, as a
diffusers pipeline has them. Listed instead of copied are other weights (of 64 MiB
and more if not safetensors), hidden files, and links that lead out of the folder
to anything but a Hugging Face cache's own blobs.`,
	example: "overwire compress model.safetensors -o model.ow.safetensors",
	options: append(slices.Clone(writeOptions), partsOption, levelOption),
	run:     func(c *call) error { return c.convert(true) },
}

var decompressVerb = &verb{
	name: "decompress", args: "SRC... -o OUT", least: 1, most: -1,
	short: "turn compressed files back into plain safetensors",
	long: `
Reads compressed (or plain) files and writes plain safetensors files that any
reader can load. Every tensor is bit for bit what was compressed. A file that
compress made from one safetensors file becomes that very file again: its SHA-256
is compared before OUT appears. A file that keeps no original (it was
saved from tensors, or is now in other shards) gets a new header; the output says so.`,
	example: "overwire decompress model.ow.safetensors -o model.safetensors",
	options: slices.Clone(writeOptions),
	run:     func(c *call) error { return c.convert(false) },
}

var convertVerb = &verb{
	name: "convert", args: "SRC... -o OUT --to FORMAT", least: 1, most: -1,
	short: "change format, shards or column parts",
	long: `
Copies the tensors of any number of files into one file, several shards or a
folder. --to overwire compresses, --to safetensors does not. If OUT ends in
.tensors, it becomes a tensorizer file, encrypted if you give a key or password;
if the source is one too, it keeps its types, modules and dtypes.`,
	example: `overwire convert model-0000*.safetensors -o model.safetensors --to overwire --parts 4
overwire convert model.tensors -o secret.tensors --encrypt-key file:model.key`,
	options: slices.Concat(writeOptions, []option{partsOption, levelOption,
		{name: "to", value: "FORMAT", doc: "overwire (default) or safetensors"}}, encryptOptions),
	run: func(c *call) error {
		switch to := c.opts["to"]; to {
		case "", "overwire":
			return c.convert(true)
		case "safetensors":
			return c.convert(false)
		default:
			return usage("--to %s: write overwire or safetensors", to)
		}
	},
}

// convert runs compress, decompress and convert.
func (c *call) convert(compress bool) error {
	out := c.opts["output"]
	if out == "" {
		return usage("%s needs -o OUT, the file or folder to write", c.verb.name)
	}
	spec := save.Spec{Path: out, Compress: compress, Level: c.opts["level"], Storage: c.storage,
		Threads: c.threads(), Parts: c.number("parts", 0), Shard: c.size("shard")}
	if c.verb.name == "compress" && strings.HasSuffix(out, ".tensors") {
		return usage("%s: .tensors files are not compressed: write overwire convert %s -o %s", out, c.args[0], out)
	}
	if !c.is("force") {
		if err := c.free(out); err != nil {
			return err
		}
	}
	rep, err := save.Convert(c.ctx, c.job, c.args, out, spec)
	if err != nil {
		return err
	}
	return c.show(rep, func(w io.Writer) { c.written(w, rep, compress) })
}

// written prints what was written; of the originals' hashes each with --verbose only.
func (c *call) written(w io.Writer, rep save.Report, compress bool) {
	copied := map[string]string{}
	for _, f := range rep.Copied {
		copied[f] = "copied: "
	}
	for _, f := range rep.Files {
		fmt.Fprintf(w, "%s%s\n", copied[f], errs.OneLine(f))
	}
	for _, f := range rep.Left {
		fmt.Fprintf(w, "not copied: %s\n", place(f))
	}
	equal := 0
	for _, o := range rep.Originals {
		if o.Compared {
			equal++
		}
		switch {
		case !c.is("verbose") || o.SHA256 == "":
		case compress:
			fmt.Fprintf(w, "original's sha256: %s  %s\n", o.SHA256, errs.OneLine(o.File))
		case o.Compared:
			fmt.Fprintf(w, "sha256 equal: %s  %s\n", o.SHA256, errs.OneLine(o.File))
		default:
			fmt.Fprintf(w, "sha256 (compressed over a network, which kept none to compare with): %s  %s\n", o.SHA256, errs.OneLine(o.File))
		}
	}
	if equal > 0 {
		fmt.Fprintf(w, "%s byte for byte what was compressed (sha256 equal)\n", filesText(equal, "is", "are"))
	}
	for _, f := range rep.Anew {
		fmt.Fprintf(w, "new header, since no original is kept of it: %s\n", errs.OneLine(f))
	}
	counts := humanize.Comma(int64(rep.Tensors)) + " tensors"
	if rep.Compressed > 0 {
		counts += fmt.Sprintf(", %s compressed", humanize.Comma(int64(rep.Compressed)))
	}
	if rep.Aliases > 0 {
		counts += fmt.Sprintf(", %s stored once with another", humanize.Comma(int64(rep.Aliases)))
	}
	fmt.Fprintf(w, "%s  %s  %.2f s  %s\n", sizesText(rep.BytesIn, rep.BytesOut), counts, rep.Seconds, rateText(rep.BytesIn, rep.Seconds))
	if n := len(rep.Copied); n > 0 {
		fmt.Fprintf(w, "%s of %s copied as %s\n", filesText(n, "", ""), bytesText(rep.BytesCopied), plural(n, "it is", "they are"))
	}
}

// filesText counts files, with a verb for one or for several behind it.
func filesText(n int, one, several string) string {
	return strings.TrimSpace(humanize.Comma(int64(n)) + plural(n, " file ", " files ") + plural(n, one, several))
}

func plural(n int, one, several string) string {
	if n == 1 {
		return one
	}
	return several
}

// sizesText says what tensors of in bytes came to in files of out bytes.
func sizesText(in, out int64) string {
	text := fmt.Sprintf("%s of tensors, %s written", bytesText(in), bytesText(out))
	if percent := 100 * (1 - float64(out)/float64(in)); in > 0 && percent >= 0.05 {
		text += fmt.Sprintf(": %.1f %% smaller, %s saved", percent, bytesText(in-out))
	}
	return text
}

// free refuses to replace a file or an object, or to write into a folder that is not
// empty.
func (c *call) free(out string) error {
	if open.Writable(out) {
		return c.freeRemote(out)
	}
	info, err := os.Stat(out)
	if err != nil {
		return nil // absent, or the save reports what is wrong
	}
	if info.IsDir() {
		if list, err := os.ReadDir(out); err != nil || len(list) == 0 {
			return nil
		}
	}
	return usage("%s exists; give --force to replace it", out)
}

var inspectVerb = &verb{
	name: "inspect", args: "SRC...", least: 1, most: -1,
	short: "list tensors with dtypes, shapes, sizes and codecs",
	long: `
Reads headers and indexes only, of plain safetensors files too; with --estimate
also samples of the tensors, to say what compress would save. "ratio" is
stored / original bytes. "stored as" is plain; alias, for a tensor that shares
the bytes of another; or the codec and the element type it was made for. --html
writes a page, in one file that asks no server, in which the tensors lie as a map.`,
	example: "overwire inspect model.ow.safetensors --summary",
	options: []option{{name: "summary", short: "s", doc: "print totals only, not each tensor"},
		{name: "top", value: "N", lo: 1, hi: 1 << 30, doc: "list the N largest tensors of each file"},
		{name: "estimate", short: "e", doc: "say what compress would save"},
		{name: "html", value: "FILE", doc: "write a page with a map of the tensors instead of listing them"}, storageOption},
	run: func(c *call) error {
		in, err := save.Inspect(c.ctx, c.args, c.storage)
		if err != nil {
			return err
		}
		if path := c.opts["html"]; path != "" {
			text, err := page.Model(in)
			if err == nil {
				err = atomicfile.Write(c.ctx, path, text)
			}
			if err != nil {
				return err
			}
		}
		if c.is("summary") || c.opts["html"] != "" {
			for i := range in.Sources {
				in.Sources[i].Tensors = []save.InspectedTensor{}
			}
		}
		if n := c.number("top", 0); n > 0 {
			for i := range in.Sources {
				f := &in.Sources[i]
				slices.SortStableFunc(f.Tensors, func(a, b save.InspectedTensor) int { return cmp.Compare(b.Bytes, a.Bytes) })
				f.Tensors = f.Tensors[:min(n, len(f.Tensors))]
			}
		}
		answer := struct {
			*save.Inspection
			Estimate *save.Total `json:"estimate,omitempty"`
		}{Inspection: in}
		if c.is("estimate") {
			sum, err := save.Estimate(c.ctx, c.args, c.storage)
			if err != nil {
				return err
			}
			answer.Estimate = &sum
		}
		return c.show(answer, func(w io.Writer) {
			inspected(w, in)
			if path := c.opts["html"]; path != "" {
				fmt.Fprintf(w, "%s: open it in a browser\n", path)
			}
			if sum := answer.Estimate; sum != nil {
				fmt.Fprintf(w, "compress would make about %s of %s, %.1f %% less\n", bytesText(sum.Stored), bytesText(sum.Bytes), 100*(1-sum.Ratio))
			}
		})
	},
}

// inspected prints a table of tensors for each file, and totals.
func inspected(w io.Writer, in *save.Inspection) {
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
			fmt.Fprintf(t, "  %s\t%s\t%s\t%s\t%s\t%.4f\t%s\n", safe(x.Name), x.DType, shapeText(x.Shape),
				bytesText(x.Bytes), bytesText(x.Stored), x.Ratio, coding)
		}
		t.Flush()
	}
	t := table(w)
	fmt.Fprint(t, "total\ttensors\tbytes\tstored\tratio\n")
	for _, d := range slices.Sorted(maps.Keys(in.Totals)) {
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
	short: "check every byte of files against their checksums",
	long: `
Reads every byte of compressed and .tensors files: compares the checksum of each
chunk, decodes it, and compares the hash of each tensor. Encrypted files need
their key. Plain safetensors files have no checksums, so only their structure is
checked, and the report says so. With --original, the file that compress was given is
made again, written nowhere, and its SHA-256 compared. The first damage ends the command with status 1
and names file, tensor, chunk and offset.`,
	example: "overwire verify model.ow.safetensors && echo whole",
	options: append([]option{{name: "original", doc: "compare the SHA-256 of the file that was compressed, too"}, storageOption}, decryptOptions...),
	run: func(c *call) error {
		rep, err := save.Verify(c.ctx, c.job, c.args, c.storage, c.is("original"))
		if err != nil {
			return err
		}
		return c.show(rep, func(w io.Writer) {
			for _, f := range rep.Files {
				fmt.Fprintf(w, "%s: %s, %s verified, %s tensors, %s\n", place(f.URI), f.Format, f.Checked,
					humanize.Comma(int64(f.Tensors)), bytesText(f.Bytes))
				switch o := f.Original; {
				case !c.is("original"):
				case o == nil:
					fmt.Fprint(w, "  keeps no original\n")
				case o.Compared:
					fmt.Fprintf(w, "  original: sha256 equal: %s\n", o.SHA256)
				default:
					fmt.Fprintf(w, "  original: sha256, of which the file keeps none: %s\n", o.SHA256)
				}
			}
			if rep.Note != "" {
				fmt.Fprintf(w, "note: %s\n", rep.Note)
			}
			rate := ""
			if rep.Bytes > 0 {
				rate = "  " + rateText(rep.Bytes, rep.Seconds)
			}
			fmt.Fprintf(w, "ok  %.2f s%s\n", rep.Seconds, rate)
		})
	},
}

var digestVerb = &verb{
	name: "digest", args: "SRC...", least: 1, most: -1,
	short: "print a digest of each tensor's bytes",
	long: `
Reads and decodes every tensor and prints 128 bits of its bytes, which a tensor in
memory has, too, on the CPU and on a GPU: overwire.digest(tensors) in Python. So two
files, or a file and a running model, are compared, however each is stored. Digests
find changes and mistakes; they are not cryptographic.`,
	example: "overwire digest model.ow.safetensors",
	options: append([]option{storageOption}, decryptOptions...),
	run: func(c *call) error {
		rep, err := save.Digests(c.ctx, c.job, c.args, c.storage, nil)
		if err != nil {
			return err
		}
		return c.show(rep, func(w io.Writer) {
			for _, t := range rep.Tensors {
				fmt.Fprintf(w, "%s  %s\n", t.Digest, safe(t.Name))
			}
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

func shapeText(shape []int64) string { return strings.ReplaceAll(fmt.Sprint(shape), " ", ",") }

// safe makes text from a file fit for a table: one line, not too long.
func safe(s string) string {
	const most = 200
	clean := errs.OneLine(s)
	if r := []rune(clean); len(r) > most {
		return string(r[:most]) + "..."
	}
	return clean
}

// place is where a file is, as people may see it.
func place(uri string) string { return errs.OneLine(errs.RedactURI(uri)) }
