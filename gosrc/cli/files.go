package cli

// This file has the verbs that write and check files: compress, decompress, convert,
// verify.

import (
	"cmp"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/dustin/go-humanize"

	"github.com/overwire/overwire/gosrc/convert"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/modelfiles"
	"github.com/overwire/overwire/gosrc/internal/regular"
	"github.com/overwire/overwire/gosrc/save"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/source/open"
	"github.com/overwire/overwire/gosrc/verify"
)

var writeOptions = append([]option{
	{name: "output", short: "o", value: "OUT", doc: "file or folder to write"},
	{name: "force", short: "f", doc: "replace OUT if it exists"},
	{name: "shard", value: "SIZE", size: true,
		doc: "most tensor bytes in one file, e.g. 5GB (default: the shards of the source)"},
	{name: "quiet", short: "q", doc: "print nothing but errors"},
	{name: "verbose", short: "v", doc: "print the SHA-256 of each original, too"},
	storageOption,
	threadsOption,
}, decryptOptions...)

var partsOption = option{name: "parts", value: "P", lo: 1, hi: 8,
	doc: "divide columns into 1, 2, 4 or 8 parts, so that a slice along dimension 1 reads only its own"}

var levelOption = option{name: "level", value: "LEVEL",
	doc: "default, or smaller: 0.2 to 1.5 % of the original smaller, decoded by the CPU alone, and slowly"}

var sumOption = option{name: "no-sha256",
	doc: "keep no SHA-256 of the original, which bounds each file's speed by one core: " +
		"decompress still gives that file, and proves header and tensors"}

var compressVerb = &verb{
	name: "compress", args: "SRC... [-o OUT]", least: 1, most: -1,
	short: "compress tensors without loss",
	long: `
Reads safetensors files, a folder of shards, an index.json, or what torch.save wrote
(.bin, .pt, .pth, .ckpt; nothing in it is run), and writes the same tensors
compressed, where compression makes them smaller. Without -o, model.safetensors becomes
model.ow.safetensors beside it. decompress gives the same
safetensors files back, byte for byte; reading OUT needs overwire. OUT is complete or
absent, whatever happens meanwhile. A folder becomes a folder: it keeps its file names, its
index.json, its other files (config, tokenizer) and the folders below it, as a
diffusers pipeline has them. Listed instead of copied are other weights (of 64 MiB
and more if not safetensors), hidden files, and links that lead out of the folder
to anything but a Hugging Face cache's own blobs.`,
	example: "overwire compress model.safetensors -o model.ow.safetensors",
	options: append(slices.Clone(writeOptions), partsOption, levelOption, sumOption),
	run:     func(c *call) error { return c.convert(true) },
}

