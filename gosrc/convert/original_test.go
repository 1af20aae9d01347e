package convert

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/overwire/overwire/gosrc/format"
	"github.com/overwire/overwire/gosrc/save"
	"github.com/overwire/overwire/gosrc/save/original"
	"github.com/overwire/overwire/gosrc/save/savetest"
	"github.com/overwire/overwire/gosrc/stored"
	"github.com/overwire/overwire/gosrc/verify"
)

// oddFiles returns valid files with many unusual forms of headers.
func oddFiles(t testing.TB) map[string][]byte {
	r := newRand(t)
	weights := gaussian(r, 300, 256)
	many, data := strings.Builder{}, []byte(nil)
	many.WriteString(`{`)
	for i := range 12000 { // over a megabyte
		fmt.Fprintf(&many, `"model.layers.%d.self_attn.%x.weight":{"dtype":"U8","shape":[],"data_offsets":[%d,%d]},`, i, r.Uint64(), i, i+1)
		data = append(data, byte(i))
	}
	few := func(format string, entries ...any) string { return fmt.Sprintf(format, entries...) }
	w := `{"dtype":"BF16","shape":[300,256],"data_offsets":[%d,%d]}`
	n := len(weights)
	return map[string][]byte{
		"padded to 8":    savetest.Odd(few(`{"__metadata__":{"format":"pt"},"w":`+w+`}`, 0, n), 8, weights),
		"padded to 64":   savetest.Odd(few(`{"w":`+w+`}`, 0, n), 64, weights),
		"padded to 4096": savetest.Odd(few(`{"w":`+w+`}`, 0, n), 4096, weights),
		"not padded":     savetest.Odd(few(`{"w":`+w+`}  `, 0, n), 1, weights),
		"spaced":         savetest.Odd(few("\t{ \"w\" :\n"+w+" }\n", 0, n), 8, weights),
		"unsorted": savetest.Odd(few(`{"z":`+w+`,"a":{"data_offsets":[4,12],"dtype":"F32","shape":[2]},"m":{"shape":[],"dtype":"I32","data_offsets":[0,4]}}`, 12, 12+n),
			8, append([]byte("fourtwelvewo"), weights...)),
		"metadata last and in its order": savetest.Odd(few(`{"w":`+w+`,"__metadata__":{"z":"1","a":"\u00e9\n","":""}}`, 0, n), 8, weights),
		"metadata null":                  savetest.Odd(few(`{"__metadata__":null,"w":`+w+`}`, 0, n), 8, weights),
		"metadata empty":                 savetest.Odd(few(`{"__metadata__":{},"w":`+w+`}`, 0, n), 8, weights),
		"another program's mark":         savetest.Odd(few(`{"__metadata__":{"overwire":"theirs","k":"v"},"w":`+w+`}`, 0, n), 8, weights),
		"escapes":                        savetest.Odd(few(`{"\u0077\/\u00e9\ud83d\ude00":`+w+`,"é":{"dtype":"U8","shape":[1],"data_offsets":[%d,%d]}}`, 0, n, n, n+1), 8, append(bytes.Clone(weights), 7)),
		"unknown fields":                 savetest.Odd(few(`{"w":{"note":[1,{"a":null}],"dtype":"BF16","shape":[300,256],"data_offsets":[%d,%d]}}`, 0, n), 8, weights),
		"tied": savetest.Odd(few(`{"b":`+w+`,"a":`+w+`}`, 0, n, n, 2*n), 8,
			append(bytes.Clone(weights), weights...)),
		"without bytes": savetest.Odd(few(`{"e":{"dtype":"F16","shape":[0,4],"data_offsets":[0,0]},"w":`+w+`,"d":{"dtype":"F16","shape":[4,0],"data_offsets":[%d,%d]}}`, 0, n, n, n),
			8, weights),
		"no tensors":       savetest.Odd(`{}`, 1, nil),
		"no tensors, long": savetest.Odd(`{"__metadata__":{"a":"b"}}`, 512, nil),
		"a large header":   savetest.Odd(strings.TrimSuffix(many.String(), ",")+"}", 8, data),
	}
}

