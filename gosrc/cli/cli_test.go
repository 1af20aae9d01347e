package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/overwire/overwire/gosrc/knob"
	"github.com/overwire/overwire/gosrc/load"
	"github.com/overwire/overwire/gosrc/save"
	"github.com/overwire/overwire/gosrc/stored"
)

// overwire runs one command line.
func overwire(argv ...string) (status int, stdout, stderr string) {
	var out, messages bytes.Buffer
	status = Main(context.Background(), nil, argv, &out, &messages, Env{})
	return status, out.String(), messages.String()
}

// must runs a command line that has to succeed.
func must(t *testing.T, argv ...string) string {
	t.Helper()
	status, out, stderr := overwire(argv...)
	if status != ExitOK {
		t.Fatalf("overwire %q: status %d: %s", argv, status, stderr)
	}
	return out
}

// made writes generated weights and returns their path.
func made(t *testing.T, kind string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "plain.safetensors")
	must(t, "bench", "gen", kind, path, "--size", "2MB", "--seed", "7")
	return path
}

// Every wrong command line exits with a status and a message that says what to write.
func TestUsage(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "x.safetensors")
	if err := os.WriteFile(file, []byte("not a model"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		argv   []string
		status int
		says   string
	}{
		{nil, ExitUsage, "usage: overwire COMMAND"},
		{[]string{"squash"}, ExitUsage, `unknown command "squash"; see`},
		{[]string{"comprss"}, ExitUsage, "did you mean compress?"},
		{[]string{"help", "inspct"}, ExitUsage, "did you mean inspect?"},
		{[]string{"inspect", "--sumary", file}, ExitUsage, "did you mean --summary?"},
		{[]string{"inspect", "-"}, ExitUsage, "cannot read standard input"},
		{[]string{"compress", file, "-o", "-"}, ExitUsage, "cannot write to standard output"},
		{[]string{"fetch", "https://host/x", file}, ExitUsage, "fetch URL -o FILE"},
		{[]string{"help", "squash"}, ExitUsage, "unknown command"},
		{[]string{"compress"}, ExitUsage, "write: overwire compress SRC... [-o OUT]"},
		{[]string{"convert", file}, ExitUsage, "needs -o OUT"},
		{[]string{"compress", file, "-o"}, ExitUsage, "--output needs a value"},
		{[]string{"compress", file, "-o", "--json"}, ExitUsage, "--output needs a value"},
		{[]string{"compress", file, "-o", file}, ExitUsage, "--force"},
		{[]string{"compress", file, "-o", "y", "-o", "z"}, ExitUsage, "given twice"},
		{[]string{"compress", file, "-o", "y", "--threads", "none"}, ExitUsage, "expected a number from 1 to"},
		{[]string{"compress", file, "-o", "y", "--shard", "large"}, ExitUsage, "expected a size"},
		{[]string{"compress", file, "-o", "y", "--shard", "5"}, ExitUsage,
			"this would be 5 bytes; add the unit: 5GB"},
		{[]string{"compress", file, "-o", "y.tensors"}, ExitUsage, "overwire convert"},
		{[]string{"convert", file, "-o", "y.gguf"}, ExitUsage, "cannot write .gguf files"},
		{[]string{"convert", file, "-o", "config.json"}, ExitUsage, "cannot write .json files"},
		{[]string{"compress", "-x", file}, ExitUsage, "no option -x"},
		{[]string{"convert", file, "-o", "y", "--to", "zip"}, ExitUsage, "overwire or safetensors"},
		{[]string{"inspect", "--json=yes", file}, ExitUsage, "takes no value"},
		{[]string{"inspect", ""}, ExitUsage, "empty"},
		{[]string{"bench", "speed"}, ExitUsage, "write overwire bench"},
		{[]string{"bench", "--size", "1MB", "--device", "tpu"}, ExitUsage, "expected"},
		{[]string{"bench", "gen", "gpt", "out"}, ExitUsage, "llama-bf16"},
		{[]string{"bench", "gen"}, ExitUsage, "moe-bf16"},
		{[]string{"bench", "--file", filepath.Join(dir, "none")}, ExitNotFound, "none"},
		{[]string{"--version", "please"}, ExitUsage, "no option except --json"},
		{[]string{"version"}, ExitUsage, "write overwire --version"},
		{[]string{"info"}, ExitUsage, "write overwire inspect"},
		{[]string{"ls"}, ExitUsage, "write overwire inspect"},
		{[]string{"download"}, ExitUsage, "write overwire fetch"},
		{[]string{"benchmark"}, ExitUsage, "write overwire bench"},
		{[]string{"compress", filepath.Join(dir, "none")}, ExitNotFound, "not found"},
		{[]string{"compress", dir}, ExitUsage, "needs -o"},
		{[]string{"digest", file}, ExitUsage, "write overwire inspect SRC --digests"},
		{[]string{"help", "presign"}, ExitUsage, "--presign SECONDS"},
		{[]string{"fetch", "--presign", "s3://b/k"}, ExitUsage, "write --presign SECONDS"},
		{[]string{"inspect", file, "--filter", "[a"}, ExitUsage, "--filter [a: invalid pattern"},
		{[]string{"inspect", file, "--digests", "--html", "y"}, ExitUsage, "cannot be combined"},
		{[]string{"inspect", file, "--estimate", "--filter", "a*"}, ExitUsage, "omit --filter"},
		{[]string{"fetch", file, "--presign", "60"}, ExitNotSupported, "only s3://"},
		{[]string{"fetch", file, "--presign", "60", "-o", "y"}, ExitUsage, "takes no -o"},
		{[]string{"inspect", filepath.Join(dir, "none")}, ExitNotFound, "none"},
		{[]string{"inspect", file}, ExitBad, "x.safetensors"},
		{[]string{"verify", file}, ExitBad, "x.safetensors"},
		{[]string{"verify", "--", "-x"}, ExitNotFound, "-x"},
	} {
		status, out, stderr := overwire(c.argv...)
		if status != c.status || !strings.Contains(stderr, c.says) || out != "" {
			t.Errorf("overwire %q: status %d, want %d; stdout %q; stderr %q, want %q", c.argv, status, c.status, out,
				stderr, c.says)
		}
	}
}

