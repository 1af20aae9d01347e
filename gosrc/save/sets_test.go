package save_test

// This file tests that a set of files is replaced in one step, even if the save is interrupted, and that every model in
// a folder is converted.

import (
	"errors"
	"io/fs"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/overwire/overwire/gosrc/convert"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/format"
	"github.com/overwire/overwire/gosrc/internal/atomicfile"
	"github.com/overwire/overwire/gosrc/save"
	"github.com/overwire/overwire/gosrc/save/savetest"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/source/sourcetest"
	"github.com/overwire/overwire/gosrc/stored"
	"github.com/overwire/overwire/gosrc/verify"
)

// A watchedFS calls look before and after each rename and removal.
type watchedFS struct {
	atomicfile.Disk
	look func()
}

func (w watchedFS) Rename(from, to string) error {
	w.look()
	defer w.look()
	return w.Disk.Rename(from, to)
}

func (w watchedFS) RenameNew(from, to string) error {
	w.look()
	defer w.look()
	return w.Disk.RenameNew(from, to)
}

func (w watchedFS) Remove(path string) error {
	w.look()
	defer w.look()
	return w.Disk.Remove(path)
}

// At every step of a save over an earlier model, in one file or in shards, the folder is the old or the new model. It
// does not become the old model again. In the end the folder has no other files.
func TestEveryStepOfAReplacement(t *testing.T) {
	for name, c := range map[string]struct{ old, now int64 }{
		"shards over as many": {1500, 1500}, "over more": {1500, 2500}, "over fewer": {2500, 1500}, "over one file": {0, 1500}, "one file over shards": {1500, 1 << 20},
	} {
		for _, indexed := range []bool{true, false} {
			dir := t.TempDir()
			path := filepath.Join(dir, "model.safetensors")
			write(t, save.Spec{Path: path, Shard: c.old}, of(1, 4))
			if !indexed {
				if err := os.Remove(path + ".index.json"); c.old == 0 || c.now > 1<<16 || err != nil {
					continue // one file cannot replace shards without an index in one step
				}
			}
			steps, replaced := 0, false
			look := func() {
				got := read(t, dir)
				k := got["a"].Data[0]
				same(t, of(k, 4), got)
				steps++
				if replaced = replaced || k == 2; replaced != (k == 2) {
					t.Errorf("%s: the old model is back", name)
				}
			}
			rep, err := save.Write(bg, nil, save.Spec{Path: path, Shard: c.now, FS: watchedFS{look: look}}, of(2, 4))
			if look(); err != nil || !replaced || steps < 4 {
				t.Errorf("%s: %d steps, %v", name, steps, err)
			}
			if all, _ := os.ReadDir(dir); len(all) != len(rep.Files) {
				t.Errorf("%s: found %v, but %v were written", name, all, rep.Files)
			}
		}
	}
}

// A folder that is converted in place, or over an earlier conversion, is a complete model at every step, with and
// without an index.json.
func TestEveryStepOfAConversion(t *testing.T) {
	for _, indexed := range []bool{true, false} {
		src, dst := t.TempDir(), t.TempDir()
		for dir, k := range map[string]byte{src: 2, dst: 1} {
			write(t, save.Spec{Path: filepath.Join(dir, "m.safetensors"), Shard: 2500}, of(k, 4))
			if !indexed {
				_ = os.Remove(filepath.Join(dir, "m.safetensors.index.json"))
			}
		}
		for _, to := range []string{dst, src} {
			look := func() {
				got := read(t, to)
				same(t, of(got["a"].Data[0], 4), got)
			}
			rep, err := convert.Convert(bg, nil, []string{src}, to,
				save.Spec{Compress: true, FS: watchedFS{look: look}})
			if err != nil {
				t.Fatal(err)
			}
			same(t, of(2, 4), read(t, to))
			if all, _ := os.ReadDir(to); len(all) != 3 || len(rep.Files) != 3 {
				t.Errorf("found %v, but %v were written", all, rep.Files)
			}
		}
	}
}