func TestSameFile(t *testing.T) {
	// Decompressing restores the compressed file byte for byte, for any form of header, any number of parts, and from a
	// container made from a container. The report has its SHA-256.
	for name, want := range oddFiles(t) {
		dir := t.TempDir()
		at := func(n string) string { return filepath.Join(dir, n+".safetensors") }
		if err := os.WriteFile(at("in"), want, 0o600); err != nil {
			t.Fatal(err)
		}
		sum := sha256Of(t, at("in"))
		check := func(what string, rep save.Report, path string) {
			t.Helper()
			want := original.Summary{File: path, SHA256: sum, Compared: strings.HasPrefix(what, "decompressed")}
			if len(rep.Originals) != 1 || rep.Originals[0] != want || rep.Anew != nil {
				t.Errorf("%s, %s: %+v", name, what, rep)
			}
		}
		check("compressed", convert(t, []string{at("in")}, at("packed"), save.Spec{Compress: true}), at("packed"))
		verified := func(path string) {
			t.Helper()
			rep, err := verify.Verify(bg, nil, []string{path}, format.Access{}, true)
			if err != nil || *rep.Files[0].Original != (original.Summary{File: path, SHA256: sum, Compared: true}) {
				t.Errorf("%s: verified: %+v, %v", name, rep, err)
			}
		}
		verified(at("packed"))
		check("decompressed", convert(t, []string{at("packed")}, at("out"), save.Spec{}), at("out"))
		check("again", convert(t, []string{at("packed")}, at("again"), save.Spec{Compress: true, Parts: 4, ChunkBytes: 4096}), at("again"))
		verified(at("again"))
		check("decompressed again", convert(t, []string{at("again")}, at("again"), save.Spec{Threads: 1, Shard: 1 << 30}), at("again"))
		for _, out := range []string{at("out"), at("again")} {
			if got, err := os.ReadFile(out); err != nil || !bytes.Equal(got, want) {
				t.Errorf("%s: %s has %d bytes, %d went in: %v", name, filepath.Base(out), len(got), len(want), err)
			}
		}
		noTemps(t, dir)
	}
}

// A container without a SHA-256 restores the original file. No SHA-256 is computed, and the report says that none was
// compared.
func TestSameFileWithoutItsSum(t *testing.T) {
	for name, want := range oddFiles(t) {
		dir := t.TempDir()
		at := func(n string) string { return filepath.Join(dir, n+".safetensors") }
		if err := os.WriteFile(at("in"), want, 0o600); err != nil {
			t.Fatal(err)
		}
		kept, err := Convert(context.Background(), nil, []string{at("in")}, at("small"),
			save.Spec{Compress: true, NoSHA256: true})
		if err != nil || len(kept.Originals) != 1 || kept.Originals[0].SHA256 != "" {
			t.Fatalf("%s: %v, %+v", name, err, kept.Originals)
		}
		rep, err := Convert(context.Background(), nil, []string{at("small")}, at("out"), save.Spec{})
		if err != nil || len(rep.Originals) != 1 || rep.Originals[0].SHA256 != "" || rep.Originals[0].Compared ||
			len(rep.Anew) > 0 {
			t.Fatalf("%s: %v, %+v", name, err, rep)
		}
		if got, err := os.ReadFile(at("out")); err != nil || !bytes.Equal(got, want) {
			t.Errorf("%s: %v, or a different file", name, err)
		}
	}
}

func TestEmptyMetadata(t *testing.T) {
	// All conversions preserve the difference between missing and empty metadata.
	in := some(fixedRand())
	dir := t.TempDir()
	at := func(n string) string { return filepath.Join(dir, n+".safetensors") }
	for name, metadata := range map[string]map[string]string{"none": nil, "empty": {}, "one": {"k": "v"}} {
		for _, compress := range []bool{false, true} {
			write(t, save.Spec{Path: at("a"), Metadata: metadata, Compress: compress, Digests: compress}, in)
			convert(t, []string{at("a")}, at("b"), save.Spec{Compress: !compress})
			convert(t, []string{at("b")}, at("c"), save.Spec{Compress: compress})
			convert(t, []string{at("b")}, at("d"), save.Spec{Compress: compress, Shard: 1 << 30})
			for _, file := range []string{"a", "b", "c", "d"} {
				m, err := stored.Open(bg, []string{at(file)}, format.Access{}, false)
				if err != nil {
					t.Fatal(err)
				}
				if got := m.Index.Sources[0].Metadata; (got == nil) != (metadata == nil) || !maps.Equal(got, metadata) {
					t.Errorf("%s, compressed %v, %s: %v", name, compress, file, got)
				}
				m.Close()
			}
			if _, err := verify.Verify(bg, nil, []string{at("c")}, format.Access{}, false); err != nil {
				t.Error(err)
			}
		}
	}
}

