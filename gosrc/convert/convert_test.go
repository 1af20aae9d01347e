package convert

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"hash/crc32"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/format"
	"github.com/overwire/overwire/gosrc/format/overwire"
	"github.com/overwire/overwire/gosrc/save"
	"github.com/overwire/overwire/gosrc/stored"
	"github.com/overwire/overwire/gosrc/verify"
)

func convert(t testing.TB, src []string, dst string, spec save.Spec) save.Report {
	t.Helper()
	rep, err := Convert(bg, nil, src, dst, spec)
	if err != nil {
		t.Fatal(err)
	}
	return rep
}

func TestConvertRoundTrip(t *testing.T) {
	// Compressing and decompressing preserves tensors and metadata for any chunk size and number of parts. A
	// decompressed file is the same as a plain file written from the tensors.
	r := newRand(t)
	in := some(r)
	dir := t.TempDir()
	at := func(n string) string { return filepath.Join(dir, n) }
	meta := map[string]string{"format": "pt"}
	write(t, save.Spec{Path: at("plain"), Metadata: meta}, in)
	want := sha256Of(t, at("plain"))
	write(t, save.Spec{Path: at("direct"), Metadata: meta, Compress: true}, in)
	convert(t, []string{at("direct")}, at("packed"), save.Spec{Compress: true})
	if sha256Of(t, at("packed")) != sha256Of(t, at("direct")) {
		t.Error("converting a container and saving its tensors give different containers")
	}
	convert(t, []string{at("plain")}, at("packed"), save.Spec{Compress: true})
	for _, spec := range []save.Spec{
		{Compress: true},
		{Compress: true, Parts: 8, ChunkBytes: 4096},
		{Compress: true, Parts: 2, ChunkBytes: 12288},
		{Compress: true, Parts: 4, Threads: 1},
	} {
		convert(t, []string{at("packed")}, at("packed"), spec) // the file is converted to itself
		if _, err := verify.Verify(bg, nil, []string{at("packed")}, format.Access{}, false); err != nil {
			t.Fatalf("%+v: %v", spec, err)
		}
		same(t, in, read(t, at("packed")))
		convert(t, []string{at("packed")}, at("back"), save.Spec{Threads: spec.Threads})
		if sha256Of(t, at("back")) != want {
			t.Fatalf("%+v: the plain file differs", spec)
		}
	}
	noTemps(t, dir)
}

func TestConvertAnIndexOfAnyName(t *testing.T) {
	// The name of an index.json may contain any bytes, because no index lists it.
	in := some(newRand(t))
	src, dst := t.TempDir(), filepath.Join(t.TempDir(), "out")
	write(t, save.Spec{Path: filepath.Join(src, "model.safetensors"), Shard: 700000}, in)
	if err := os.Rename(filepath.Join(src, "model.safetensors.index.json"), filepath.Join(src, "caf\xe9.safetensors.index.json")); err != nil {
		t.Fatal(err)
	}
	convert(t, []string{src}, dst, save.Spec{Compress: true})
	same(t, in, read(t, dst))
}

func TestConvertFolder(t *testing.T) {
	// Converting a folder preserves file names, shards, the index.json and auxiliary files. Hidden files are not
	// copied.
	r := newRand(t)
	src, dst := t.TempDir(), filepath.Join(t.TempDir(), "out")
	in := some(r)
	rep := write(t, save.Spec{Path: filepath.Join(src, "model.safetensors"), Shard: 700000}, in)
	if len(rep.Files) < 4 {
		t.Fatal(rep.Files)
	}
	os.WriteFile(filepath.Join(src, "config.json"), []byte("{}"), 0o600)
	os.WriteFile(filepath.Join(src, ".hidden"), []byte("{}"), 0o600)
	os.Mkdir(filepath.Join(src, "sub"), 0o700)
	convert(t, []string{src}, dst, save.Spec{Compress: true})
	same(t, in, read(t, dst))
	noTemps(t, dst)
	if _, err := verify.Verify(bg, nil, []string{dst}, format.Access{}, false); err != nil {
		t.Fatal(err)
	}
	back := filepath.Join(t.TempDir(), "back")
	convert(t, []string{dst}, back, save.Spec{})
	for _, f := range append(rep.Files, "config.json") {
		n := filepath.Base(f)
		if sha256Of(t, filepath.Join(src, n)) != sha256Of(t, filepath.Join(back, n)) {
			t.Errorf("%s differs", n)
		}
	}
	es, _ := os.ReadDir(back)
	if len(es) != len(rep.Files)+1 {
		t.Errorf("%v", es)
	}
	// The folder is converted to itself, then to one file, then to other shards.
	convert(t, []string{src}, src, save.Spec{Compress: true})
	same(t, in, read(t, src))
	one := filepath.Join(t.TempDir(), "one.safetensors")
	convert(t, []string{src}, one, save.Spec{Compress: true})
	same(t, in, read(t, one))
	again := filepath.Join(t.TempDir(), "m.safetensors")
	convert(t, []string{one}, again, save.Spec{Shard: 1 << 20})
	same(t, in, read(t, again+".index.json"))
}

