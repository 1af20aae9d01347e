package page

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/overwire/overwire/gosrc/verify"
)

// inspection is a model of n tensors in two files. Some names try to break out of the page.
func inspection(n int) *verify.Inspection {
	in := &verify.Inspection{Sources: []verify.InspectedFile{{URI: "a.safetensors"}, {URI: "<b>&.safetensors"}}}
	for i := range n {
		f := &in.Sources[i%2]
		f.Tensors = append(f.Tensors, verify.InspectedTensor{Name: fmt.Sprintf(
			"model.layers.%d.mlp.experts.%d.gate_proj.weight", i/256, i%256),
			DType: []string{"BF16", "F32"}[i%2], Shape: []int64{3, int64(i)}, Bytes: 6 * int64(i), Stored: 4 * int64(i),
			Coding: "X16/bf16"})
	}
	for _, name := range []string{"", "</script><img src=x onerror=alert(1)>", "<!--", "__proto__.constructor",
		strings.Repeat(".", 1000), "a\"b'c\\\u2028"} {
		in.Sources[0].Tensors = append(in.Sources[0].Tensors,
			verify.InspectedTensor{Name: name, DType: "U8", Shape: []int64{}, Bytes: 1, Stored: 1, Coding: "plain"})
	}
	return in
}

// Every tensor is in the page's data with its own values. No text of a model ends the element that contains it.
// The page of a model with 18,867 tensors has at most 3 MB.
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
		t.Error("a name appears outside the data")
	}
	var c columns
	if err := json.Unmarshal(data, &c); err != nil {
		t.Fatal(err)
	}
	k := 0
	for i, f := range in.Sources {
		for _, x := range f.Tensors {
			if c.Names[k] != x.Name || c.File[k] != i || c.DTypes[c.DType[k]] != x.DType || c.Bytes[k] != x.Bytes ||
				c.Stored[k] != x.Stored ||
				c.Codings[c.Coding[k]] != x.Coding || c.Shapes[k] != shapeText(x.Shape) {
				t.Fatalf("tensor %d: %+v", k, x)
			}
			k++
		}
	}
	if k != len(c.Names) {
		t.Errorf("got %d of %d tensors", len(c.Names), k)
	}
}

// No page sends requests. Each has one marker for its data, and a policy that forbids requests.
func TestPagesSendNoRequests(t *testing.T) {
	for name, body := range map[string]string{"model": modelBody, "trace": traceBody} {
		text := staticPage(body)
		for _, word := range []string{"http://", "https://", "src=", "url(", "import(", "fetch(", "@style@", "@script@",
			"@body@"} {
			if strings.Contains(text, word) {
				t.Errorf("page %s contains %s", name, word)
			}
		}
		if strings.Count(text, "@data@") != 1 || !strings.Contains(text, `content="default-src 'none'`) {
			t.Errorf("%s: no data or no policy", name)
		}
	}
}