func TestNoOriginal(t *testing.T) {
	// A plain file that does not restore an original is reported in Anew: with other metadata, other shards, or from a
	// container that was saved from tensors.
	dir := t.TempDir()
	at := func(n string) string { return filepath.Join(dir, n+".safetensors") }
	in := some(fixedRand())
	write(t, save.Spec{Path: at("plain")}, in)
	write(t, save.Spec{Path: at("saved"), Compress: true}, in)
	write(t, save.Spec{Path: at("other")}, []save.Input{input("other", in[0].DType, in[0].Shape, in[0].Data)})
	convert(t, []string{at("plain")}, at("packed"), save.Spec{Compress: true})
	for name, c := range map[string]struct {
		src  []string
		spec save.Spec
	}{
		"saved by us":    {[]string{at("saved")}, save.Spec{}},
		"other metadata": {[]string{at("packed")}, save.Spec{Metadata: map[string]string{"a": "b"}}},
		"shards":         {[]string{at("packed")}, save.Spec{Shard: 1 << 19}},
		"two in one":     {[]string{at("packed"), at("other")}, save.Spec{}},
	} {
		rep := convert(t, c.src, filepath.Join(t.TempDir(), "out.safetensors"), c.spec)
		files := len(rep.Files)
		if c.spec.Shard > 0 {
			files-- // the index.json
		}
		if len(rep.Originals) != 0 || len(rep.Anew) != files {
			t.Errorf("%s: %+v", name, rep)
		}
		c.spec.Compress = true
		if rep := convert(t, c.src, filepath.Join(t.TempDir(), "out.safetensors"), c.spec); len(rep.Originals)+len(rep.Anew) != 0 {
			t.Errorf("%s, compressed: %+v", name, rep)
		}
	}
	if rep := convert(t, []string{at("plain")}, at("plain2"), save.Spec{}); rep.Originals != nil || rep.Anew != nil {
		t.Errorf("plain to plain: %+v", rep)
	}
}

func TestSameFolder(t *testing.T) {
	// Every shard of a folder and its index.json are restored unchanged.
	src, packed, back := t.TempDir(), filepath.Join(t.TempDir(), "packed"), filepath.Join(t.TempDir(), "back")
	files := oddFiles(t)
	_ = os.WriteFile(filepath.Join(src, "2.safetensors"), files["padded to 8"], 0o600)
	_ = os.WriteFile(filepath.Join(src, "1.safetensors"), bytes.ReplaceAll(files["unsorted"], []byte(`"z"`), []byte(`"y"`)), 0o600)
	index := "{ \"weight_map\":\t{\"w\":\"2.safetensors\",\"y\":\"1.safetensors\",\"m\":\"1.safetensors\", \"a\":\"1.safetensors\"}," +
		" \"of\": \"theirs\", \"metadata\":{\"total_size\": 1.0e3, \"x\":[1]} }"
	_ = os.WriteFile(filepath.Join(src, "model.safetensors.index.json"), []byte(index), 0o600)
	if rep := convert(t, []string{src}, packed, save.Spec{Compress: true}); len(rep.Originals) != 2 {
		t.Errorf("%+v", rep)
	}
	rep := convert(t, []string{packed}, back, save.Spec{})
	if len(rep.Originals) != 2 || len(rep.Files) != 3 {
		t.Errorf("%+v", rep)
	}
	for _, f := range rep.Files {
		if n := filepath.Base(f); sha256Of(t, f) != sha256Of(t, filepath.Join(src, n)) {
			t.Errorf("%s differs", n)
		}
	}
}

func TestGoldenOriginal(t *testing.T) {
	// A container of version 1.1 restores its original.
	dir := filepath.Join(goldens, "original-1.1")
	out := filepath.Join(t.TempDir(), "out.safetensors")
	rep := convert(t, []string{filepath.Join(dir, "container.safetensors")}, out, save.Spec{})
	if sum := sha256Of(t, filepath.Join(dir, "plain.safetensors")); sha256Of(t, out) != sum ||
		len(rep.Originals) != 1 || rep.Originals[0].SHA256 != sum {
		t.Errorf("%+v", rep)
	}
}
