package save

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/format"
	"github.com/overwire/overwire/gosrc/format/overwire"
	"github.com/overwire/overwire/gosrc/save/original"
	"github.com/overwire/overwire/gosrc/tensor"
)

// odd is a safetensors file of any header, padded so that the data begin on a
// multiple of pad (1: not at all).
func odd(header string, pad int, data []byte) []byte {
	for (8+len(header))%pad != 0 {
		header += " "
	}
	b := binary.LittleEndian.AppendUint64(nil, uint64(len(header)))
	return append(append(b, header...), data...)
}

// oddFiles are files with headers that no two programs write alike.
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
		"padded to 8":    odd(few(`{"__metadata__":{"format":"pt"},"w":`+w+`}`, 0, n), 8, weights),
		"padded to 64":   odd(few(`{"w":`+w+`}`, 0, n), 64, weights),
		"padded to 4096": odd(few(`{"w":`+w+`}`, 0, n), 4096, weights),
		"not padded":     odd(few(`{"w":`+w+`}  `, 0, n), 1, weights),
		"spaced":         odd(few("\t{ \"w\" :\n"+w+" }\n", 0, n), 8, weights),
		"unsorted": odd(few(`{"z":`+w+`,"a":{"data_offsets":[4,12],"dtype":"F32","shape":[2]},"m":{"shape":[],"dtype":"I32","data_offsets":[0,4]}}`, 12, 12+n),
			8, append([]byte("fourtwelvewo"), weights...)),
		"metadata last and in its order": odd(few(`{"w":`+w+`,"__metadata__":{"z":"1","a":"\u00e9\n","":""}}`, 0, n), 8, weights),
		"metadata null":                  odd(few(`{"__metadata__":null,"w":`+w+`}`, 0, n), 8, weights),
		"metadata empty":                 odd(few(`{"__metadata__":{},"w":`+w+`}`, 0, n), 8, weights),
		"another program's mark":         odd(few(`{"__metadata__":{"overwire":"theirs","k":"v"},"w":`+w+`}`, 0, n), 8, weights),
		"escapes":                        odd(few(`{"\u0077\/\u00e9\ud83d\ude00":`+w+`,"é":{"dtype":"U8","shape":[1],"data_offsets":[%d,%d]}}`, 0, n, n, n+1), 8, append(bytes.Clone(weights), 7)),
		"unknown fields":                 odd(few(`{"w":{"note":[1,{"a":null}],"dtype":"BF16","shape":[300,256],"data_offsets":[%d,%d]}}`, 0, n), 8, weights),
		"tied":                           odd(few(`{"b":`+w+`,"a":`+w+`}`, 0, n, n, 2*n), 8, append(bytes.Clone(weights), weights...)),
		"without bytes": odd(few(`{"e":{"dtype":"F16","shape":[0,4],"data_offsets":[0,0]},"w":`+w+`,"d":{"dtype":"F16","shape":[4,0],"data_offsets":[%d,%d]}}`, 0, n, n, n),
			8, weights),
		"no tensors":       odd(`{}`, 1, nil),
		"no tensors, long": odd(`{"__metadata__":{"a":"b"}}`, 512, nil),
		"a large header":   odd(strings.TrimSuffix(many.String(), ",")+"}", 8, data),
	}
}

func TestSameFile(t *testing.T) {
	// Promise: the file that was compressed comes back, byte for byte, whatever its
	// header looks like, through any parts and through a second container; the
	// report has its SHA-256.
	for name, want := range oddFiles(t) {
		dir := t.TempDir()
		at := func(n string) string { return filepath.Join(dir, n+".safetensors") }
		if err := os.WriteFile(at("in"), want, 0o600); err != nil {
			t.Fatal(err)
		}
		sum := sha256Of(t, at("in"))
		check := func(what string, rep Report, path string) {
			t.Helper()
			want := Original{path, sum, strings.HasPrefix(what, "decompressed")}
			if len(rep.Originals) != 1 || rep.Originals[0] != want || rep.Anew != nil {
				t.Errorf("%s, %s: %+v", name, what, rep)
			}
		}
		check("compressed", convert(t, []string{at("in")}, at("packed"), Spec{Compress: true}), at("packed"))
		verified := func(path string) {
			t.Helper()
			rep, err := Verify(bg, nil, []string{path}, format.Access{}, true)
			if err != nil || *rep.Files[0].Original != (Original{path, sum, true}) {
				t.Errorf("%s: verified: %+v, %v", name, rep, err)
			}
		}
		verified(at("packed"))
		check("decompressed", convert(t, []string{at("packed")}, at("out"), Spec{}), at("out"))
		check("again", convert(t, []string{at("packed")}, at("again"), Spec{Compress: true, Parts: 4, ChunkBytes: 4096}), at("again"))
		verified(at("again"))
		check("decompressed again", convert(t, []string{at("again")}, at("again"), Spec{Threads: 1, Shard: 1 << 30}), at("again"))
		for _, out := range []string{at("out"), at("again")} {
			if got, err := os.ReadFile(out); err != nil || !bytes.Equal(got, want) {
				t.Errorf("%s: %s has %d bytes, %d went in: %v", name, filepath.Base(out), len(got), len(want), err)
			}
		}
		noTemps(t, dir)
	}
}

