package cli

// This file defines the commands that write and check files: compress, decompress, convert, verify.

import (
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
	"github.com/overwire/overwire/gosrc/save"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/source/open"
	"github.com/overwire/overwire/gosrc/verify"
)

var writeOptions = append([]option{
	{name: "output", short: "o", value: "OUT", doc: "file or folder to write"},
	{name: "force", short: "f", doc: "replace OUT if it exists"},
	{name: "shard", value: "SIZE", size: true,
		doc: "maximum tensor bytes in one file, e.g. 5GB (default: shards as in the source)"},
	{name: "quiet", short: "q", doc: "print only errors"},
	{name: "verbose", short: "v", doc: "also print the files written and copied, hashes and times"},
	storageOption,
	threadsOption,
}, decryptOptions...)

var partsOption = option{name: "parts", value: "P", lo: 1, hi: 8,
	doc: "split columns into 1, 2, 4 or 8 parts; a slice along dimension 1 reads only the parts it needs"}

var levelOption = option{name: "level", value: "LEVEL", words: []string{"default", "smaller"},
	doc: "default, or smaller: saves another 0.2 to 1.5 % of the original size, but decodes slowly and only on the CPU"}

var sumOption = option{name: "no-sha256",
	doc: "do not store a SHA-256 of the original (hashing limits each file to the speed of one core); " +
		"decompress still restores the original, but checks only its header and tensors"}

var compressVerb = &verb{
	name: "compress", args: "SRC... [-o OUT]", least: 1, most: -1,
	short: "compress tensors without loss",
	long: `
Reads safetensors files, a folder of shards, an index.json, or torch.save files
(.bin, .pt, .pth, .ckpt; no code in them is run), and compresses each tensor that
becomes smaller. Without -o, model.safetensors becomes model.ow.safetensors in the same
folder. Reading OUT requires overwire; decompress restores the original safetensors files
byte for byte. OUT appears only when it is complete.

A folder becomes a folder with the same file names, index.json, auxiliary files (config,
tokenizer) and subfolders, such as those of a diffusers pipeline. compress lists the files
that it does not copy: safetensors files that are not part of the model, weights in other
formats above 64 MiB, hidden files, and links that lead out of the folder, except to the
blobs of a Hugging Face cache.`,
	example: "overwire compress model.safetensors -o model.ow.safetensors",
	options: append(slices.Clone(writeOptions), partsOption, levelOption, sumOption),
	run:     func(c *call) error { return runConvert(c, true) },
}

var decompressVerb = &verb{
	name: "decompress", args: "SRC... [-o OUT]", least: 1, most: -1,
	short: "turn compressed files back into plain safetensors",
	long: `
Reads compressed (or plain) files and writes plain safetensors files that any
reader can load. Without -o, model.ow.safetensors becomes model.safetensors.
Tensors are restored bit for bit. If compress made the file from one safetensors
file, decompress restores that file byte for byte, and checks its SHA-256 before OUT
appears. If the original is not stored, because the file was saved from tensors or its
shards have changed, OUT gets a new header, and decompress says so.`,
	example: "overwire decompress model.ow.safetensors -o model.safetensors",
	options: slices.Clone(writeOptions),
	run:     func(c *call) error { return runConvert(c, false) },
}

var convertVerb = &verb{
	name: "convert", args: "SRC... -o OUT --to FORMAT", least: 1, most: -1,
	short: "change format, shards or column parts",
	long: `
Copies the tensors of any number of files into one file, several shards or a
folder. --to overwire compresses, --to safetensors does not. If OUT ends in
.tensors, it becomes a tensorizer file, encrypted if you give a key or password.
If the source is also a tensorizer file, its types, modules and dtypes are kept.`,
	example: `overwire convert model-0000*.safetensors -o model.safetensors --to overwire --parts 4
overwire convert model.tensors -o secret.tensors --encrypt-key file:model.key`,
	options: slices.Concat(writeOptions, []option{partsOption, levelOption, sumOption,
		{name: "to", value: "FORMAT", words: []string{"overwire", "safetensors"},
			doc: "overwire (default) or safetensors"}}, encryptOptions),
	run: func(c *call) error {
		switch to := c.opts["to"]; to {
		case "", "overwire":
			return runConvert(c, true)
		case "safetensors":
			return runConvert(c, false)
		default:
			return usage("--to %s: write overwire or safetensors", to)
		}
	},
}

