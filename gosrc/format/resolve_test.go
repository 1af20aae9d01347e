package format

// The tests in this file check which files of a folder, a store or an index form a model, and that no file stays
// open.

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/format/safetensors"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/tensor"
)

// A store keeps objects in memory and counts how many are open.
type store struct {
	mu     sync.Mutex
	files  map[string][]byte
	opened []string
	open   int
}

type object struct {
	memory
	of *store
}

func (o *object) Close() error {
	o.of.mu.Lock()
	defer o.of.mu.Unlock()
	o.of.open--
	return nil
}

func (s *store) Open(_ context.Context, uri string, _ source.Outline) (source.Source, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	b, ok := s.files[uri]
	if !ok {
		return nil, errs.New(errs.ErrNotFound, "%s", uri)
	}
	s.opened, s.open = append(s.opened, uri), s.open+1
	return &object{memory{name: uri, b: b}, s}, nil
}

// of returns a plain file of one-byte tensors.
func of(t *testing.T, names ...string) []byte {
	t.Helper()
	var entries []safetensors.Entry
	for i, name := range names {
		entries = append(entries, safetensors.Entry{Name: name, DType: tensor.U8, Shape: []int64{1}, Begin: int64(i),
			End: int64(i + 1)})
	}
	head, err := safetensors.AppendHeader(nil, nil, entries, 8)
	if err != nil {
		t.Fatal(err)
	}
	return append(head, make([]byte, len(names))...)
}

// listing returns an index.json for pairs of tensor and file.
func listing(pairs ...string) []byte {
	var rows []string
	for i := 0; i < len(pairs); i += 2 {
		rows = append(rows, fmt.Sprintf("%q:%q", pairs[i], pairs[i+1]))
	}
	return []byte(`{"metadata":{},"weight_map":{` + strings.Join(rows, ",") + `}}`)
}