// Every command has a help text with an example and the exit statuses, printed on stdout by --help and by help COMMAND.
func TestHelp(t *testing.T) {
	all := must(t, "--help")
	if n := len(verbs()); n > 15 {
		t.Errorf("%d verbs: let one become an option of another", n)
	}
	for _, v := range verbs() {
		if !strings.Contains(all, "\n  "+v.name+" ") {
			t.Errorf("help does not name %s", v.name)
		}
		one := must(t, v.name, "--help")
		if one != must(t, "help", v.name) {
			t.Errorf("%s: two help texts", v.name)
		}
		for _, want := range []string{"usage: overwire " + v.name, "example:", "overwire " + v.name, "exit status: 0 on success"} {
			if !strings.Contains(one, want) {
				t.Errorf("help of %s lacks %q:\n%s", v.name, want, one)
			}
		}
		for line := range strings.SplitSeq(one, "\n") {
			if len(line) > helpWidth {
				t.Errorf("help of %s has a line of %d columns: %s", v.name, len(line), line)
			}
		}
		for _, o := range v.options {
			if !strings.Contains(one, "--"+o.name) || o.doc == "" {
				t.Errorf("%s: option %s", v.name, o.name)
			}
		}
		if count := strings.Count(one, "--json  "); count != 1 && v != runVerb || count != 0 && v == runVerb {
			t.Errorf("help of %s lists --json %d times", v.name, count)
		}
	}
}

// Without -o, compress and decompress name the output after the source, and replace nothing.
func TestUsualOutput(t *testing.T) {
	for _, c := range []struct{ verb, source, want string }{
		{"compress", "a/m.safetensors", "a/m.ow.safetensors"}, {"decompress", "a/m.ow.safetensors", "a/m.safetensors"},
		{"compress", "a/m.ow.safetensors", ""}, {"decompress", "a/m.safetensors", ""}, {"compress", "folder", ""},
		{"compress", "s3://b/m.safetensors", ""}, {"convert", "a/m.safetensors", ""}, {"compress", "m.tensors", ""},
	} {
		words := arguments{verb: findVerb(c.verb), args: []string{c.source}}
		if got := usualOutput(&call{arguments: words}); got != c.want {
			t.Errorf("%s %s: %q, want %q", c.verb, c.source, got, c.want)
		}
	}
	plain := made(t, "llama-bf16")
	must(t, "compress", plain)
	small := strings.TrimSuffix(plain, ".safetensors") + ".ow.safetensors"
	if status, _, stderr := overwire("decompress", small); status != ExitUsage || !strings.Contains(stderr, "--force") {
		t.Errorf("status %d, %s", status, stderr)
	}
	must(t, "decompress", small, "-f")
}

