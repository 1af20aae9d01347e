package cli

// This file defines the fetch and serve commands, and prints presigned URLs.

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/fetch"
	"github.com/overwire/overwire/gosrc/format"
	"github.com/overwire/overwire/gosrc/serve"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/source/open"
)

var fetchVerb = &verb{
	name: "fetch", args: "URL... [-o OUT]", least: 1, most: -1,
	short: "download URLs to a file or to standard output, or a folder to a folder",
	long: `
Writes the contents of the URLs (or files), in order, to OUT or to standard output. It
requests several ranges in parallel, resumes broken connections, and buffers at most
64 MiB. Any failure, such as a short body or an HTTP error, gives a nonzero exit status.
OUT appears only when it is complete. If OUT exists, it is replaced, keeping its mode and
owner; symbolic links are followed. An interrupted run leaves what it has fetched in a
hidden file next to OUT (.OUT.partial). The same command then resumes the download, unless
the object has changed. -o - writes to standard output even if that is a terminal.

An S3 folder, a Hugging Face Hub repository, or a URL that ends in a slash is downloaded
into the folder OUT, without hidden files. The server of such a URL must list its files as
overwire serve does. If OUT is not empty, this needs --force.

--presign downloads nothing: it prints an https URL, signed with your credentials,
that lets anyone read the S3 object until it expires. Keep the URL secret.`,
	example: "overwire fetch https://host/model.safetensors -o model.safetensors\n" +
		"overwire fetch https://host/a.bin https://host/b.bin | consumer\noverwire fetch s3://models/llama -o llama\n" +
		"overwire fetch s3://models/m.safetensors --presign 3600",
	options: []option{
		{name: "output", short: "o", value: "OUT", doc: "file or folder to write (default: standard output)"},
		{name: "force", short: "f", doc: "merge into a non-empty folder"},
		{name: "quiet", short: "s", doc: "print only errors"},
		{name: "verbose", short: "v", doc: "print bytes, time and rate on standard error"},
		{name: "presign", value: "SECONDS", lo: 1, hi: 604800,
			doc: "print a URL that gives read access to the S3 object for SECONDS (at most 604800)"},
		storageOption,
	},
	run: runFetch,
}

// runFetch runs the command.
func runFetch(c *call) error {
	out := c.opts["output"]
	if c.opts["presign"] != "" {
		return printPresigned(c)
	}
	if dir := remoteFolder(c); dir != "" {
		return fetchFolder(c, dir, out)
	}
	if err := checkFetch(c, out); err != nil {
		return err
	}
	spec := fetch.Spec{URIs: c.args, Storage: c.storage.Options, Own: true}
	if out == "" || out == "-" {
		rep, err := fetch.Fetch(c.ctx, c.job, spec, unwrapWriter(c.stdout))
		if err == nil && c.is("verbose") {
			fmt.Fprintf(c.stderr, "%s in %.2f s, %s\n", bytesText(rep.Bytes), rep.Seconds,
				rateText(rep.Bytes, rep.Seconds))
		}
		return err
	}
	rep, err := fetch.File(c.ctx, c.job, spec, out)
	if err != nil {
		return err
	}
	return c.show(rep, func(w io.Writer) {
		fmt.Fprintf(w, "%s: %s in %.2f s, %s\n", out, bytesText(rep.Bytes), rep.Seconds,
			rateText(rep.Bytes, rep.Seconds))
	})
}

// remoteFolder returns the only argument if it names a folder in a store that lists its files, otherwise "".
func remoteFolder(c *call) string {
	uri := c.args[0]
	isWebFolder := slices.Contains([]string{"http", "https"}, source.Scheme(uri)) && source.Folder(uri)
	if len(c.args) == 1 && (open.Writable(uri) || source.Scheme(uri) == "hf" || isWebFolder) {
		stores := open.With(c.storage.Options)
		return format.RemoteFolder(c.ctx, source.LocationOf(uri), stores.OpenLike, format.Options{List: stores.List})
	}
	return ""
}

func fetchFolder(c *call, dir, out string) error {
	if out == "" || out == "-" {
		return usage("%s is a folder: give -o and the folder to write it to", errs.RedactURI(dir))
	}
	if !c.is("force") {
		if err := refuseExisting(c, out); err != nil {
			return err
		}
	}
	rep, err := fetch.Folder(c.ctx, c.job, dir, out, c.storage.Options)
	if err != nil {
		return err
	}
	return c.show(rep, func(w io.Writer) {
		for _, f := range rep.Files {
			fmt.Fprintln(w, errs.OneLine(f))
		}
		fmt.Fprintf(w, "%s of %s in %.2f s, %s\n", countText(len(rep.Files), "file"), bytesText(rep.Bytes), rep.Seconds,
			rateText(rep.Bytes, rep.Seconds))
	})
}