// A remote name refers to the object itself, the files that its index.json lists, or the model in its folder. In a
// folder that the store cannot list, it refers to the first of the usual names that exists.
func TestResolveRemote(t *testing.T) {
	const dir = "https://host/models/m/"
	two := listing("a", "1.safetensors", "b", "2.safetensors")
	broken := errs.New(errs.ErrIO, "the store is broken")
	for _, c := range []struct {
		name   string
		uri    string
		store  []string // files in the folder
		listed error    // the store's error for a listing
		want   []string // names in the folder
		class  error
	}{
		{"a file", dir + "x.safetensors", nil, nil, []string{"x.safetensors"}, nil}, // whether it exists is checked later
		{"an index", dir + "m.safetensors.index.json", []string{"m.safetensors.index.json"}, nil, []string{"1.safetensors", "2.safetensors"}, nil},
		{"a missing index", dir + "m.safetensors.index.json", nil, nil, nil, errs.ErrNotFound},
		{"one file of a folder", dir, []string{"b.safetensors", "README.md"}, nil, []string{"b.safetensors"}, nil},
		{"an index and its files", dir, []string{"1.safetensors", "2.safetensors", "m.safetensors.index.json", "old.safetensors"}, nil, []string{"1.safetensors", "2.safetensors"}, nil},
		{"hidden files", dir, []string{".x.safetensors", "b.safetensors", ".m.safetensors.index.json"}, nil, []string{"b.safetensors"}, nil},
		{"two indexes", dir, []string{"a.safetensors.index.json", "b.safetensors.index.json"}, nil, nil, errs.ErrArgument},
		{"no weights", dir, []string{"README.md"}, nil, nil, errs.ErrNotFound},
		{"a broken store", dir, []string{"model.safetensors"}, broken, nil, errs.ErrIO},
		{"no listing, one file", dir, []string{"model.safetensors", "other.safetensors"}, errs.ErrNotSupported, []string{"model.safetensors"}, nil},
		{"no listing, an index", dir, []string{"model.safetensors", "model.safetensors.index.json"}, errs.ErrNotSupported, []string{"1.safetensors", "2.safetensors"}, nil},
		{"no listing, a part of a pipeline", dir, []string{"diffusion_pytorch_model.safetensors"}, errs.ErrNotSupported, []string{"diffusion_pytorch_model.safetensors"}, nil},
		{"no listing, a delta", dir, []string{"delta.safetensors.index.json"}, errs.ErrNotSupported, []string{"1.safetensors", "2.safetensors"}, nil},
		{"no listing, Mistral's own", dir, []string{"consolidated.safetensors"}, errs.ErrNotSupported, []string{"consolidated.safetensors"}, nil},
		{"no listing, another name", dir, []string{"other.safetensors"}, errs.ErrNotSupported, nil, errs.ErrNotFound},
	} {
		s := store{files: map[string][]byte{}}
		for _, name := range c.store {
			s.files[dir+name] = two
		}
		opt := Options{List: func(context.Context, string) ([]string, error) {
			return slices.Sorted(maps.Keys(s.files)), c.listed
		}}
		set, err := Resolve(t.Context(), source.LocationOf(c.uri), s.Open, opt)
		files, shards := set.URIs, set.Shards
		var want []string
		for _, name := range c.want {
			want = append(want, dir+name)
		}
		if !errors.Is(err, c.class) || !slices.Equal(files, want) || (shards != nil) != (len(c.want) == 2) ||
			s.open != 0 {
			t.Errorf("%s: %q, index %v, %d open, %v", c.name, files, shards != nil, s.open, err)
		}
	}
	s := store{files: map[string][]byte{dir + "model.safetensors": nil}}
	s.files[dir+"model.safetensors.index.json"] = listing()
	_, err := Resolve(t.Context(), source.LocationOf(dir), s.Open, Options{})
	if !errors.Is(err, errs.ErrFormat) || !strings.Contains(err.Error(), "lists no tensor") || s.open != 0 {
		t.Errorf("an index without tensors: %v, %d open", err, s.open)
	}
	s.files[dir+"model.safetensors.index.json"] = []byte("{")
	_, err = Resolve(t.Context(), source.LocationOf(dir), s.Open, Options{})
	if !errors.Is(err, errs.ErrFormat) || s.open != 0 {
		t.Errorf("a bad index before a good file: %v, %d open", err, s.open)
	}
}

// A store that refuses to say whether names exist, as stores without listing rights do, does not hide an existing
// model. If there is no model, the first refusal is the error. A refusal by the Hub ends the search, and so does any
// store's failure.
func TestRefusedNames(t *testing.T) {
	denied := errs.In("open", "x", errs.New(errs.ErrPermission, "HTTP 403 Forbidden"))
	bad := errs.In("open", "x", errs.WithRule(source.RuleRefused, errs.New(errs.ErrIO, "HTTP 400 Bad Request")))
	broken := errs.In("open", "x", errs.New(errs.ErrIO, "the store is broken"))
	list := func(context.Context, string) ([]string, error) {
		return nil, errs.New(errs.ErrPermission, "no ListBucket")
	}
	for _, dir := range []string{"https://host/m/", "s3://bucket/m/", "hf://org/name@main"} {
		for _, refusal := range []error{denied, bad, broken} {
			for _, there := range []string{"model.safetensors", "diffusion_pytorch_model.safetensors.index.json",
				"consolidated.safetensors", ""} {
				s := store{files: map[string][]byte{source.Beside(dir, there): listing("a", "1.safetensors")}}
				opt := Options{}
				if source.Scheme(dir) == "s3" {
					opt.List = list
				}
				at := source.LocationOf(dir)
				open := func(ctx context.Context, uri string, outline source.Outline) (source.Source, error) {
					src, err := s.Open(ctx, uri, outline)
					if err != nil {
						err = refusal
					}
					return src, err
				}
				set, err := Resolve(t.Context(), at, open, opt)
				found := there != "" && source.Scheme(dir) != "hf" && refusal != broken
				if (err == nil) != found || found && len(set.URIs) != 1 || s.open != 0 {
					t.Errorf("%s, %q, %v: got %v, %v, and %d sources open", dir, there, refusal, set.URIs, err, s.open)
				}
				want := refusal
				if opt.List != nil && refusal != broken {
					want = errs.ErrPermission
				}
				if !found && !errors.Is(err, want) {
					t.Errorf("%s, %q: got %v, want %v", dir, there, err, want)
				}
			}
		}
	}
}