// A container that keeps no SHA-256 gives the very file that it was made from; none is made
// then, and the report says that no sum was compared.
func TestSameFileWithoutItsSum(t *testing.T) {
	for name, want := range oddFiles(t) {
		dir := t.TempDir()
		at := func(n string) string { return filepath.Join(dir, n+".safetensors") }
		if err := os.WriteFile(at("in"), want, 0o600); err != nil {
			t.Fatal(err)
		}
		kept, err := Convert(context.Background(), nil, []string{at("in")}, at("small"), Spec{Compress: true, NoSHA256: true})
		if err != nil || len(kept.Originals) != 1 || kept.Originals[0].SHA256 != "" {
			t.Fatalf("%s: %v, %+v", name, err, kept.Originals)
		}
		rep, err := Convert(context.Background(), nil, []string{at("small")}, at("out"), Spec{})
		if err != nil || len(rep.Originals) != 1 || rep.Originals[0].SHA256 != "" || rep.Originals[0].Compared ||
			len(rep.Anew) > 0 {
			t.Fatalf("%s: %v, %+v", name, err, rep)
		}
		if got, err := os.ReadFile(at("out")); err != nil || !bytes.Equal(got, want) {
			t.Errorf("%s: %v, another file", name, err)
		}
	}
}

func TestEmptyMetadata(t *testing.T) {
	// Promise: no metadata, and metadata without entries, stay what they are in plain and
	// compressed files, whatever is made of them.
	in := some(fixedRand())
	dir := t.TempDir()
	at := func(n string) string { return filepath.Join(dir, n+".safetensors") }
	for name, metadata := range map[string]map[string]string{"none": nil, "empty": {}, "one": {"k": "v"}} {
		for _, compress := range []bool{false, true} {
			write(t, Spec{Path: at("a"), Metadata: metadata, Compress: compress, Digests: compress}, in)
			convert(t, []string{at("a")}, at("b"), Spec{Compress: !compress})
			convert(t, []string{at("b")}, at("c"), Spec{Compress: compress})
			convert(t, []string{at("b")}, at("d"), Spec{Compress: compress, Shard: 1 << 30})
			for _, file := range []string{"a", "b", "c", "d"} {
				m, err := openModel(bg, []string{at(file)}, format.Access{}, false)
				if err != nil {
					t.Fatal(err)
				}
				if got := m.ix.Sources[0].Metadata; (got == nil) != (metadata == nil) || !maps.Equal(got, metadata) {
					t.Errorf("%s, compressed %v, %s: %v", name, compress, file, got)
				}
				m.closeSources()
			}
			if _, err := Verify(bg, nil, []string{at("c")}, format.Access{}, false); err != nil {
				t.Error(err)
			}
		}
	}
}