func TestShards(t *testing.T) {
	// Shards have Hugging Face's names and index. A shard exceeds the limit only if a single tensor does. If one shard
	// is enough, the result is a single file.
	r := fixedRand()
	dir := t.TempDir()
	p := filepath.Join(dir, "model.safetensors")
	in := []save.Input{bf16("a", r, 10, 100), bf16("b", r, 10, 100), bf16("c", r, 10, 300), bf16("d", r, 10, 10)}
	write(t, save.Spec{Path: p}, in) // the old model, in one file
	rep := write(t, save.Spec{Path: p, Shard: 4000}, in)
	var names []string
	for _, f := range rep.Files {
		names = append(names, filepath.Base(f))
	}
	if got := strings.Join(names, " "); got != "model-00001-of-00003.safetensors model-00002-of-00003.safetensors model-00003-of-00003.safetensors model.safetensors.index.json" {
		t.Fatal(got)
	}
	if _, err := os.Stat(p); err == nil {
		t.Error("the old model still exists at the saved path")
	}
	b, _ := os.ReadFile(p + ".index.json")
	var ix struct {
		Metadata  map[string]int64
		WeightMap map[string]string `json:"weight_map"`
	}
	if err := json.Unmarshal(b, &ix); err != nil || ix.Metadata["total_size"] != 10200 ||
		!reflect.DeepEqual(ix.WeightMap, map[string]string{"a": names[0], "b": names[0], "c": names[1], "d": names[2]}) {
		t.Fatalf("%s %v", b, err)
	}
	same(t, in, read(t, p+".index.json"))
	rep = write(t, save.Spec{Path: p, Shard: 8000}, in)
	if es, _ := os.ReadDir(dir); len(rep.Files) != 3 || len(es) != 3 {
		t.Fatalf("%v, and in the folder %v", rep.Files, es)
	}
	rep = write(t, save.Spec{Path: p, Shard: 1 << 20}, in)
	if es, _ := os.ReadDir(dir); len(es) != 1 {
		t.Fatalf("in the folder %v", es)
	}
	if len(rep.Files) != 1 || rep.Files[0] != p {
		t.Fatal(rep.Files)
	}
}

