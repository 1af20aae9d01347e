package safetensors

import (
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/tensor"
)

// An index written by transformers is read and written back byte for byte.
func TestIndexJSON(t *testing.T) {
	const text = `{
  "metadata": {
    "total_parameters": 12,
    "total_size": 24
  },
  "weight_map": {
    "a.weight": "model-00001-of-00002.safetensors",
    "b.weight": "model-00002-of-00002.safetensors",
    "lm_head.weight": "model-00001-of-00002.safetensors"
  }
}
`
	s, err := ReadIndexJSON("model.safetensors.index.json", []byte(text))
	if err != nil {
		t.Fatal(err)
	}
	want := Shards{
		Files:     []string{"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"},
		Weights:   []Weight{{"a.weight", 0}, {"b.weight", 1}, {"lm_head.weight", 0}},
		TotalSize: 24, Metadata: map[string]string{"total_parameters": "12"},
	}
	if !reflect.DeepEqual(s, want) {
		t.Errorf("got  %+v\nwant %+v", s, want)
	}
	if out := string(AppendIndexJSON(nil, s)); out != text {
		t.Errorf("written again:\n%s", out)
	}
	if out := string(AppendIndexJSON(nil,
		Shards{TotalSize: -1})); out != "{\n  \"metadata\": {},\n  \"weight_map\": {}\n}\n" {
		t.Errorf("empty: %q", out)
	}
}

// Files are numbered by name, regardless of their order in the JSON. An invalid total_size is ignored.
func TestIndexJSONOrder(t *testing.T) {
	for text, total := range map[string]int64{
		`{"weight_map":{"x":"b","y":"a","z":"b"},"metadata":{"total_size":1.5e3}}`:    1500,
		` {"other":[1],"weight_map":{"x":"b","y":"a","z":"b"},"metadata":null} `:      -1,
		`{"weight_map":{"x":"b","y":"a","z":"b"},"metadata":{"total_size":"many"}}`:   -1,
		`{"weight_map":{"x":"b","y":"a","z":"b"},"metadata":{"total_size":-5}}`:       -1,
		`{"weight_map":{"x":"\u0062","y":"a","z":"b"}}`:                               -1,
		`{"metadata":{"total_size":7,"k":{}},"weight_map":{"x":"b","y":"a","z":"b"}}`: 7,
	} {
		s, err := ReadIndexJSON("x", []byte(text))
		if err != nil || s.TotalSize != total || !slices.Equal(s.Files, []string{"a", "b"}) ||
			!slices.Equal(s.Weights, []Weight{{"x", 1}, {"y", 0}, {"z", 1}}) {
			t.Errorf("%s: %+v, %v", text, s, err)
		}
	}
}

// A "./" before a file name is ignored.
func TestIndexJSONDotSlash(t *testing.T) {
	s, err := ReadIndexJSON("x", []byte(`{"weight_map":{"x":"./a","y":"a","z":"././b"}}`))
	if err != nil || !slices.Equal(s.Files, []string{"a", "b"}) ||
		!slices.Equal(s.Weights, []Weight{{"x", 0}, {"y", 0}, {"z", 1}}) {
		t.Errorf("%+v, %v", s, err)
	}
	for _, file := range []string{"./", "./.", "./..", ".//a", "./sub/x"} {
		if _, err := ReadIndexJSON("x", []byte(`{"weight_map":{"w":"`+file+`"}}`)); !errors.Is(err, errs.ErrFormat) {
			t.Errorf("%q: %v", file, err)
		}
	}
}