func TestNoOriginal(t *testing.T) {
	// Promise: what is no longer the file that was compressed is reported as written
	// anew: other metadata, shards, files that never were plain.
	dir := t.TempDir()
	at := func(n string) string { return filepath.Join(dir, n+".safetensors") }
	in := some(fixedRand())
	write(t, Spec{Path: at("plain")}, in)
	write(t, Spec{Path: at("saved"), Compress: true}, in)
	write(t, Spec{Path: at("other")}, []Input{{"other", in[0].DType, in[0].Shape, in[0].Data}})
	convert(t, []string{at("plain")}, at("packed"), Spec{Compress: true})
	for name, c := range map[string]struct {
		src  []string
		spec Spec
	}{
		"saved by us":    {[]string{at("saved")}, Spec{}},
		"other metadata": {[]string{at("packed")}, Spec{Metadata: map[string]string{"a": "b"}}},
		"shards":         {[]string{at("packed")}, Spec{Shard: 1 << 19}},
		"two in one":     {[]string{at("packed"), at("other")}, Spec{}},
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
	if rep := convert(t, []string{at("plain")}, at("plain2"), Spec{}); rep.Originals != nil || rep.Anew != nil {
		t.Errorf("plain to plain: %+v", rep)
	}
}

func TestSameFolder(t *testing.T) {
	// Promise: of a folder, every shard and the index.json come back as they were.
	src, packed, back := t.TempDir(), filepath.Join(t.TempDir(), "packed"), filepath.Join(t.TempDir(), "back")
	files := oddFiles(t)
	_ = os.WriteFile(filepath.Join(src, "2.safetensors"), files["padded to 8"], 0o600)
	_ = os.WriteFile(filepath.Join(src, "1.safetensors"), bytes.ReplaceAll(files["unsorted"], []byte(`"z"`), []byte(`"y"`)), 0o600)
	index := "{ \"weight_map\":\t{\"w\":\"2.safetensors\",\"y\":\"1.safetensors\",\"m\":\"1.safetensors\", \"a\":\"1.safetensors\"}," +
		" \"of\": \"theirs\", \"metadata\":{\"total_size\": 1.0e3, \"x\":[1]} }"
	_ = os.WriteFile(filepath.Join(src, "model.safetensors.index.json"), []byte(index), 0o600)
	if rep := convert(t, []string{src}, packed, Spec{Compress: true}); len(rep.Originals) != 2 {
		t.Errorf("%+v", rep)
	}
	rep := convert(t, []string{packed}, back, Spec{})
	if len(rep.Originals) != 2 || len(rep.Files) != 3 {
		t.Errorf("%+v", rep)
	}
	for _, f := range rep.Files {
		if n := filepath.Base(f); sha256Of(t, f) != sha256Of(t, filepath.Join(src, n)) {
			t.Errorf("%s differs", n)
		}
	}
}

func TestHostileOrigin(t *testing.T) {
	// Promise: whatever a container says of its origin, decompressing it gives the
	// file with that SHA-256 or an error with a class and the container's name; it
	// leaves nothing, takes bounded memory, and the tensors load all the same.
	dir := t.TempDir()
	in := []Input{bf16("w", fixedRand(), 100, 100)}
	header := `{"w":{"dtype":"BF16","shape":[100,100],"data_offsets":[0,20000]}}`
	good := odd(header, 8, in[0].Data)
	head := good[:len(good)-20000]
	size := int64(len(good))
	origin := func(change func(o *overwire.Origin)) *overwire.Origin {
		o := overwire.NewOrigin(head, size)
		change(o)
		return o
	}
	of := func(header string, bytes int64) *overwire.Origin {
		h := odd(header, 8, nil)
		return overwire.NewOrigin(h, int64(len(h))+bytes)
	}
	for name, c := range map[string]struct {
		o     *overwire.Origin
		class error // nil: it is the original
	}{
		"not hashed":      {origin(func(*overwire.Origin) {}), nil},
		"other digest":    {origin(func(o *overwire.Origin) { o.SHA256 = overwire.Pending }), errs.ErrCorrupt},
		"no digest":       {origin(func(o *overwire.Origin) { o.SHA256 = "zz" }), errs.ErrFormat},
		"half a digest":   {origin(func(o *overwire.Origin) { o.SHA256 = "00" }), errs.ErrFormat},
		"longer":          {origin(func(o *overwire.Origin) { o.Size++ }), errs.ErrFormat},
		"shorter":         {origin(func(o *overwire.Origin) { o.Size-- }), errs.ErrFormat},
		"negative":        {origin(func(o *overwire.Origin) { o.Size = -1 }), errs.ErrFormat},
		"endless":         {origin(func(o *overwire.Origin) { o.Size = 1<<63 - 1 }), errs.ErrFormat},
		"no base64":       {origin(func(o *overwire.Origin) { o.Header = "?" }), errs.ErrFormat},
		"cut":             {origin(func(o *overwire.Origin) { o.Header = o.Header[:8] }), errs.ErrFormat},
		"nothing":         {origin(func(o *overwire.Origin) { o.Header = "" }), errs.ErrFormat},
		"a bomb":          {overwire.NewOrigin(make([]byte, 101<<20), 1<<40), errs.ErrFormat},
		"another name":    {of(strings.ReplaceAll(header, `"w"`, `"v"`), 20000), errs.ErrFormat},
		"another dtype":   {of(strings.ReplaceAll(header, "BF16", "F16"), 20000), errs.ErrFormat},
		"another shape":   {of(strings.ReplaceAll(header, "[100,100]", "[10000]"), 20000), errs.ErrFormat},
		"another tensor":  {of(header[:len(header)-1]+`,"e":{"dtype":"U8","shape":[0],"data_offsets":[20000,20000]}}`, 20000), errs.ErrFormat},
		"no tensor":       {of(`{}`, 0), errs.ErrFormat},
		"other metadata":  {of(`{"__metadata__":{"a":"b"},`+header[1:], 20000), errs.ErrFormat},
		"overlap":         {of(strings.ReplaceAll(header, "[0,", "[1,"), 20000), errs.ErrFormat},
		"no safetensors":  {overwire.NewOrigin([]byte("12345678garbage"), 20015), errs.ErrFormat},
		"a short header":  {overwire.NewOrigin(head[:7], 20007), errs.ErrFormat},
		"another version": {origin(func(o *overwire.Origin) { o.SHA256 = strings.Repeat("A", 64) }), errs.ErrCorrupt},
	} {
		packed, out := filepath.Join(dir, "packed.safetensors"), filepath.Join(dir, "out.safetensors")
		spec := Spec{Path: packed, Compress: true}
		if err := spec.checkSpec(); err != nil {
			t.Fatal(err)
		}
		items := []*item{{name: "w", dtype: in[0].DType, shape: in[0].Shape, bytes: 20000, body: memory(in[0].Data),
			parts: 1}}
		w := newWriter(spec, nil)
		if _, err := w.saveAll(bg, []outputFile{{path: packed, items: items,
			original: &original.File{Origin: c.o}}}); err != nil {
			t.Fatal(name, err)
		}
		same(t, in, read(t, packed))
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		rep, err := Convert(bg, nil, []string{packed}, out, Spec{})
		runtime.ReadMemStats(&after)
		if heap := after.TotalAlloc - before.TotalAlloc; heap > 800<<20 {
			t.Errorf("%s: %d bytes of heap", name, heap)
		}
		v, verr := Verify(bg, nil, []string{packed}, format.Access{}, true)
		if c.class == nil {
			if verr != nil || v.Files[0].Original.Compared || v.Files[0].Original.SHA256 != sha256Of(t, out) {
				t.Errorf("%s: verified: %v, %+v", name, verr, v)
			}
			if got, _ := os.ReadFile(out); err != nil || !bytes.Equal(got, good) || len(rep.Originals) != 1 ||
				rep.Originals[0].SHA256 != "" || rep.Originals[0].Compared {
				t.Errorf("%s: %v, %+v", name, err, rep)
			}
			_ = os.Remove(out)
			continue
		}
		var at *errs.At
		if !errors.Is(err, c.class) || !errors.As(err, &at) || at.Source != packed {
			t.Errorf("%s: %v", name, err)
		}
		if !errors.Is(verr, c.class) || v.OK || verr.Error() != err.Error() {
			t.Errorf("%s: verified: %v, not %v", name, verr, err)
		}
		if _, err := os.Stat(out); err == nil {
			t.Errorf("%s: a file was written", name)
		}
		noTemps(t, dir)
	}
}

func TestGoldenOriginal(t *testing.T) {
	// Promise: the file that version 1.1 compressed comes back.
	dir := filepath.Join(goldens, "original-1.1")
	out := filepath.Join(t.TempDir(), "out.safetensors")
	rep := convert(t, []string{filepath.Join(dir, "container.safetensors")}, out, Spec{})
	if sum := sha256Of(t, filepath.Join(dir, "plain.safetensors")); sha256Of(t, out) != sum ||
		len(rep.Originals) != 1 || rep.Originals[0].SHA256 != sum {
		t.Errorf("%+v", rep)
	}
}

// endingBody is a body that ends with the work on others: it fails once both tensors are being
// read, or it waits for the end of the other, and keeps why it came.
type endingBody struct {
	began chan struct{}
	why   *error
}

func (e endingBody) bytes(ctx context.Context, _ []byte, _ int64) ([]byte, error) {
	if e.why == nil {
		<-e.began
		return nil, errs.New(errs.ErrIO, "no")
	}
	close(e.began)
	<-ctx.Done()
	*e.why = context.Cause(ctx)
	return nil, *e.why
}

func TestStepsEndByTheFirstError(t *testing.T) {
	// Promise: when a tensor cannot be read, what else is under way ends, and by that error.
	dir, began := t.TempDir(), make(chan struct{})
	var why error
	items := make([]*item, 2)
	for i, body := range []body{endingBody{began: began}, endingBody{began: began, why: &why}} {
		items[i] = &item{name: fmt.Sprint(i), dtype: tensor.U8, shape: []int64{batchBytes}, bytes: batchBytes,
			body: body, parts: 1}
	}
	spec := Spec{Path: filepath.Join(dir, "x.safetensors"), Threads: 2}
	if err := spec.checkSpec(); err != nil {
		t.Fatal(err)
	}
	_, err := newWriter(spec, nil).saveAll(bg, []outputFile{{path: spec.Path, items: items}})
	if !errors.Is(err, errs.ErrIO) || !errors.Is(why, errs.ErrIO) {
		t.Errorf("the save ended with %v, its other step with %v", err, why)
	}
	noTemps(t, dir)
}