// If two saves to an empty folder run at the same time, one succeeds, and the other fails or replaces it.
func TestTwoSavesAtOnce(t *testing.T) {
	dir := t.TempDir()
	spec := save.Spec{Path: filepath.Join(dir, "model.safetensors"), Shard: 1500}
	between := spec
	once := false
	between.FS = watchedFS{look: func() {
		if !once {
			once = true
			write(t, spec, of(1, 4))
		}
	}}
	if _, err := save.Write(bg, nil, between, of(2, 4)); !errors.Is(err, errs.ErrIO) ||
		!strings.Contains(err.Error(), "another save") {
		t.Error(err)
	}
	same(t, of(1, 4), read(t, dir))
	once = false
	if _, err := save.Write(bg, nil, between, of(2, 4)); err != nil {
		t.Error(err)
	}
	same(t, of(2, 4), read(t, dir))
	noTemps(t, dir)
}

// If any request fails while shards are saved over shards, the store has either the old or the new model complete, and
// no other files.
func TestRemoteSetsAreReplaced(t *testing.T) {
	s := sourcetest.StartS3(t, false)
	direct := format.Access{Options: source.Options{Storage: s.Options()}}
	var fail, seen atomic.Int64
	u, _ := url.Parse(s.URL)
	p := &httputil.ReverseProxy{Rewrite: func(r *httputil.ProxyRequest) { r.SetURL(u); r.Out.Host = r.In.Host }}
	h := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodDelete && seen.Add(1) == fail.Load() {
			w.WriteHeader(http.StatusForbidden) // this status is not retried
			return
		}
		p.ServeHTTP(w, r)
	}))
	t.Cleanup(h.Close)
	storage := s.Options()
	storage["endpoint_url"] = h.URL
	path := "s3://models/m/w.safetensors"
	load := func() map[string]save.Input { return savetest.ReadFrom(t, direct, "s3://models/m/") }
	write(t, save.Spec{Path: path, Shard: 2500, Storage: direct}, of(1, 4))
	for request := int64(1); ; request++ {
		seen.Store(0)
		fail.Store(request)
		rep, err := save.Write(bg, nil, save.Spec{Path: path, Shard: 2500,
			Storage: format.Access{Options: source.Options{Storage: storage}}}, of(2, 4))
		got := load()
		if seen.Load() < request {
			if same(t, of(2, 4), got); err != nil || len(rep.Files) != 3 || request < 5 {
				t.Error(request, rep.Files, err)
			}
			break
		}
		if err != nil {
			same(t, of(1, 4), got)
		}
		if found, _ := filepath.Glob(filepath.Join(s.Data, "m", "w*")); len(found) != 3 {
			t.Errorf("request %d failed: %v are there", request, found)
		}
		if err == nil {
			write(t, save.Spec{Path: path, Shard: 2500, Storage: direct}, of(1, 4))
		}
	}
}