// shards returns the file names of n shards.
func shards(stem string, n int) (names []string) {
	for k := range n {
		names = append(names, fmt.Sprintf("%s-%05d-of-%05d.safetensors", stem, k+1, n))
	}
	return names
}

// Resolve finds the model of a local folder. Its errors list the candidates, including those one level below.
func TestResolveFolders(t *testing.T) {
	two := string(listing("a", "1.safetensors", "b", "2.safetensors"))
	for _, c := range []struct {
		name  string
		files []string
		want  []string
		class error
		words string
	}{
		{"by name", []string{"b.safetensors", "a.safetensors", ".c.safetensors", "d.bin"}, []string{"a.safetensors", "b.safetensors"}, nil, ""},
		{"by its index", []string{"m.safetensors.index.json", "z.safetensors"}, []string{"1.safetensors", "2.safetensors"}, nil, ""},
		{"several indexes", []string{"m.safetensors.index.json", "n.safetensors.index.json"}, nil, errs.ErrArgument, "the folder contains several models"},
		{"a whole family", shards("model", 3), shards("model", 3), nil, ""},
		{"a family that counts from 0", []string{"m-0-of-2.safetensors", "m-1-of-2.safetensors"}, []string{"m-0-of-2.safetensors", "m-1-of-2.safetensors"}, nil, ""},
		{"one shard of three", shards("model", 3)[2:], nil, errs.ErrFormat, "it has only 1 of 3 shards: shards 1, 2 are missing"},
		{"a shard twice", append(shards("m", 2), "m-1-of-2.safetensors"), nil, errs.ErrFormat,
			"3 shards, but according to their names there are 2"},
		{"two families", append(shards("a", 2), shards("b", 2)...), nil, errs.ErrArgument, "a-00001-of-00002.safetensors"},
		{"families of two counts", append(shards("m", 1), shards("m", 2)...), nil, errs.ErrArgument, "several models"},
		{"one file and shards, without an index", append(shards("model", 3)[1:], "model.safetensors"), []string{"model.safetensors"}, nil, ""},
		{"a family and an adapter", append(shards("model", 2), "adapter_model.safetensors"), append([]string{"adapter_model.safetensors"}, shards("model", 2)...), nil, ""},
		{"the default and a variant", []string{"model.safetensors", "model.fp16.safetensors"}, []string{"model.safetensors"}, nil, ""},
		{"the default and a variant in shards", append(shards("model.fp16", 2), "model.safetensors"), []string{"model.safetensors"}, nil, ""},
		{"the only variant", []string{"model.fp16.safetensors"}, []string{"model.fp16.safetensors"}, nil, ""},
		{"two variants", []string{"model.fp16.safetensors", "model.bf16.safetensors"}, nil, errs.ErrArgument, "model.bf16.safetensors, "},
		{"names with dots", []string{"a.safetensors", "a.b.safetensors"}, []string{"a.b.safetensors", "a.safetensors"}, nil, ""},
		{"indexes of the default and a variant", []string{"m.safetensors.index.json", "m.safetensors.index.fp16.json"}, []string{"1.safetensors", "2.safetensors"}, nil, ""},
		{"the index of a variant", []string{"model.safetensors", "model.safetensors.index.fp16.json"}, []string{"model.safetensors"}, nil, ""},
		{"the index of the only variant", []string{"model.safetensors.index.fp16.json"}, []string{"1.safetensors", "2.safetensors"}, nil, ""},
		{"an index and a single file", []string{"model.safetensors", "model.safetensors.index.json"}, []string{"1.safetensors", "2.safetensors"}, nil, ""},
		{"two indexes, one of consolidated", []string{"model.safetensors.index.json", "consolidated.safetensors.index.json"}, []string{"1.safetensors", "2.safetensors"}, nil, ""},
		{"a single file and the index of consolidated", []string{"model.safetensors", "consolidated.safetensors.index.json"}, []string{"model.safetensors"}, nil, ""},
		{"consolidated without an index", append(shards("consolidated", 2), "model.safetensors"), []string{"model.safetensors"}, nil, ""},
		{"only consolidated", []string{"consolidated.safetensors"}, []string{"consolidated.safetensors"}, nil, ""},
		{"a model and the shards of a killed save", append(shards("model-ow0123abcd", 2), "model.safetensors"), []string{"model.safetensors"}, nil, ""},
		{"only the shards of a killed save", shards("model-ow0123abcd", 2), nil, errs.ErrFormat, "an unfinished save"},
		{"empty", nil, nil, errs.ErrNotFound, "no .safetensors file in this folder"},
		{"a pipeline", []string{"vae/x.safetensors", "unet/x.safetensors", "unet/y.safetensors", "text/notes"}, nil, errs.ErrNotFound, "open one of its subfolders (unet, vae)"},
		{"a cache", []string{"blobs/x", "snapshots/abc/x.safetensors"}, nil, errs.ErrNotFound, "name one of its snapshots"},
	} {
		for _, base := range []string{"plain", "[a]*?"} { // the second must not act as a pattern
			dir := filepath.Join(t.TempDir(), base)
			if err := os.MkdirAll(dir, 0o700); err != nil {
				t.Fatal(err)
			}
			for _, name := range c.files {
				path := filepath.Join(dir, name)
				if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o700),
					os.WriteFile(path, []byte(two), 0o600)); err != nil {
					t.Fatal(err)
				}
			}
			for _, uri := range []string{dir, dir + "/"} {
				set, err := Resolve(t.Context(), source.LocationOf(uri), nil, Options{})
				files := set.URIs
				var want []string
				for _, name := range c.want {
					want = append(want, filepath.Join(dir, name))
				}
				if !errors.Is(err, c.class) || err != nil && !strings.Contains(err.Error(), c.words) ||
					!slices.Equal(files, want) {
					t.Errorf("%s in %s: %q, %v", c.name, base, files, err)
				}
			}
		}
	}
}