// A hostile index is refused before any file that it names is opened.
func TestIndexJSONRefuses(t *testing.T) {
	for _, file := range []string{
		"", ".", "..", "../x", "a/../../x", "/etc/passwd", "sub/x", `..\\x`, `sub\\x`, `c:x`, `c:\\x`,
		"file:///etc/passwd",
		"http://169.254.169.254/x", "s3://bucket/x", `x\u0000.safetensors`, `\u002e\u002e/x`, `..\u002fx`,
	} {
		_, err := ReadIndexJSON("model.safetensors.index.json", []byte(`{"weight_map":{"w":"`+file+`"}}`))
		if !errors.Is(err, errs.ErrFormat) || !strings.Contains(err.Error(), "file name") ||
			!strings.Contains(err.Error(), "model.safetensors.index.json") {
			t.Errorf("%q: %v", file, err)
		}
	}
	for _, text := range []string{
		"", "{}", "[]", "null", "\xff", `{"weight_map":[]}`, `{"weight_map":{"a":1}}`, `{"weight_map":{"a":null}}`,
		`{"weight_map":{"a":"x","a":"y"}}`, `{"weight_map":{"a":"x","\u0061":"x"}}`,
		`{"weight_map":{},"weight_map":{}}`,
		`{"weight_map":{}}x`, `{"weight_map":{},}`, `{"weight_map":{}`, `{"weight_map":{},"x":1,"x":2}`,
		`{"weight_map":{},"metadata":{"a":1,"a":2}}`, `{"weight_map":{},"metadata":{"total_size":1,"total_size":2}}`,
		`{"weight_map":{},"metadata":{},"metadata":{}}`, `{"weight_map":{},"x":NaN}`,
		`{"weight_map":{},"x":` + strings.Repeat("[", 1000),
	} {
		if _, err := ReadIndexJSON("x", []byte(text)); !errors.Is(err, errs.ErrFormat) {
			t.Errorf("%.60q: %v", text, err)
		}
	}
}

// The index defines the model: every listed tensor must be in its file. Other tensors in the files, such as a stale
// duplicate, are dropped. If a dropped tensor has a listed alias, the alias gets its bytes.
func TestShardsSelect(t *testing.T) {
	ix := &tensor.Index{
		Sources: []tensor.Source{{URI: "a"}, {URI: "b"}},
		Tensors: []tensor.Tensor{
			{Name: "x", Alias: -1}, {Name: "more", Alias: -1},
			{Name: "old", Source: 1, Alias: -1, Shape: []int64{2, 3}, Off: 7, Stored: 5, First: 3, Count: 2, Parts: 1,
				ChunkBytes: 4096},
			{Name: "y", Source: 1, Alias: 2, Shape: []int64{6}}, {Name: "more", Source: 1, Alias: -1},
			{Name: "z", Source: 1, Alias: 2},
		},
	}
	s := Shards{Files: []string{"a", "b"}, Weights: []Weight{{"x", 0}, {"y", 1}, {"more", 1}, {"z", 1}}}
	got, err := s.Select(ix)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, t := range got.Tensors {
		names = append(names, fmt.Sprint(got.Sources[t.Source].URI, t.Name, t.Alias, t.Off, t.First, t.Count))
	}
	if want := "ax-1 0 0 0 by-1 7 3 2 bmore-1 0 0 0 bz1 0 0 0"; strings.Join(names, " ") != want {
		t.Errorf("%q, want %q", names, want)
	}
	if got.Sources[0].Unlisted != 1 || got.Sources[1].Unlisted != 1 || !got.Sources[0].Gaps ||
		ix.Sources[0].Unlisted != 0 || ix.Tensors[3].Alias != 2 {
		t.Errorf("%+v of %+v", got.Sources, ix.Sources)
	}
	ix.Tensors[2].Parts = 2
	if _, err := s.Select(ix); !errors.Is(err, errs.ErrNotSupported) || !strings.Contains(err.Error(), `tensor "y"`) {
		t.Errorf("an alias of a tensor with column parts and a different shape: %v", err)
	}
	s.Weights = append(s.Weights, Weight{"more", 0}, Weight{"old", 1})
	if all, err := s.Select(ix); err != nil || all != ix {
		t.Errorf("all tensors are listed: %v", err)
	}
	s.Weights[0].File = 1
	if _, err := s.Select(ix); !errors.Is(err, errs.ErrFormat) || !strings.Contains(err.Error(), `b tensor "x"`) {
		t.Errorf("a tensor in the wrong file: %v", err)
	}
	s.Files = s.Files[:1]
	if _, err := s.Select(ix); !errors.Is(err, errs.ErrArgument) {
		t.Errorf("a file too few: %v", err)
	}
}