// Every model in a folder is converted with its index.json, so every library finds the same model in the new folder as
// in the old one. Auxiliary files are copied once.
func TestConvertEveryModelOfAFolder(t *testing.T) {
	sets := map[string]int64{"model.safetensors": 1500, "model.fp16.safetensors": 1500, "consolidated.safetensors": 1500}
	indexes := map[string]string{"model.fp16.safetensors.index.json": "model.safetensors.index.fp16.json"}
	for name, c := range map[string]struct {
		sets []string
		more string // one file
	}{
		"variants in shards":          {sets: []string{"model.safetensors", "model.fp16.safetensors"}},
		"a variant in one file":       {sets: []string{"model.safetensors"}, more: "model.fp16.safetensors"},
		"Mistral's":                   {sets: []string{"model.safetensors", "consolidated.safetensors"}},
		"Mistral's, in one file":      {sets: []string{"model.safetensors"}, more: "consolidated.safetensors"},
		"one file next to shards":     {sets: []string{"model.safetensors"}, more: "model.safetensors"},
		"an adapter of peft":          {sets: []string{"model.safetensors"}, more: "adapter_model.safetensors"},
		"LoRA of diffusers":           {sets: []string{"model.safetensors"}, more: "pytorch_lora_weights.safetensors"},
		"one file, variant in shards": {sets: []string{"model.fp16.safetensors"}, more: "model.safetensors"},
	} {
		src, dst := t.TempDir(), filepath.Join(t.TempDir(), "out")
		want := map[string]byte{}
		k := byte(1)
		for _, set := range c.sets {
			write(t, save.Spec{Path: filepath.Join(src, set), Shard: sets[set]}, of(k, 3))
			index := set + ".index.json"
			if other := indexes[index]; other != "" {
				if err := os.Rename(filepath.Join(src, index), filepath.Join(src, other)); err != nil {
					t.Fatal(err)
				}
				index = other
			}
			want[index] = k
			k++
		}
		if c.more != "" {
			write(t, save.Spec{Path: filepath.Join(src, c.more), Beside: true}, of(k, 3))
			want[c.more] = k
		}
		put(t, src, map[string]string{"config.json": "{}"})
		var stray []string
		if c.sets[0] == "model.safetensors" { // this index decides which files are weights
			stray = []string{"old-00001-of-00002.safetensors"}
			put(t, src, map[string]string{stray[0]: "no model"})
		}
		before := read(t, src)["a"].Data[0]
		rep := convertTo(t, []string{src}, dst, save.Spec{Compress: true})
		if got := read(t, dst)["a"].Data[0]; got != before {
			t.Errorf("%s: the folder is model %d, and was %d", name, got, before)
		}
		for file, k := range want {
			same(t, of(k, 3), read(t, filepath.Join(dst, file)))
		}
		if got := names(dst, rep.Copied); !slices.Equal(got, []string{"config.json"}) {
			t.Errorf("%s: copied %q", name, got)
		}
		was, _ := filepath.Glob(filepath.Join(src, "[acmp]*"))
		if now, _ := filepath.Glob(filepath.Join(dst, "*")); !slices.Equal(names(src, was), names(dst, now)) {
			t.Errorf("%s: %q became %q", name, was, now)
		}
		if got := names(src, rep.Left); !slices.Equal(got, stray) {
			t.Errorf("%s: left %q", name, got)
		}
		if all, _ := os.ReadDir(src); len(all) != len(stray)+len(rep.Files) {
			t.Errorf("%s: %v of %v", name, rep.Files, all)
		}
		if _, err := convert.Convert(bg, nil, []string{src}, filepath.Join(t.TempDir(), "out")+"/",
			save.Spec{Shard: 1 << 20}); !errors.Is(err, errs.ErrArgument) {
			t.Errorf("%s: sharding several models: %v", name, err)
		}
		convertTo(t, []string{src}, src, save.Spec{Compress: true})
		if got := read(t, src)["a"].Data[0]; got != before {
			t.Errorf("%s: onto itself it became model %d, and was %d", name, got, before)
		}
		index := c.sets[0] + ".index.json"
		if other := indexes[index]; other != "" {
			index = other
		}
		dst = filepath.Join(t.TempDir(), "named")
		rep = convertTo(t, []string{filepath.Join(src, index)}, dst, save.Spec{})
		if len(rep.Files) != 5 || !slices.Equal(names(dst, rep.Copied), []string{"config.json"}) {
			t.Errorf("%s: %v of a named index", name, rep.Files)
		}
		same(t, of(want[index], 3), read(t, filepath.Join(dst, index)))
	}
}

// Saving or converting the default model over its old files does not touch the shards of a variant, in either spelling
// of their names.
func TestVariantsAreSeparateModels(t *testing.T) {
	dir := t.TempDir()
	for k, path := range []string{"model-00001-of-00002.fp16.safetensors", "model-00002-of-00002.fp16.safetensors"} {
		write(t, save.Spec{Path: filepath.Join(dir, path)}, of(2, 2)[k:k+1])
	}
	variant := filepath.Join(dir, "model.safetensors.index.fp16.json")
	put(t, dir, map[string]string{filepath.Base(variant): `{"weight_map":{"a":"model-00001-of-00002.fp16.safetensors","b":"model-00002-of-00002.fp16.safetensors"}}`})
	for _, shard := range []int64{1500, 1 << 20, 1500} { // several files, one, several
		write(t, save.Spec{Path: filepath.Join(dir, "model.safetensors"), Shard: shard}, of(1, 2))
		same(t, of(2, 2), read(t, variant))
	}
	for range 2 {
		convertTo(t, []string{dir}, dir, save.Spec{Compress: true})
		same(t, of(1, 2), read(t, dir))
		same(t, of(2, 2), read(t, variant))
	}
}