// decompress restores exactly the file that compress read. verify and inspect accept the compressed file.
func TestRoundTrip(t *testing.T) {
	for _, kind := range []string{"llama-bf16", "hostile", "tied"} {
		plain := made(t, kind)
		dir := filepath.Dir(plain)
		small, back := filepath.Join(dir, "-small.safetensors"), filepath.Join(dir, "back.safetensors")
		must(t, "compress", "--output="+small, plain)
		if out := must(t, "verify", "--", small); !strings.Contains(out, "contents verified") {
			t.Errorf("%s: verify printed %q", kind, out)
		}
		if out := must(t, "inspect", small, plain); !strings.Contains(out, "X16/") || !strings.Contains(out, "plain") {
			t.Errorf("%s: inspect printed %q", kind, out)
		}
		must(t, "decompress", small, "-o", back)
		a, err := os.ReadFile(plain)
		if err != nil {
			t.Fatal(err)
		}
		b, err := os.ReadFile(back)
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(a, b) {
			t.Errorf("%s: decompress wrote a different file", kind)
		}
		// A second run is refused. With --force it writes the same file.
		if status, _, _ := overwire("compress", plain, "-o", filepath.Join(dir, "x"), "--level", "best"); status == 0 {
			t.Errorf("%s: an unknown level is accepted", kind)
		}
		if status, _, _ := overwire("decompress", small, "-o", back); status != ExitUsage {
			t.Errorf("%s: overwritten without --force: %d", kind, status)
		}
		must(t, "convert", plain, "-o", back, "--force", "--to", "overwire", "--threads", "1")
		a, _ = os.ReadFile(small)
		b, _ = os.ReadFile(back)
		if !bytes.Equal(a, b) {
			t.Errorf("%s: threads or paths change the bytes", kind)
		}
		must(t, "compress", plain, "-o", back, "--force", "--level", "smaller")
		if out := must(t, "inspect", back); !strings.Contains(out, "planes/") {
			t.Errorf("%s: at level smaller, inspect printed %q", kind, out)
		}
	}
}

// A corrupt file gives exit status 1. The error names the tensor and the chunk, as text and in JSON.
func TestDamage(t *testing.T) {
	small := filepath.Join(t.TempDir(), "small.safetensors")
	must(t, "compress", made(t, "llama-bf16"), "-o", small)
	b, err := os.ReadFile(small)
	if err != nil {
		t.Fatal(err)
	}
	b[len(b)/2] ^= 4
	if err := os.WriteFile(small, b, 0o600); err != nil {
		t.Fatal(err)
	}
	status, out, stderr := overwire("verify", small, "--json")
	var doc struct {
		Error struct {
			Class, Message, Source, Tensor string
			Chunk, Offset                  *int64
			Status                         int
		}
	}
	if err := json.Unmarshal([]byte(out), &doc); err != nil {
		t.Fatalf("%v: %q", err, out)
	}
	e := doc.Error
	if status != ExitBad || e.Status != ExitBad || e.Class != "CorruptError" || e.Tensor == "" || e.Chunk == nil ||
		e.Offset == nil {
		t.Errorf("status %d, %+v", status, e)
	}
	if !strings.Contains(stderr, e.Tensor) {
		t.Errorf("stderr %q", stderr)
	}
}

// With --json every command prints exactly one JSON document.
func TestJSON(t *testing.T) {
	plain := made(t, "llama-bf16")
	small := filepath.Join(filepath.Dir(plain), "small.safetensors")
	for _, argv := range [][]string{
		{"compress", plain, "-o", small}, {"inspect", small}, {"inspect", "-s", plain}, {"verify", small, plain},
		{"decompress", small, "-o", small + "2"}, {"convert", plain, "-o", small + "3"},
		{"load", "--plan", small, "--keep", "1MB"}, {"load", "--plan", plain, "--device", "cuda:1"}, {"doctor", small},
		{"load", small, "--repeat", "2", "--trace", small + ".json"},
		{"inspect", small + ".json", "--html", small + ".html"}, {"load", plain, "--device", "cpu"},
		{"doctor"}, {"doctor", "--env"}, {"inspect", small, "--digests"},
		{"bench", "gen", "int4", "--size", "1MB", small + "4"},
	} {
		out := must(t, append(argv, "--json")...)
		dec := json.NewDecoder(strings.NewReader(out))
		var v map[string]any
		if err := dec.Decode(&v); err != nil || len(v) == 0 || dec.More() {
			t.Errorf("overwire %q --json: %v: %q", argv, err, out)
		}
	}
}