// runConvert runs compress, decompress and convert.
func runConvert(c *call, compress bool) error {
	out := c.opts["output"]
	if out == "" {
		out = usualOutput(c)
		c.outputChosen = true
	}
	if out == "" {
		for _, arg := range c.args {
			if _, err := os.Stat(arg); err != nil && !source.Remote(arg) {
				return errs.In("open", arg, errs.FromOS(err))
			}
		}
		return usage("%s needs -o OUT, the file or folder to write", c.verb.name)
	}
	c.opts["output"] = out
	spec := save.Spec{Path: out, Compress: compress, Level: c.opts["level"], Storage: c.storage,
		Threads: c.threads(), Parts: c.number("parts", 0), Shard: c.size("shard"), NoSHA256: c.is("no-sha256")}
	if c.verb.name == "compress" && strings.HasSuffix(out, ".tensors") {
		return usage("%s: .tensors files cannot be compressed: write overwire convert %s -o %s", out, c.args[0], out)
	}
	if !c.is("force") {
		if err := refuseExisting(c, out); err != nil {
			return err
		}
	}
	rep, err := convert.Convert(c.ctx, c.job, c.args, out, spec)
	if err != nil {
		return err
	}
	return c.show(rep, func(w io.Writer) { printWritten(c, w, rep, compress) })
}

// marked is the default suffix of compressed files.
const marked = ".ow" + modelfiles.Extension