// Each index in a folder is a model, even if two have the same variant. All are converted. Files that another index
// lists are not removed.
func TestTwoIndexesOfOneFamily(t *testing.T) {
	dir := t.TempDir()
	want := map[string]byte{"model.safetensors.index.json": 1, "model.safetensors.index.fp16.json": 2, "model.fp16.safetensors.index.json": 3}
	for _, name := range []string{"model.safetensors.index.json", "model.safetensors.index.fp16.json", "model.fp16.safetensors.index.json"} {
		k := want[name]
		file := []string{"", "model-00001-of-00001.safetensors", "model-00001-of-00001.fp16.safetensors", "model.fp16-00001-of-00001.safetensors"}[k]
		write(t, save.Spec{Path: filepath.Join(dir, file)}, of(k, 1))
		put(t, dir, map[string]string{name: `{"weight_map":{"a":"` + file + `"}}`})
	}
	other := filepath.Join(t.TempDir(), "out")
	for _, dst := range []string{other, other, dir, dir} {
		convertTo(t, []string{dir}, dst, save.Spec{Compress: true})
		for name, k := range want {
			same(t, of(k, 1), read(t, filepath.Join(dst, name)))
		}
	}
	write(t, save.Spec{Path: filepath.Join(dir, "model.fp16.safetensors"), Shard: 1 << 20}, of(4, 1))
	same(t, of(2, 1), read(t, filepath.Join(dir, "model.safetensors.index.fp16.json")))
	if err := os.Remove(filepath.Join(other, "model.safetensors.index.json")); err != nil {
		t.Fatal(err)
	}
	if _, err := stored.Open(bg, []string{other}, format.Access{}, false); !errors.Is(err, errs.ErrArgument) {
		t.Errorf("two indexes of one variant: %v", err)
	}
}

// If an index cannot be read, files that it may list are not removed, and the old set remains.
func TestUnreadableIndex(t *testing.T) {
	for _, broken := range []string{"model.safetensors.index.fp16.json", "model.fp16.safetensors.index.json"} {
		dir := t.TempDir()
		path := filepath.Join(dir, "model.fp16.safetensors")
		write(t, save.Spec{Path: path, Shard: 1500}, of(3, 3))
		const other = "model-00001-of-00001.fp16.safetensors" // of the same set
		write(t, save.Spec{Path: filepath.Join(dir, other)}, of(2, 1))
		put(t, dir, map[string]string{"model.safetensors.index.fp16.json": `{"weight_map":{"a":"` + other + `"}}`})
		text, err := os.ReadFile(filepath.Join(dir, broken))
		if err == nil {
			err = os.Remove(filepath.Join(dir, broken))
		}
		if err == nil {
			err = os.Symlink("/proc/self/mem", filepath.Join(dir, broken)) // EIO
		}
		if err != nil {
			t.Fatal(err)
		}
		before, _ := filepath.Glob(filepath.Join(dir, "*"))
		if _, err := save.Write(bg, nil, save.Spec{Path: path, Shard: 1 << 20}, of(4, 1)); !errors.Is(err, errs.ErrIO) {
			t.Errorf("%s: %v", broken, err)
		}
		if after, _ := filepath.Glob(filepath.Join(dir, "*")); !slices.Equal(before, after) {
			t.Errorf("%s: %q became %q", broken, before, after)
		}
		if err := os.Remove(filepath.Join(dir, broken)); err != nil {
			t.Fatal(err)
		}
		put(t, dir, map[string]string{broken: string(text)})
		same(t, of(3, 3), read(t, path+".index.json"))
		same(t, of(2, 1), read(t, filepath.Join(dir, "model.safetensors.index.fp16.json")))
	}
}