// If one file is invalid, all opened files are closed. Files without a requested tensor are not opened.
func TestOpenAllLeavesNothingOpen(t *testing.T) {
	const dir = "https://host/m/"
	index := dir + "m.safetensors.index.json"
	files := func() map[string][]byte {
		return map[string][]byte{
			index:                 listing("a", "1.safetensors", "b", "2.safetensors", "c", "3.safetensors"),
			dir + "1.safetensors": of(t, "a"), dir + "2.safetensors": of(t, "b"), dir + "3.safetensors": of(t, "c"),
		}
	}
	for name, change := range map[string]func(f map[string][]byte){
		"a shard is missing":          func(f map[string][]byte) { delete(f, dir+"2.safetensors") },
		"a file is not a model":       func(f map[string][]byte) { f[dir+"3.safetensors"] = []byte("no such bytes") },
		"a tensor is in another file": func(f map[string][]byte) { f[dir+"1.safetensors"] = of(t, "b") },
		"the index is bad":            func(f map[string][]byte) { f[index] = []byte("{}") },
	} {
		s := store{files: files()}
		change(s.files)
		ix, srcs, _, err := OpenAll(t.Context(), []string{dir + "1.safetensors", index}, s.Open, Options{})
		if err == nil || !errs.Classed(err) || ix != nil || srcs != nil || s.open != 0 {
			t.Errorf("%s: %d left open, %v", name, s.open, err)
		}
	}
	for _, c := range []struct {
		keys []string
		want []string
	}{{nil, []string{"a", "b", "c"}}, {[]string{"b"}, []string{"b"}}, {[]string{"c", "a"}, []string{"a", "c"}}} {
		s := store{files: files()}
		ix, srcs, _, err := OpenAll(t.Context(), []string{index}, s.Open, Options{Keys: c.keys})
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for i := range ix.Tensors {
			got = append(got, ix.Tensors[i].Name)
		}
		if !slices.Equal(got, c.want) || len(srcs) != len(c.want) || s.open != len(c.want) ||
			len(s.opened) != 2+len(c.want) {
			t.Errorf("%v: tensors %v of %d sources, %d open, %v were opened", c.keys, got, len(srcs), s.open, s.opened)
		}
	}
	s := store{files: files()}
	names, ok, err := Names(t.Context(), []string{index, index}, s.Open, Options{})
	if !slices.Equal(names, []string{"a", "b", "c", "a", "b", "c"}) || !ok || err != nil || s.open != 0 ||
		len(s.opened) != 2 {
		t.Errorf("names %v, %v, %v; %v were opened", names, ok, err, s.opened)
	}
	if names, ok, err := Names(t.Context(), []string{index, dir + "1.safetensors"}, s.Open, Options{}); names != nil ||
		ok || err != nil {
		t.Errorf("names of a file without an index: %v, %v, %v", names, ok, err)
	}
	if _, _, _, err := OpenAll(t.Context(), nil, s.Open, Options{}); !errors.Is(err, errs.ErrArgument) {
		t.Errorf("OpenAll without names: %v", err)
	}
}