// load prints the rate and, with a trace, every stage. An unknown device is refused.
func TestLoad(t *testing.T) {
	plain := made(t, "llama-bf16")
	small := filepath.Join(filepath.Dir(plain), "small.safetensors")
	must(t, "compress", plain, "-o", small)
	trace := small + ".json"
	out := must(t, "load", small, "--trace", trace, "--repeat", "2", "-j", "2")
	for _, want := range []string{"tensors, ", " GB/s", "read", "check", "decode", "stage: wait for a slot",
		"2 workers"} {
		if !strings.Contains(out, want) {
			t.Errorf("load lacks %q:\n%s", want, out)
		}
	}
	if b, err := os.ReadFile(trace); err != nil || !json.Valid(b) {
		t.Errorf("the trace: %v", err)
	}
	page := filepath.Join(filepath.Dir(plain), "small.safetensors.html")
	// One worker may do all of the work.
	if out := must(t, "inspect", trace, "--html", page); !strings.Contains(out, page) ||
		!regexp.MustCompile(` of [23] workers and queues`).MatchString(out) {
		t.Errorf("inspect of the trace printed %s", out)
	}
	if b, err := os.ReadFile(page); err != nil || !strings.Contains(string(b), "worker ") {
		t.Errorf("the page of the trace: %v", err)
	}
	// A page replaces only a page, and a trace only a trace.
	must(t, "inspect", trace, "--html", page)
	must(t, "load", plain, "--device", "cpu", "--trace", trace)
	config := filepath.Join(filepath.Dir(plain), "config.json")
	if err := os.WriteFile(config, []byte("{}"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{plain, small, config} {
		before, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		for _, argv := range [][]string{{"inspect", small, "--html", path}, {"inspect", trace, "--html", path},
			{"load", small, "--device", "cpu", "--trace", path}} {
			var stdout, stderr bytes.Buffer
			status := Main(t.Context(), nil, argv, &stdout, &stderr, Env{})
			if after, err := os.ReadFile(path); status != ExitUsage || err != nil || !bytes.Equal(before, after) ||
				!strings.Contains(stderr.String(), "a file of another kind") {
				t.Errorf("%q: status %d, %v, %s", argv, status, err, &stderr)
			}
		}
	}
	none, no := small+"x.json", small+"y.json"
	if err := os.WriteFile(no, []byte(`{"traceEvents":[]}`), 0o600); err != nil {
		t.Fatal(err)
	}
	for argv, want := range map[[4]string]int{
		{"inspect", no, "--html", page}: ExitBad, {"inspect", none, "--html", page}: ExitNotFound,
		{"inspect", trace, "--html", trace}: ExitUsage,
	} {
		var stdout, stderr bytes.Buffer
		if status := Main(t.Context(), nil, argv[:], &stdout, &stderr, Env{}); status != want {
			t.Errorf("%q: status %d, %s", argv, status, &stderr)
		}
	}
	for _, argv := range [][]string{{"load", small, "--device", "tpu"}, {"load", small, "--device", "cuda:x"},
		{"load", small, "--trace"}, {"load"}} {
		want := ExitUsage
		if slices.Contains(argv, "tpu") {
			want = ExitNotSupported // a device that this build does not support
		}
		var stdout, stderr bytes.Buffer
		if status := Main(t.Context(), nil, argv, &stdout, &stderr, Env{}); status != want {
			t.Errorf("%q: status %d, %s", argv, status, &stderr)
		}
	}
}

// The text output shows what was gained, and gives no rate for bytes that were not read.
func TestResultTexts(t *testing.T) {
	for _, c := range []struct {
		in, out int64
		want    string
	}{
		{0, 300, "0 B -> 300 B"},
		{1e6, 1_000_300, "1.0 MB -> 1.0 MB (100 %)"},
		{91e6, 76e6, "91 MB -> 76 MB (84 %)"},
	} {
		if got := sizesText(c.in, c.out); got != c.want {
			t.Errorf("%q, want %q", got, c.want)
		}
	}
	plain := made(t, "llama-bf16")
	if out := must(t, "load", plain); !strings.Contains(out, "mapped, not read") || strings.Contains(out, "GB/s") {
		t.Errorf("load printed %q", out)
	}
	if out := must(t, "verify", plain); strings.Contains(out, "GB/s") {
		t.Errorf("verify printed %q", out)
	}
}

// The progress line is cleared when the result appears.
func TestClear(t *testing.T) {
	var out bytes.Buffer
	c := &call{stdout: &out, clear: func() { out.WriteString("[cleared]") }}
	if err := c.show(nil, func(w io.Writer) {
		fmt.Fprint(w, "result")
	}); err != nil || out.String() != "[cleared]result" {
		t.Errorf("%v, %q", err, &out)
	}
}

// --json may come before the command.
func TestJSONFirst(t *testing.T) {
	if a, b := must(t, "--json", "--version"), must(t, "--version", "--json"); a != b {
		t.Errorf("%q and %q", a, b)
	}
	if status, out, _ := overwire("--json", "squash"); status != ExitUsage ||
		!strings.Contains(out, `"ArgumentError"`) {
		t.Errorf("status %d, %q", status, out)
	}
}

// --json and --help take effect anywhere on the command line, even after an invalid value.
func TestJSONAndHelpAfterAWrongValue(t *testing.T) {
	if status, out, _ := overwire("load", "none", "--repeat", "0", "--json"); status != ExitUsage ||
		!strings.Contains(out, `"ArgumentError"`) {
		t.Errorf("status %d, %q", status, out)
	}
	if out := must(t, "compress", "--threads", "none", "--help"); !strings.HasPrefix(out, "usage: overwire compress") {
		t.Error(out)
	}
}

// A cancelled command exits with 130 and leaves no file.
func TestInterrupted(t *testing.T) {
	plain := made(t, "llama-bf16")
	out := filepath.Join(filepath.Dir(plain), "out.safetensors")
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	var stdout, stderr bytes.Buffer
	if status := Main(ctx, nil, []string{"compress", plain, "-o", out}, &stdout, &stderr,
		Env{}); status != ExitInterrupted {
		t.Errorf("status %d: %s", status, &stderr)
	}
	if text := stderr.String(); text != "overwire: interrupted; nothing was written\n" {
		t.Error(text)
	}
	list, _ := os.ReadDir(filepath.Dir(plain))
	if len(list) != 1 {
		t.Errorf("left behind: %v", list)
	}
}

// doctor shows every setting and where it comes from, and warns about a preload that does not exist.
func TestDoctor(t *testing.T) {
	t.Cleanup(func() { knob.Load(nil) })
	knob.Load(map[string]string{"PRELOAD_PATH": "/no/such/file", "NUM_THREADS": "3"})
	out := must(t, "doctor", "--env")
	for _, r := range knob.Table() {
		if !strings.Contains(out, r.Name) || !strings.Contains(out, r.Doc) {
			t.Errorf("doctor --env lacks %s", r.Name)
		}
	}
	for _, want := range []string{"decoder", "gpu ", "set by NUM_THREADS",
		"PRELOAD_PATH names /no/such/file, which does not exist"} {
		if !strings.Contains(out, want) {
			t.Errorf("doctor lacks %q:\n%s", want, out)
		}
	}
}

// Every command handles a pipeline's folder as a whole. compress lists the files that it copied and did not copy.
func TestPipeline(t *testing.T) {
	src := filepath.Join(t.TempDir(), "pipe")
	model, err := os.ReadFile(made(t, "llama-bf16"))
	if err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{
		"model_index.json": "{}", "unet/diffusion.safetensors": string(model), "unet/config.json": "{}",
		"vae/diffusion.safetensors": string(model),
		"tokenizer/vocab.txt":       "a b", "tokenizer/.hidden": "x",
	} {
		path := filepath.Join(src, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o700),
			os.WriteFile(path, []byte(text), 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	small, back := src+".small", src+".back"
	said := must(t, "compress", src, "-o", small, "-v")
	for _, want := range []string{
		"copied: " + small + "/model_index.json\n", "copied: " + small + "/tokenizer/vocab.txt\n",
		"copied: " + small + "/unet/config.json\n",
		"\n" + small + "/vae/diffusion.safetensors\n", "not copied: " + src + "/tokenizer/.hidden\n4.0 MB -> 2.7 MB (67 %), 42 tensors, ",
	} {
		if !strings.Contains(said, want) {
			t.Errorf("compress lacks %q:\n%s", want, said)
		}
	}
	must(t, "decompress", small, "-o", back)
	for _, part := range []string{"unet", "vae"} {
		if b, err := os.ReadFile(filepath.Join(back, part, "diffusion.safetensors")); err != nil ||
			!bytes.Equal(b, model) {
			t.Errorf("%s: %d bytes, %v", part, len(b), err)
		}
	}
	var loads struct{ Loads []load.Report }
	var found struct{ Sources []struct{ Tensors []any } }
	if err := errors.Join(json.Unmarshal([]byte(must(t, "load", small, "--json")), &loads),
		json.Unmarshal([]byte(must(t, "inspect", small, "--json")), &found)); err != nil {
		t.Fatal(err)
	}
	if len(found.Sources) != 2 || len(loads.Loads) != 1 ||
		loads.Loads[0].Tensors != int64(2*len(found.Sources[0].Tensors)) {
		t.Errorf("%+v %d", loads, len(found.Sources))
	}
	if said := must(t, "verify", small); strings.Count(said, "contents verified") != 2 {
		t.Error(said)
	}
}

// inspect --estimate predicts the size that compress reaches within a few percent.
func TestEstimate(t *testing.T) {
	plain := made(t, "llama-bf16")
	var before struct {
		Sources  []any
		Estimate stored.Total
	}
	if err := json.Unmarshal([]byte(must(t, "inspect", plain, "--estimate", "--json")), &before); err != nil {
		t.Fatal(err)
	}
	var after save.Report
	small := plain + ".small"
	if err := json.Unmarshal([]byte(must(t, "compress", plain, "-o", small, "--json")), &after); err != nil {
		t.Fatal(err)
	}
	if e := before.Estimate; len(before.Sources) != 1 || e.Bytes != after.BytesIn || e.Tensors != after.Tensors ||
		math.Abs(e.Ratio-after.Ratio) > 0.02 {
		t.Errorf("%+v, and compress %+v", before, after)
	}
	// For a compressed file, the estimate is its current size.
	if out := must(t, "inspect", small, "-e", "--summary"); !strings.Contains(out, "compress would turn ") {
		t.Error(out)
	}
	html := filepath.Join(t.TempDir(), "model.html")
	if out := must(t, "inspect", small, "--html", html); !strings.Contains(out, html) {
		t.Error(out)
	}
	if text, err := os.ReadFile(html); err != nil || !strings.Contains(string(text), small) {
		t.Errorf("%v: %.200s", err, text)
	}
	if out := must(t, "inspect", small, "--summary"); strings.Contains(out, "would") {
		t.Error(out)
	}
}

// doctor opens the files that OVERWIRE_PRELOAD names, and reports a preload that cannot succeed.
func TestDoctorOfPreloads(t *testing.T) {
	t.Cleanup(func() { knob.Load(nil) })
	dir := t.TempDir()
	plain := made(t, "llama-bf16")
	archive, pickle := filepath.Join(dir, "x.pt"), filepath.Join(dir, "x.pkl")
	for _, path := range []string{archive, pickle} {
		if err := os.WriteFile(path, []byte("PK\x03\x04 and more"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for path, want := range map[string]string{
		plain: "", pickle: "", "https://user:secret@host/m.safetensors": "", archive: "names a source that cannot be loaded: ",
		dir:           "names a source that cannot be loaded: ",
		dir + "/none": "which does not exist",
	} {
		knob.Load(map[string]string{"OVERWIRE_PRELOAD": path})
		advice := strings.Join(Diagnose(Env{}, false).Advice, "\n")
		if strings.Contains(advice, "OVERWIRE_PRELOAD") != (want != "") || !strings.Contains(advice, want) ||
			strings.Contains(advice, "secret") {
			t.Errorf("%s: %s", path, advice)
		}
	}
}

// If a file without an extension is written into a folder, it gets a name with which the folder can be opened.
func TestFileWithoutAnExtensionInAFolder(t *testing.T) {
	plain, dir := made(t, "llama-bf16"), t.TempDir()
	bare := filepath.Join(dir, "bare")
	must(t, "compress", plain, "-o", bare)
	must(t, "compress", bare, "-o", dir+"/folder/")
	must(t, "decompress", dir+"/folder", "-o", dir+"/back.safetensors")
	want, _ := os.ReadFile(plain)
	if got, err := os.ReadFile(dir + "/back.safetensors"); err != nil || !bytes.Equal(got, want) {
		t.Error("decompress restored different bytes", err)
	}
}