// FuzzHeader parses arbitrary bytes. An accepted header is written back to a header that parses equal. A refused
// header gives an error with class and location. Lenient mode accepts every header that strict mode accepts.
func FuzzHeader(f *testing.F) {
	for _, v := range vectors() {
		if len(v.file) < 4096 {
			f.Add(v.file, int64(len(v.file)))
		}
	}
	f.Fuzz(func(t *testing.T, b []byte, size int64) {
		if size < int64(len(b)) {
			size = int64(len(b))
		}
		n, err := Length("", b, size)
		if err != nil || 8+n > int64(len(b)) {
			return
		}
		loose, err2 := Parse("x", b[:8+n], size, Options{Lenient: true})
		h, err := Parse("x", b[:8+n], size, Options{})
		if err != nil {
			var at *errs.At
			if !errors.As(err, &at) || !errs.Classed(err) {
				t.Errorf("an error without a class or location: %v", err)
			}
			return
		}
		if err2 != nil || len(loose.Tensors) != len(h.Tensors) || !maps.Equal(loose.Metadata, h.Metadata) {
			t.Fatalf("lenient mode reads less than strict mode: %v", err2)
		}
		entries := make([]Entry, len(h.Tensors))
		for i, ten := range h.Tensors {
			entries[i] = Entry{ten.Name, ten.DType, ten.Shape, ten.Off - h.Data, ten.Off - h.Data + ten.Bytes}
		}
		head, err := AppendHeader(nil, h.Metadata, entries, 0)
		if err != nil {
			t.Fatalf("cannot be written again: %v", err)
		}
		if bound := HeaderBound(h.Metadata, entries, size); int64(len(strings.TrimRight(string(head), " "))) > bound {
			t.Fatalf("%d bytes over the bound of %d", len(head), bound)
		}
		again, err := Parse("x", head, int64(len(head))+size-h.Data, Options{})
		if err != nil || len(again.Tensors) != len(h.Tensors) || !maps.Equal(again.Metadata, h.Metadata) {
			t.Fatalf("written again: %v", err)
		}
		for i := range again.Tensors {
			again.Tensors[i].Off += h.Data - again.Data
		}
		if !reflect.DeepEqual(again.Tensors, h.Tensors) {
			t.Fatal("written again, it reads differently")
		}
	})
}

// FuzzShards parses arbitrary bytes as an index.json.
func FuzzShards(f *testing.F) {
	f.Add([]byte(`{"metadata":{"total_size":24,"x":[1]},"weight_map":{"a":"x.safetensors","b":"y.safetensors"}}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		s, err := ReadIndexJSON("x", b)
		if err != nil {
			return
		}
		again, err := ReadIndexJSON("x", AppendIndexJSON(nil, s))
		if err != nil || !slices.Equal(again.Files, s.Files) || len(again.Weights) != len(s.Weights) ||
			again.TotalSize != s.TotalSize {
			t.Fatalf("written again: %v", err)
		}
	})
}

// Only keeps the files of the given names with all their tensors. If a name is missing from the index, it keeps all
// files.
func TestOnly(t *testing.T) {
	s := Shards{Files: []string{"a", "b", "c"}, Weights: []Weight{{"x", 2}, {"y", 0}, {"z", 2}, {"w", 1}}, TotalSize: 9}
	for _, c := range []struct {
		names string
		want  Shards
	}{
		{"", Shards{TotalSize: 9}},
		{"x", Shards{Files: []string{"c"}, Weights: []Weight{{"x", 0}, {"z", 0}}, TotalSize: 9}},
		{"z y x x", Shards{Files: []string{"a", "c"}, Weights: []Weight{{"x", 1}, {"y", 0}, {"z", 1}}, TotalSize: 9}},
		{"x y w", s},
		{"x nowhere", s},
	} {
		if got := s.Only(strings.Fields(c.names)); !reflect.DeepEqual(got, c.want) {
			t.Errorf("%q: %+v, want %+v", c.names, got, c.want)
		}
	}
}
