package page

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/overwire/overwire/gosrc/save"
)

// inspection is a model of n tensors in two files, some of whose names want out of
// the page.
func inspection(n int) *save.Inspection {
	in := &save.Inspection{Sources: []save.InspectedFile{{URI: "a.safetensors"}, {URI: "<b>&.safetensors"}}}
	for i := range n {
		f := &in.Sources[i%2]
		f.Tensors = append(f.Tensors, save.InspectedTensor{Name: fmt.Sprintf("model.layers.%d.mlp.experts.%d.gate_proj.weight", i/256, i%256),
			DType: []string{"BF16", "F32"}[i%2], Shape: []int64{3, int64(i)}, Bytes: 6 * int64(i), Stored: 4 * int64(i), Coding: "X16/bf16"})
	}
	for _, name := range []string{"", "</script><img src=x onerror=alert(1)>", "<!--", "__proto__.constructor", strings.Repeat(".", 1000), "a\"b'c\\\u2028"} {
		in.Sources[0].Tensors = append(in.Sources[0].Tensors, save.InspectedTensor{Name: name, DType: "U8", Shape: []int64{}, Bytes: 1, Stored: 1, Coding: "plain"})
	}
	return in
}

// Promise: every tensor is in the page's data with its own values; no text of a
// model ends the element that it stands in; a model of 18,867 tensors takes at most
// 3 MB.
func TestModel(t *testing.T) {
	in := inspection(18_861)
	text, err := Model(in)
	if err != nil {
		t.Fatal(err)
	}
	if len(text) > 3<<20 {
		t.Errorf("%d bytes", len(text))
	}
	_, rest, _ := bytes.Cut(text, []byte(`id="data">`))
	data, after, _ := bytes.Cut(rest, []byte("</script>"))
	if bytes.ContainsAny(data, "<>&") || bytes.Count(after, []byte("<script>")) != 1 {
		t.Error("a name is outside the data")
	}
	var c columns
	if err := json.Unmarshal(data, &c); err != nil {
		t.Fatal(err)
	}
	k := 0
	for i, f := range in.Sources {
		for _, x := range f.Tensors {
			if c.Names[k] != x.Name || c.File[k] != i || c.DTypes[c.DType[k]] != x.DType || c.Bytes[k] != x.Bytes || c.Stored[k] != x.Stored ||
				c.Codings[c.Coding[k]] != x.Coding || c.Shapes[k] != dimensions(x.Shape) {
				t.Fatalf("tensor %d: %+v", k, x)
			}
			k++
		}
	}
	if k != len(c.Names) {
		t.Errorf("%d tensors of %d", len(c.Names), k)
	}
	for _, word := range []string{"http://", "https://", "src=", "url(", "import("} {
		if strings.Contains(model, word) {
			t.Errorf("the page asks for something: %s", word)
		}
	}
}

// Promise: a browser draws it, and no name of a tensor becomes an element.
func TestBrowser(t *testing.T) {
	browser := ""
	for _, name := range []string{"chromium", "chromium-browser", "google-chrome"} {
		if path, err := exec.LookPath(name); err == nil {
			browser = path
			break
		}
	}
	if browser == "" {
		t.Skip("no chromium here")
	}
	for _, n := range []int{0, 1, 18_861} {
		text, err := Model(inspection(n))
		if err != nil {
			t.Fatal(err)
		}
		dir := t.TempDir()
		path := filepath.Join(dir, "page.html")
		if err := os.WriteFile(path, text, 0o600); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
		defer cancel()
		out, err := exec.CommandContext(ctx, browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
			"--disable-background-networking", "--user-data-dir="+filepath.Join(dir, "user"), "--dump-dom", "file://"+path).Output()
		if err != nil {
			t.Fatal(err)
		}
		dom := string(out)
		for _, want := range []string{`data-ready="1"`, `class="tile"`, fmt.Sprintf("%d of %d tensors", n+6, n+6), "&lt;/script&gt;"} {
			if !strings.Contains(dom, want) {
				t.Errorf("%d tensors: no %s", n, want)
			}
		}
		if strings.Contains(dom, "<img") {
			t.Error("a name is an element")
		}
	}
}