// usualOutput returns the output of compress and decompress for one local file without
// -o: model.ow.safetensors for model.safetensors, and the reverse. "" means that -o is
// needed.
func usualOutput(c *call) string {
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

// printWritten prints one line about the output, after a line for each file that was not copied or
// not restored byte for byte. --verbose adds files, hashes and times.
func printWritten(c *call, w io.Writer, rep save.Report, compress bool) {
	if c.is("verbose") {
		printDetails(c, w, rep, compress)
	}
	for _, f := range rep.Left {
		fmt.Fprintf(w, "not copied: %s\n", place(f))
	}
	for _, f := range rep.Anew {
		fmt.Fprintf(w, "new header, because the source does not store the original: %s\n", errs.OneLine(f))
	}
	if c.outputChosen {
		fmt.Fprintf(w, "%s: ", errs.OneLine(c.opts["output"]))
	}
	sizes := bytesText(rep.BytesIn)
	if compress {
		sizes = sizesText(rep.BytesIn, rep.BytesOut)
	}
	fmt.Fprintf(w, "%s, %s, %.1f s", sizes, countText(rep.Tensors, "tensor"), rep.Seconds)
	equal := 0
	for _, o := range rep.Originals {
		if o.Compared {
			equal++
		}
	}
	if equal > 0 {
		fmt.Fprintf(w, ", %s identical to the original (SHA-256)", countText(equal, "file"))
	}
	fmt.Fprintln(w)
	if compress && rep.BytesOut > rep.BytesIn {
		fmt.Fprintln(w, "the result is larger than the source: its index takes more bytes than compression saved")
	}
}

func printDetails(c *call, w io.Writer, rep save.Report, compress bool) {
	copies := map[string]string{}
	for _, f := range rep.Copied {
		copies[f] = "copied: "
	}
	for _, f := range rep.Files {
		fmt.Fprintf(w, "%s%s\n", copies[f], errs.OneLine(f))
	}
	what := "identical to the original, sha256"
	if compress {
		what = "sha256 of the original"
	}
	for _, o := range rep.Originals {
		if o.SHA256 != "" {
			fmt.Fprintf(w, "%s: %s  %s\n", what, o.SHA256, errs.OneLine(o.File))
		}
	}
	fmt.Fprintf(w, "%s compressed, %s, %s\n", countText(rep.Compressed, "tensor"),
		countText(rep.Aliases, "duplicate"), rateText(rep.BytesIn, rep.Seconds))
	fmt.Fprintf(w, "thread seconds: %s\n", rep.Stages.InSeconds())
	if n := len(rep.Copied); n > 0 {
		fmt.Fprintf(w, "%s copied, %s\n", countText(n, "auxiliary file"), bytesText(rep.BytesCopied))
	}
}

// countText returns a number and its noun, in the plural unless the number is 1.
func countText[N int | int64](n N, noun string) string {
	return humanize.Comma(int64(n)) + " " + noun + plural(int(n), "", "s")
}

func plural(n int, one, several string) string {
	if n == 1 {
		return one
	}
	return several
}

// sizesText describes the size before and after compression.
func sizesText(in, out int64) string {
	text := bytesText(in) + " -> " + bytesText(out)
	if in > 0 {
		text += fmt.Sprintf(" (%.0f %%)", 100*float64(out)/float64(in))
	}
	return text
}

// refuseExisting returns an error if out is an existing file or object, or a non-empty folder.
func refuseExisting(c *call, out string) error {
	held, err := open.Occupied(c.ctx, out, c.storage.Options)
	switch held {
	case open.Full:
		return usage("%s is a folder with files in it; give --force to write into it and replace files with the "+
			"same names", out)
	case open.Taken:
		return usage("%s exists; give --force to replace it", errs.RedactURI(out))
	}
	return err
}

var verifyVerb = &verb{
	name: "verify", args: "SRC...", least: 1, most: -1,
	short: "check every byte of files against its checksum",
	long: `
Reads every byte of compressed and .tensors files: it compares the checksum of each
chunk, decodes the chunk, and compares the hash of each tensor. Encrypted files need
their key. Plain safetensors and GGUF files have no checksums, so only their structure
is checked, and the report says so. Safetensors files from the Hugging Face Hub, in its
cache or in a folder from "hf download --local-dir", are compared with the Hub's SHA-256.
--original also restores the file that was compressed, in memory, and compares its SHA-256.
verify stops at the first corrupt chunk with status 1, and names file, tensor, chunk and
offset.

--against safetensors is a check by another program: it decompresses the model into a
temporary folder and compares every tensor with what the safetensors library reads.`,
	example: "overwire verify model.ow.safetensors && echo intact",
	options: append([]option{
		{name: "original", doc: "also restore the file that was compressed, and compare its SHA-256"},
		{name: "against", value: "PLAIN", words: []string{"safetensors"},
			doc: "compare every tensor with what the safetensors library reads from PLAIN, which names plain " +
				"files, or from a decompressed copy if PLAIN is the word `safetensors`; needs torch"},
		storageOption}, decryptOptions...),
	run: func(c *call) error {
		if c.opts["against"] != "" {
			return errs.New(errs.ErrNotSupported, "verify --against needs the overwire command of the Python package")
		}
		rep, err := verify.Verify(c.ctx, c.job, c.args, c.storage, c.is("original"))
		if err != nil {
			return err
		}
		rep.DescribeOriginals(c.env.Copies)
		return c.show(rep, func(w io.Writer) {
			for _, f := range rep.Files {
				fmt.Fprintf(w, "%s: %s, %s verified, %s, %s\n", place(f.URI), f.Format, f.Checked,
					countText(f.Tensors, "tensor"), bytesText(f.Bytes))
				if f.SHA256 != "" {
					fmt.Fprintf(w, "  identical to the Hub's file, sha256 %s\n", f.SHA256)
				}
				switch o := f.Original; {
				case !c.is("original"):
				case o == nil:
					fmt.Fprint(w, "  original: not stored in this file\n")
				case o.Compared:
					fmt.Fprintf(w, "  original: identical, sha256 %s\n", o.SHA256)
				default:
					fmt.Fprintf(w, "  original: no sha256 stored to compare with; the restored file has %s\n", o.SHA256)
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

// safe shortens text from a file to one line of at most 200 characters.
func safe(s string) string {
	const most = 200
	clean := errs.OneLine(s)
	if r := []rune(clean); len(r) > most {
		return string(r[:most]) + "..."
	}
	return clean
}

// place returns a file's location for printing, without secrets.
func place(uri string) string { return errs.OneLine(errs.RedactURI(uri)) }