func TestConvertRefuses(t *testing.T) {
	// A conversion that fails gives a typed error and leaves nothing, not even a folder.
	r := fixedRand()
	dir := t.TempDir()
	at := func(n string) string { return filepath.Join(dir, n) }
	write(t, save.Spec{Path: at("a")}, []save.Input{bf16("w", r, 10, 100)})
	write(t, save.Spec{Path: at("b")}, []save.Input{bf16("w", r, 10, 100)})
	_ = os.Mkdir(at("f"), 0o700)
	write(t, save.Spec{Path: at("f/a")}, []save.Input{bf16("w", r, 10, 100)})
	write(t, save.Spec{Path: at("f/z.safetensors")}, nil)
	packed := at("packed")
	write(t, save.Spec{Path: packed, Compress: true}, []save.Input{bf16("w", r, 100, 100)})
	b, _ := os.ReadFile(packed)
	b[len(b)-300] ^= 1
	_ = os.WriteFile(packed, b, 0o600)
	for name, c := range map[string]struct {
		src   []string
		dst   string
		class error
	}{
		"twice the name": {[]string{at("a"), at("b")}, at("x.safetensors"), errs.ErrArgument},
		"twice the file": {[]string{at("a"), at("f/a")}, at("x") + "/", errs.ErrArgument},
		"no source":      {nil, at("x"), errs.ErrArgument},
		"missing":        {[]string{at("none")}, at("x"), errs.ErrNotFound},
		"corrupt":        {[]string{packed}, at("x") + "/", errs.ErrCorrupt},
		"other weights":  {[]string{at("a")}, at("f") + "/", errs.ErrArgument},
		"no folder":      {[]string{at("a")}, at("no/x") + "/", errs.ErrNotFound},
	} {
		if _, err := Convert(bg, nil, c.src, c.dst, save.Spec{Compress: true}); !errors.Is(err, c.class) {
			t.Errorf("%s: %v", name, err)
		}
		if _, err := os.Stat(at("x")); err == nil {
			t.Errorf("%s: something was made", name)
		}
	}
	ctx, cancel := context.WithCancel(bg)
	cancel()
	if _, err := Convert(ctx, nil, []string{at("a")}, at("x"), save.Spec{}); !errors.Is(err, errs.ErrCancelled) {
		t.Error(err)
	}
	noTemps(t, dir)
}

func TestConvertOneFileFolder(t *testing.T) {
	// A folder is converted to a folder with its auxiliary files, even if it has only one file and the output does not
	// exist and has no trailing slash.
	src, dst := t.TempDir(), filepath.Join(t.TempDir(), "out")
	in := some(newRand(t))
	write(t, save.Spec{Path: filepath.Join(src, "model.safetensors")}, in)
	os.WriteFile(filepath.Join(src, "config.json"), []byte("{}"), 0o600)
	os.Mkdir(filepath.Join(src, "tokenizer"), 0o700)
	os.WriteFile(filepath.Join(src, "tokenizer", "vocab.txt"), []byte("a b"), 0o600)
	convert(t, []string{src}, dst, save.Spec{Compress: true})
	same(t, in, read(t, dst))
	for name, want := range map[string]string{"config.json": "{}", "tokenizer/vocab.txt": "a b"} {
		if b, err := os.ReadFile(filepath.Join(dst, name)); err != nil || string(b) != want {
			t.Errorf("%s: %q %v", name, b, err)
		}
	}
	// A name with a file extension is a file.
	file := filepath.Join(t.TempDir(), "one.safetensors")
	convert(t, []string{src}, file, save.Spec{Compress: true})
	same(t, in, read(t, file))
}

func TestConvertToAFolderWithTheNameOfAFile(t *testing.T) {
	// An existing folder is treated as a folder even if its name looks like a file.
	src, top := t.TempDir(), t.TempDir()
	in := []save.Input{bf16("a", newRand(t), 64, 64), bf16("b", newRand(t), 64, 64)}
	write(t, save.Spec{Path: filepath.Join(src, "model.safetensors")}, in)
	for name, spec := range map[string]save.Spec{
		"one.tensors": {Compress: true}, "two.tensors": {Compress: true, Shard: 8192}, "three.safetensors": {Compress: true},
	} {
		dst := filepath.Join(top, name)
		if err := os.Mkdir(dst, 0o700); err != nil {
			t.Fatal(err)
		}
		if rep := convert(t, []string{src}, dst, spec); rep.Compressed != 2 {
			t.Errorf("%s: %d tensors of 2 are compressed", name, rep.Compressed)
		}
		same(t, in, read(t, dst))
	}
}