// checkFetch refuses to write the bytes to a terminal or into JSON output. It also refuses
// a file name among URLs, which was probably meant as -o FILE.
func checkFetch(c *call, out string) error {
	if out != "" && out != "-" {
		return nil
	}
	if c.is("json") {
		return usage("--json needs -o OUT: without it, the bytes would go to standard output")
	}
	isURL := func(arg string) bool { return strings.Contains(arg, "://") }
	if file := slices.IndexFunc(c.args, func(arg string) bool {
		return !isURL(arg)
	}); out == "" && file >= 0 && slices.ContainsFunc(c.args, isURL) {
		return usage("%s is not a URL: write overwire fetch URL -o FILE to save to a file, or -o - to write the bytes "+
			"of URLs and files to standard output",
			c.args[file])
	}
	if out == "" && isTerminal(c.stdout) {
		return usage("standard output is a terminal: save to a file with -o FILE, or pipe the bytes to a program")
	}
	return nil
}

var serveVerb = &verb{
	name: "serve", args: "DIR", least: 1, most: 1,
	short: "serve a folder over HTTP, with simulated rates, latencies and faults",
	long: `
Serves the files in DIR, with range requests and ETags, until it is interrupted. It also
lists folders, so fetch and compress can read them. Hidden files, and links that lead out
of DIR, are not served. There is no authentication. By default only this machine can
connect; see --address. --faults sets the probability of each fault per response. The faults are ` +
		strings.Join(slices.Sorted(maps.Keys(serve.Kinds())), ", ") + ".",
	example: "overwire serve models --rate 300MB --latency 20 --faults reset=0.1,503=0.05",
	options: []option{
		{name: "address", value: "HOST:PORT", doc: "address to listen on (default 127.0.0.1:0, a free port)"},
		{name: "port", value: "N", hi: 65535, doc: "port of 127.0.0.1 to listen on"},
		{name: "rate", value: "SIZE", size: true, doc: "bytes per second over all connections, e.g. 1.25GB"},
		{name: "each", value: "SIZE", size: true, doc: "bytes per second of each connection, like the limits of " +
			"object stores"},
		{name: "latency", value: "MS", hi: 60_000, doc: "milliseconds before each response"},
		{name: "faults", value: "LIST", doc: "name=probability,..."},
		{name: "seed", value: "N", hi: 1 << 62, doc: "seed of the random faults"},
		{name: "retry-after", value: "S", hi: 3600, doc: "seconds in Retry-After of responses 429 and 503"},
		{name: "no-ranges", doc: "ignore Range headers, as old servers do"},
		{name: "chunked", doc: "send chunked responses without Content-Length"},
		{name: "cert", value: "PEM", doc: "TLS certificate"},
		{name: "key", value: "PEM", doc: "private key of the certificate"},
	},
	run: func(c *call) error {
		address := c.opts["address"]
		if c.opts["port"] != "" {
			if address != "" {
				return usage("give either --port or --address, not both")
			}
			address = fmt.Sprintf("127.0.0.1:%d", c.number("port", 0))
		}
		opt := serve.Options{
			Address: address, Cert: c.opts["cert"], Key: c.opts["key"], NoRanges: c.is("no-ranges"),
			Chunked: c.is("chunked"),
			Rate:    c.size("rate"), Each: c.size("each"), Latency: time.Duration(
				c.number("latency", 0)) * time.Millisecond,
			Seed: uint64(c.number("seed", 0)), RetryAfter: time.Duration(c.number("retry-after", 0)) * time.Second,
			Faults: map[string]float64{},
		}
		for _, word := range strings.FieldsFunc(c.opts["faults"], func(r rune) bool { return r == ',' }) {
			name, text, _ := strings.Cut(word, "=")
			var err error
			if opt.Faults[name], err = strconv.ParseFloat(text, 64); err != nil {
				return usage("--faults %s: expected name=probability,...", word)
			}
		}
		s, err := serve.New(c.args[0], opt)
		if err != nil {
			return err
		}
		if err := c.show(map[string]string{"url": s.URL()}, func(w io.Writer) {
			fmt.Fprintf(w, "%s\n", s.URL())
		}); err != nil {
			_ = s.Close()
			return err
		}
		return s.Wait(c.ctx)
	},
}

// printPresigned prints a presigned URL of an object instead of downloading it.
func printPresigned(c *call) error {
	if c.opts["output"] != "" || len(c.args) != 1 {
		return usage("--presign prints a URL of one s3://BUCKET/KEY, and takes no -o")
	}
	seconds := c.number("presign", 0)
	url, err := open.Presign(c.ctx, c.args[0], c.storage.Options, time.Duration(seconds)*time.Second)
	if err != nil {
		return err
	}
	answer := struct {
		URL     string `json:"url"`
		Expires int    `json:"expires"`
	}{url, seconds}
	return c.show(answer, func(w io.Writer) { fmt.Fprintln(w, url) })
}