// An index with a missing shard is not converted: nothing is written, and the error names both.
func TestIndexWithoutItsShardsIsNotConverted(t *testing.T) {
	src, dst := t.TempDir(), filepath.Join(t.TempDir(), "out")
	write(t, save.Spec{Path: filepath.Join(src, "model.safetensors")}, of(1, 3))
	put(t, src, map[string]string{"model.safetensors.index.fp16.json": `{"weight_map":{"a":"gone.safetensors"}}`})
	_, err := convert.Convert(bg, nil, []string{src}, dst, save.Spec{Compress: true})
	if !errors.Is(err, errs.ErrNotFound) || !strings.Contains(err.Error(), "gone.safetensors") || !strings.Contains(err.Error(), "index.fp16.json") {
		t.Error(err)
	}
	if _, err := os.Stat(dst); err == nil {
		t.Error("something was made")
	}
}

// Tensors that the index does not list are converted if files are converted one by one. They are dropped if the model's
// tensors are merged into one file.
func TestUnlistedTensors(t *testing.T) {
	src := t.TempDir()
	write(t, save.Spec{Path: filepath.Join(src, "m-00001-of-00002.safetensors")}, of(1, 2))
	write(t, save.Spec{Path: filepath.Join(src, "m-00002-of-00002.safetensors"), Digests: true, Compress: true}, of(2, 3))
	put(t, src, map[string]string{"m.safetensors.index.json": `{"weight_map":{"a":"m-00001-of-00002.safetensors","b":"./m-00002-of-00002.safetensors"}}`})
	want := []save.Input{of(1, 2)[0], of(2, 3)[1]}
	same(t, want, read(t, src))
	for _, spec := range []save.Spec{{}, {Compress: true}} {
		one := filepath.Join(t.TempDir(), "one.safetensors")
		convertTo(t, []string{src}, one, spec)
		same(t, want, read(t, one))
		dst := filepath.Join(t.TempDir(), "out")
		convertTo(t, []string{src}, dst, spec)
		same(t, want, read(t, dst))
		same(t, of(2, 3), read(t, filepath.Join(dst, "m-00002-of-00002.safetensors")))
		digests, err := verify.Digests(bg, nil, []string{src}, format.Access{}, nil)
		again, aerr := verify.Digests(bg, nil, []string{dst}, format.Access{}, nil)
		if err != nil || aerr != nil || len(digests.Tensors) != 2 ||
			digests.Tensors[1].Digest != again.Tensors[1].Digest || digests.Tensors[1].Digest == "" {
			t.Errorf("%+v, %+v, %v", digests, again, err)
		}
		if _, err := verify.Verify(bg, nil, []string{dst}, format.Access{}, false); err != nil {
			t.Error(err)
		}
	}
}

// If a source is written to while it is converted, the conversion fails and the result is not published.
func TestSourcesThatAreWrittenTo(t *testing.T) {
	src, dst := filepath.Join(t.TempDir(), "m.safetensors"), filepath.Join(t.TempDir(), "out.safetensors")
	write(t, save.Spec{Path: src}, of(1, 3))
	age := 0
	touch := func() {
		age++
		if err := os.Chtimes(src, time.Now(), time.Now().Add(time.Duration(age)*time.Second)); err != nil {
			t.Fatal(err)
		}
	}
	_, err := convert.Convert(bg, nil, []string{src}, dst,
		save.Spec{Parts: 2, Compress: true, FS: createFS{create: touch}})
	if !errors.Is(err, errs.ErrCorrupt) || !strings.Contains(err.Error(), src) {
		t.Error(err)
	}
	if _, err := os.Stat(dst); err == nil {
		t.Error("it was published")
	}
	m, err := stored.Open(bg, []string{src}, format.Access{}, false)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	if err := m.RefuseWritten(); err != nil {
		t.Error(err)
	}
	touch()
	if err := m.RefuseWritten(); !errors.Is(err, errs.ErrCorrupt) {
		t.Error(err)
	}
}

// A createFS calls create before it creates a file.
type createFS struct {
	atomicfile.Disk
	create func()
}

func (c createFS) Create(path string, mode fs.FileMode) (atomicfile.File, error) {
	c.create()
	return c.Disk.Create(path, mode)
}