func TestConvertTree(t *testing.T) {
	// Converting a folder converts the models in its subfolders. Files that are not copied are listed. A failure
	// removes a newly created folder.
	src, dst := t.TempDir(), filepath.Join(t.TempDir(), "out")
	in := some(newRand(t))
	for _, part := range []string{"unet", "vae", ".cache"} {
		os.Mkdir(filepath.Join(src, part), 0o700)
		write(t, save.Spec{Path: filepath.Join(src, part, "weights.safetensors"), Shard: 700000}, in)
	}
	os.WriteFile(filepath.Join(src, "model_index.json"), []byte("{}"), 0o600)
	os.WriteFile(filepath.Join(src, "unet", "other.safetensors"), []byte("x"), 0o600) // not in the index
	rep := convert(t, []string{src}, dst, save.Spec{Compress: true})
	for _, part := range []string{"unet", "vae"} {
		same(t, in, read(t, filepath.Join(dst, part)))
	}
	if _, err := os.Stat(filepath.Join(dst, ".cache")); err == nil {
		t.Error("a hidden folder was converted")
	}
	if last := rep.Files[len(rep.Files)-1]; filepath.Base(last) != "model_index.json" {
		t.Errorf("written last: %s", last)
	}
	if want := []string{filepath.Join(src, "unet", "other.safetensors"),
		filepath.Join(src, ".cache")}; !slices.Equal(rep.Left, want) || rep.Tensors != 2*len(in) {
		t.Errorf("%+v", rep)
	}
	if _, err := verify.Inspect(bg, []string{dst}, format.Access{}); err != nil {
		t.Error(err)
	}
	if v, err := verify.Verify(bg, nil, []string{dst}, format.Access{}, false); err != nil || len(v.Files) < 4 {
		t.Error(err, v)
	}
	convert(t, []string{src}, src, save.Spec{Compress: true}) // the folder is converted to itself
	same(t, in, read(t, filepath.Join(src, "vae")))
	os.WriteFile(filepath.Join(src, "vae", "weights.safetensors.index.json"), []byte("{}"), 0o600)
	gone := filepath.Join(t.TempDir(), "gone")
	if _, err := Convert(bg, nil, []string{src}, gone, save.Spec{Compress: true}); err == nil {
		t.Error("a broken index was converted")
	}
	if _, err := os.Stat(gone); err == nil {
		t.Error("a failed conversion has left files")
	}
	_, err := verify.Inspect(bg, []string{filepath.Join(src, "none")}, format.Access{})
	if !errors.Is(err, errs.ErrNotFound) {
		t.Error(err)
	}
}

func TestConvertComparesHashes(t *testing.T) {
	// A container with a wrong tensor hash is not converted, not even into column parts with digests. The error names
	// the hash and the file.
	r := newRand(t)
	path, dst := filepath.Join(t.TempDir(), "m"), filepath.Join(t.TempDir(), "out")
	write(t, save.Spec{Path: path, Compress: true}, []save.Input{bf16("big", r, 700, 1024)})
	m, err := stored.Open(bg, []string{path}, format.Access{}, false)
	if err != nil {
		t.Fatal(err)
	}
	hash := m.Index.Tensors[0].Hash
	m.Close()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var header map[string]struct {
		Offsets [2]int64 `json:"data_offsets"`
	}
	data := 8 + int64(binary.LittleEndian.Uint64(b))
	if err := json.Unmarshal(bytes.Replace(b[8:data], []byte(`"__metadata__"`), []byte(`"x"`), 1), &header); err != nil {
		t.Fatal(err)
	}
	index := b[data:][header[overwire.IndexName].Offsets[0]:header[overwire.IndexName].Offsets[1]]
	at := bytes.Index(index, hash[:])
	index[at] ^= 1
	number := func(at int) int { return int(binary.LittleEndian.Uint32(index[at:])) }
	sum := index[:64+64*number(16)+32*number(20)+8*number(24)] // docs/format.md 4
	binary.LittleEndian.PutUint32(index[len(sum):], crc32.Checksum(sum, crc32.MakeTable(crc32.Castagnoli)))
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, spec := range []save.Spec{{Compress: true}, {}, {Compress: true, Parts: 4, Digests: true}} {
		if _, err := Convert(bg, nil, []string{path}, dst, spec); !errors.Is(err, errs.ErrCorrupt) ||
			!strings.Contains(err.Error(), "XXH3") || !strings.Contains(err.Error(), path) {
			t.Errorf("%+v: %v", spec, err)
		}
	}
}