// If several files cannot be opened, the error names the first in order. openSources does not wait for later files.
func TestErrorNamesTheFirstMissingFile(t *testing.T) {
	failed := make(chan struct{})
	open := func(ctx context.Context, uri string, outline source.Outline) (source.Source, error) {
		switch uri {
		case "2": // fails last
			<-failed
			return nil, errs.New(errs.ErrNotFound, "file 2")
		case "5":
			defer close(failed)
			return nil, errs.New(errs.ErrIO, "file 5")
		case "9": // a store that does not answer
			<-ctx.Done()
			return nil, errs.Cause(ctx)
		}
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		return &memory{name: uri}, nil
	}
	files := []string{"0", "1", "2", "3", "4", "5", "6", "7", "8", "9"}
	srcs, err := openSources(t.Context(), files, open, source.Outline{})
	if !errors.Is(err, errs.ErrNotFound) || slices.Contains(srcs, nil) || len(srcs) < 2 { // at least 0 and 1
		t.Errorf("%d sources were opened, %v", len(srcs), err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := openSources(ctx, files[:2], open, source.Outline{}); !errors.Is(err, errs.ErrCancelled) {
		t.Errorf("openSources with a cancelled context: %v", err)
	}
}

// A tree lists the folders with files, each before its parent, but no hidden folders, no links, and not the output
// folder. A folder with parts of weights is marked if its parent folder has the whole weights.
func TestTree(t *testing.T) {
	dir := t.TempDir()
	put := func(names ...string) {
		for _, name := range names {
			path := filepath.Join(dir, name)
			if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), os.WriteFile(path, nil, 0o600)); err != nil {
				t.Fatal(err)
			}
		}
	}
	put("model_index.json", "unet/w.safetensors", "vae/w.safetensors.index.json", "text/notes", "deep/er/w.safetensors", ".git/w.safetensors", "out/w.safetensors")
	if err := errors.Join(os.Mkdir(filepath.Join(dir, "empty"), 0o700),
		os.Symlink(dir, filepath.Join(dir, "loop"))); err != nil {
		t.Fatal(err)
	}
	want := []Branch{{Path: "deep/er", Weights: true}, {Path: "text"}, {Path: "unet", Weights: true},
		{Path: "vae", Weights: true}, {}}
	if got, err := Tree(dir, filepath.Join(dir, "out")); err != nil || !slices.Equal(got, want) {
		t.Errorf("got %v, want %v: %v", got, want, err)
	}
	for _, none := range []string{"https://host/m/", filepath.Join(dir, "model_index.json"), filepath.Join(dir, "nowhere"), ""} {
		if got, err := Tree(none, ""); got != nil || err != nil {
			t.Errorf("%s: got %v, %v, want no branches", none, got, err)
		}
	}
	const part = "sharded/shard-00001-model-00001-of-00001.safetensors"
	put("vae/model.safetensors", "vae/"+part, "text/"+part)
	files := []source.Entry{{Name: "model.safetensors"}, {Name: part}}
	for where, of := range map[string]func() ([]Branch, error){
		"vae/sharded": func() ([]Branch, error) { return Tree(dir, "") },
		"sharded":     func() ([]Branch, error) { return RemoteTree("s3://b/m/", "", files) },
	} {
		got, err := of()
		if err != nil || !slices.Contains(got, Branch{Path: where, Parts: true}) {
			t.Errorf("parts in a subfolder of their weights: %v, %v", got, err)
		}
	}
	if got, _ := Tree(dir, ""); !slices.Contains(got, Branch{Path: "text/sharded", Weights: true}) {
		t.Errorf("parts without whole weights: %v", got)
	}
	deepest := strings.Repeat("d/", maxDepth)
	put(deepest + "x")
	if got, err := Tree(dir, ""); err != nil || !slices.Contains(got, Branch{Path: deepest[:len(deepest)-1]}) {
		t.Errorf("%d folders deep: %v, %v", maxDepth, got, err)
	}
	put(deepest + "d/x")
	if _, err := Tree(dir, ""); !errors.Is(err, errs.ErrNotSupported) {
		t.Errorf("%d folders deep: %v", maxDepth+1, err)
	}
	put("blobs/x", "snapshots/abc/x")
	if _, err := Tree(dir, ""); !errors.Is(err, errs.ErrArgument) || !strings.Contains(err.Error(), "snapshots/abc") {
		t.Errorf("a cache: %v", err)
	}
}