var decompressVerb = &verb{
	name: "decompress", args: "SRC... [-o OUT]", least: 1, most: -1,
	short: "turn compressed files back into plain safetensors",
	long: `
Reads compressed (or plain) files and writes plain safetensors files that any
reader can load; without -o, model.ow.safetensors becomes model.safetensors.
Every tensor is bit for bit what was compressed. A file that compress made from
one safetensors file becomes that very file again: its SHA-256 is compared before
OUT appears. A file that keeps no original (it was saved from tensors, or is now
in other shards) gets a new header; the output says so.`,
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
	options: slices.Concat(writeOptions, []option{partsOption, levelOption, sumOption,
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
	out := cmp.Or(c.opts["output"], c.usualOutput())
	if out == "" {
		return usage("%s needs -o OUT, the file or folder to write", c.verb.name)
	}
	c.opts["output"] = out
	spec := save.Spec{Path: out, Compress: compress, Level: c.opts["level"], Storage: c.storage,
		Threads: c.threads(), Parts: c.number("parts", 0), Shard: c.size("shard"), NoSHA256: c.is("no-sha256")}
	if c.verb.name == "compress" && strings.HasSuffix(out, ".tensors") {
		return usage("%s: .tensors files are not compressed: write overwire convert %s -o %s", out, c.args[0], out)
	}
	if !c.is("force") {
		if err := c.refuseExisting(out); err != nil {
			return err
		}
	}
	rep, err := convert.Convert(c.ctx, c.job, c.args, out, spec)
	if err != nil {
		return err
	}
	return c.show(rep, func(w io.Writer) { c.printWritten(w, rep, compress) })
}

// marked is how the names of compressed files end, where nothing else is asked for.
const marked = ".ow" + modelfiles.Extension

// usualOutput is what compress and decompress write of one local file without -o: of
// model.safetensors model.ow.safetensors, and the reverse. "": -o is needed.
func (c *call) usualOutput() string {
	stem, isModel := strings.CutSuffix(c.args[0], modelfiles.Extension)
	plain, isMarked := strings.CutSuffix(c.args[0], marked)
	switch local := len(c.args) == 1 && !source.Remote(c.args[0]); {
	case local && c.verb.name == "compress" && isModel && !isMarked && c.opts["shard"] == "":
		return stem + marked
	case local && c.verb.name == "decompress" && isMarked && c.opts["shard"] == "":
		return plain + modelfiles.Extension
	}
	return ""
}

// printWritten prints what was written; of the originals' hashes each with --verbose only.
func (c *call) printWritten(w io.Writer, rep save.Report, compress bool) {
	copies := map[string]string{}
	for _, f := range rep.Copied {
		copies[f] = "copied: "
	}
	for _, f := range rep.Files {
		fmt.Fprintf(w, "%s%s\n", copies[f], errs.OneLine(f))
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
		default:
			fmt.Fprintf(w, "sha256 equal: %s  %s\n", o.SHA256, errs.OneLine(o.File))
		}
	}
	if equal > 0 {
		fmt.Fprintf(w, "%s byte for byte what was compressed (sha256 equal)\n", filesText(equal, "is", "are"))
	}
	for _, f := range rep.Anew {
		fmt.Fprintf(w, "new header, since no original is kept of it: %s\n", errs.OneLine(f))
	}
	counts := countText(rep.Tensors, "tensor")
	if rep.Compressed > 0 {
		counts += fmt.Sprintf(", %s compressed", humanize.Comma(int64(rep.Compressed)))
	}
	if rep.Aliases > 0 {
		counts += fmt.Sprintf(", %s stored once with another", humanize.Comma(int64(rep.Aliases)))
	}
	fmt.Fprintf(w, "%s  %s  %.2f s  %s\n", sizesText(rep.BytesIn, rep.BytesOut), counts, rep.Seconds,
		rateText(rep.BytesIn, rep.Seconds))
	if c.is("verbose") {
		fmt.Fprintf(w, "seconds of threads: %s\n", rep.Stages.InSeconds())
	}
	if n := len(rep.Copied); n > 0 {
		fmt.Fprintf(w, "%s of %s copied as %s\n", filesText(n, "", ""), bytesText(rep.BytesCopied),
			plural(n, "it is", "they are"))
	}
}

// filesText counts files, with a verb for one or for several behind it.
func filesText(n int, one, several string) string {
	return strings.TrimSpace(countText(n, "file") + " " + plural(n, one, several))
}

// countText is a number of things, and their noun.
func countText[N int | int64](n N, noun string) string {
	return humanize.Comma(int64(n)) + " " + noun + plural(int(n), "", "s")
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

// refuseExisting refuses to replace a file or an object, or to write into a folder that is not
// empty.
func (c *call) refuseExisting(out string) error {
	if open.Writable(out) {
		return c.refuseExistingRemote(out)
	}
	info, err := regular.FindTarget(out)
	if info == nil {
		return errs.In("save", out, err)
	}
	if info.IsDir() {
		if list, err := os.ReadDir(out); err != nil || len(list) == 0 {
			return errs.In("save", out, errs.FromOS(err))
		}
		return usage("%s is a folder with files in it; give --force to write into it, over files of the same names",
			out)
	}
	return usage("%s exists; give --force to replace it", out)
}

var verifyVerb = &verb{
	name: "verify", args: "SRC...", least: 1, most: -1,
	short: "check every byte of files against their checksums",
	long: `
Reads every byte of compressed and .tensors files: compares the checksum of each
chunk, decodes it, and compares the hash of each tensor. Encrypted files need
their key. Plain safetensors and GGUF files have no checksums, so only their structure
is checked, and the report says so. With --original, the file that compress was given is
made again, written nowhere, and its SHA-256 compared. The first damage ends the command with status 1
and names file, tensor, chunk and offset.`,
	example: "overwire verify model.ow.safetensors && echo whole",
	options: append([]option{{name: "original", doc: "compare the SHA-256 of the file that was compressed, too"},
		storageOption}, decryptOptions...),
	run: func(c *call) error {
		rep, err := verify.Verify(c.ctx, c.job, c.args, c.storage, c.is("original"))
		if err != nil {
			return err
		}
		return c.show(rep, func(w io.Writer) {
			for _, f := range rep.Files {
				fmt.Fprintf(w, "%s: %s, %s verified, %s, %s\n", place(f.URI), f.Format, f.Checked,
					countText(f.Tensors, "tensor"), bytesText(f.Bytes))
				switch o := f.Original; {
				case !c.is("original"):
				case o == nil:
					fmt.Fprint(w, "  keeps no original\n")
				case o.Compared:
					fmt.Fprintf(w, "  original: sha256 equal: %s\n", o.SHA256)
				default:
					fmt.Fprintf(w, "  original: the file keeps no sha256 to compare; made again it has %s\n", o.SHA256)
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