// An index.json defines the model's tensors, whether or not names are requested. Other tensors in its files, such as
// a stale duplicate, are ignored.
func TestTheIndexDecides(t *testing.T) {
	dir := t.TempDir() + "/"
	put := func(name string, b []byte) {
		if err := os.WriteFile(dir+name, b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	put("1.safetensors", of(t, "a", "b", "more"))
	put("2.safetensors", of(t, "a", "c"))
	put("m.safetensors.index.json", listing("a", "./2.safetensors", "b", "1.safetensors", "c", "2.safetensors"))
	open := func(_ context.Context, uri string, outline source.Outline) (source.Source, error) {
		b, err := os.ReadFile(uri)
		if err != nil {
			return nil, errs.In("open", uri, errs.FromOS(err))
		}
		return &memory{name: uri, b: b}, nil
	}
	for _, uri := range []string{dir, dir + "m.safetensors.index.json"} {
		for _, c := range []struct {
			opt  Options
			want string
		}{
			{Options{}, "b0 a1 c1"}, {Options{Keys: []string{"b"}}, "b0"}, {Options{Keys: []string{"a"}}, "a0 c0"},
			{Options{Keys: []string{"more"}}, "b0 a1 c1"}, {Options{Unlisted: true}, "a0 b0 more0 a1 c1"},
		} {
			ix, _, sets, err := OpenAll(t.Context(), []string{uri}, open, c.opt)
			if err != nil {
				t.Fatal(err)
			}
			var got []string
			for _, t := range ix.Tensors {
				got = append(got, fmt.Sprint(t.Name, t.Source))
			}
			if strings.Join(got, " ") != c.want || len(sets) != 1 || sets[0].Index != dir+"m.safetensors.index.json" {
				t.Errorf("%s, %+v: got the tensors %q of %v", uri, c.opt, got, sets)
			}
		}
	}
	// The index also selects the copy of a tensor that two files contain, if the files are named one by one.
	ix, _, _, err := OpenAll(t.Context(), []string{dir + "2.safetensors", dir + "1.safetensors"}, open, Options{})
	if err != nil || len(ix.Tensors) != 4 || ix.Tensors[0].Name != "a" || ix.Tensors[0].Source != 0 ||
		ix.Tensors[3].Name != "more" {
		t.Errorf("two named files: got %+v, %v", ix, err)
	}
	// The index does not apply to tensors that the named files lack, or that only one of them has.
	put("3.safetensors", of(t, "a", "c"))
	ix, _, _, err = OpenAll(t.Context(), []string{dir + "3.safetensors", dir + "1.safetensors"}, open, Options{})
	if err != nil || len(ix.Tensors) != 5 { // both copies stay
		t.Errorf("two copies, and the index names a third file: %+v, %v", ix, err)
	}
	put("3.safetensors", of(t, "b", "c"))
	ix, _, _, err = OpenAll(t.Context(), []string{dir + "3.safetensors", dir + "1.safetensors"}, open, Options{})
	if err != nil || len(ix.Tensors) != 4 {
		t.Errorf("the index assigns a tensor to a file that is not named: %+v, %v", ix, err)
	}
	put("m.safetensors", of(t, "a"))
	if err := os.Remove(dir + "2.safetensors"); err != nil {
		t.Fatal(err)
	}
	_, _, _, err = OpenAll(t.Context(), []string{dir}, open, Options{})
	for _, name := range []string{"2.safetensors", "m.safetensors.index.json", "m.safetensors, a complete model"} {
		if !errors.Is(err, errs.ErrNotFound) || !strings.Contains(err.Error(), dir+name) {
			t.Errorf("a stale index next to a single file: %v", err)
		}
	}
	put("i.index.json", listing("a", "2.safetensors"))
	_, _, _, err = OpenAll(t.Context(), []string{dir + "i.index.json"}, open, Options{})
	if err == nil || !strings.HasSuffix(err.Error(), "i.index.json lists it: fetch the model again") {
		t.Errorf("an index with an unusual name: %v", err)
	}
}

// If the index is replaced while the shards are opened, they are opened again. A load gets the files of one save
// or fails.
func TestIndexReplacedDuringOpen(t *testing.T) {
	for _, where := range []string{"far", "near"} {
		dir := "https://host/m/"
		if where == "near" {
			dir = t.TempDir() + "/"
		}
		index := dir + "m.safetensors.index.json"
		for _, c := range []struct {
			saves int // saves while the shards are opened
			class error
			want  string
		}{{0, nil, "1.safetensors"}, {1, nil, "2.safetensors"}, {9, errs.ErrCorrupt, ""}} {
			s := store{files: map[string][]byte{}}
			version, saves := 0, c.saves
			save := func() {
				version++
				name := fmt.Sprint(version, ".safetensors")
				delete(s.files, dir+fmt.Sprint(version-1, ".safetensors"))
				s.files[dir+name] = of(t, "a")
				s.files[index] = listing("a", name)
				if where == "near" {
					if err := errors.Join(os.WriteFile(index+".new", s.files[index], 0o600),
						os.Rename(index+".new", index)); err != nil {
						t.Fatal(err)
					}
				}
			}
			save()
			open := func(ctx context.Context, uri string, outline source.Outline) (source.Source, error) {
				src, err := s.Open(ctx, uri, outline)
				if uri != index && saves > 0 {
					saves--
					save()
				}
				return src, err
			}
			_, srcs, _, err := OpenAll(t.Context(), []string{index}, open, Options{})
			got := ""
			if len(srcs) == 1 {
				got = strings.TrimPrefix(srcs[0].URI(), dir)
			}
			if !errors.Is(err, c.class) || got != c.want || s.open != len(srcs) {
				t.Errorf("%s, %d saves: got %q, %d sources open, %v", where, c.saves, got, s.open, err)
			}
		}
	}
}
