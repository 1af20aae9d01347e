package save_test

import (
	"bytes"
	"errors"
	"fmt"
	"github.com/overwire/overwire/gosrc/format"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/overwire/overwire/gosrc/convert"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/job"
	"github.com/overwire/overwire/gosrc/save"
	"github.com/overwire/overwire/gosrc/stored"
	"github.com/overwire/overwire/gosrc/tensor"
	"github.com/overwire/overwire/gosrc/verify"
)

func TestRoundTrip(t *testing.T) {
	// Every kind of tensor is restored bit for bit, plain or compressed, in any number of column parts and chunks. The
	// file passes verification.
	in := ugly(newRand(t))
	meta := map[string]string{"format": "pt", "": "empty key", "ключ": "\x00\"quote"}
	for _, spec := range []save.Spec{
		{},
		{Compress: true},
		{Compress: true, Parts: 8, ChunkBytes: 4096},
		{Compress: true, Parts: 2, Threads: 1, ChunkBytes: 8192},
		{ChunkBytes: 4096, Threads: 5},
	} {
		t.Run(fmt.Sprintf("compress=%v parts=%d chunk=%d", spec.Compress, spec.Parts, spec.ChunkBytes), func(t *testing.T) {
			dir := t.TempDir()
			spec.Path, spec.Metadata = filepath.Join(dir, "m.safetensors"), meta
			rep := write(t, spec, in)
			noTemps(t, dir)
			same(t, in, read(t, spec.Path))
			v, err := verify.Verify(bg, nil, []string{spec.Path}, format.Access{}, false)
			if err != nil || !v.OK || v.Tensors != len(in) {
				t.Fatalf("%+v %v", v, err)
			}
			st, _ := os.Stat(spec.Path)
			if rep.BytesOut != st.Size() || rep.Tensors != len(in) {
				t.Fatalf("report %+v, size %d", rep, st.Size())
			}
			m, err := stored.Open(bg, []string{spec.Path}, format.Access{}, false)
			if err != nil {
				t.Fatal(err)
			}
			defer m.Close()
			if got := m.Metadata(0); len(got) != len(meta) || got["ключ"] != meta["ключ"] || got["format"] != "pt" {
				t.Fatalf("metadata %q", got)
			}
		})
	}
}

func TestNothing(t *testing.T) {
	// A model without tensors is a valid file.
	for _, c := range []bool{false, true} {
		p := filepath.Join(t.TempDir(), "m.safetensors")
		write(t, save.Spec{Path: p, Compress: c}, nil)
		if got := read(t, p); len(got) != 0 {
			t.Fatal(got)
		}
		if _, err := verify.Verify(bg, nil, []string{p}, format.Access{}, false); err != nil {
			t.Fatal(err)
		}
	}
}

func TestDeterministic(t *testing.T) {
	// The same input gives the same bytes for any number of threads, any order of the tensors, and at any time.
	r := newRand(t)
	in := append(ugly(r), bf16("big", r, 900, 1500), bf16("big2", r, 2100, 300))
	in = append(in, input("twin", tensor.BF16, []int64{1500, 900}, bytes.Clone(in[len(in)-2].Data)))
	for _, spec := range []save.Spec{{}, {Compress: true}, {Compress: true, Parts: 4, ChunkBytes: 1 << 16}} {
		var first string
		for k, threads := range []int{1, 2, 7, 2} {
			spec.Path, spec.Threads = filepath.Join(t.TempDir(), "m"), threads
			if k == 3 {
				in = slices.Clone(in)
				r.Shuffle(len(in), func(i, j int) { in[i], in[j] = in[j], in[i] })
			}
			write(t, spec, in)
			d := sha256Of(t, spec.Path)
			if first == "" {
				first = d
			} else if d != first {
				t.Fatalf("%+v: the bytes differ", spec)
			}
		}
	}
}

func TestAliases(t *testing.T) {
	// Tied and equal tensors of any shape are stored once. Tensors with the same bytes but a different dtype, and
	// almost equal tensors, are stored separately.
	r := newRand(t)
	a := bf16("m.a", r, 64, 64)
	small := noise(r, 100)
	near := bytes.Clone(a.Data)
	near[5001] ^= 1
	in := []save.Input{
		a,
		{Name: "z.tied", DType: tensor.BF16, Shape: []int64{64, 64}, Data: a.Data},
		{Name: "b.equal", DType: tensor.BF16, Shape: []int64{4096}, Data: bytes.Clone(a.Data)},
		{Name: "other.dtype", DType: tensor.F16, Shape: []int64{4096}, Data: bytes.Clone(a.Data)},
		{Name: "near", DType: tensor.BF16, Shape: []int64{64, 64}, Data: near},
		{Name: "small.1", DType: tensor.U8, Shape: []int64{100}, Data: small},
		{Name: "small.2", DType: tensor.U8, Shape: []int64{100}, Data: bytes.Clone(small)},
		{Name: "small.tied", DType: tensor.U8, Shape: []int64{10, 10}, Data: small},
		{Name: "e1", DType: tensor.U8, Shape: []int64{0}, Data: nil},
		{Name: "e2", DType: tensor.U8, Shape: []int64{0}, Data: nil},
	}
	p := filepath.Join(t.TempDir(), "m")
	rep := write(t, save.Spec{Path: p, Compress: true}, in)
	same(t, in, read(t, p))
	if rep.Aliases != 3 {
		t.Fatalf("%d aliases", rep.Aliases)
	}
	got, err := verify.Inspect(bg, []string{p}, format.Access{})
	if err != nil {
		t.Fatal(err)
	}
	for _, it := range got.Sources[0].Tensors {
		want := map[string]string{"m.a": "b.equal", "z.tied": "b.equal", "small.tied": "small.1"}[it.Name]
		if it.AliasOf != want {
			t.Errorf("%s is an alias of %q, not %q", it.Name, it.AliasOf, want)
		}
	}
	if rep := write(t, save.Spec{Path: p}, in); rep.Aliases != 0 {
		t.Fatal("a plain file has no aliases")
	}
	same(t, in, read(t, p))
}

// A tensor is stored in column parts if all its aliases have rows of the same size, and otherwise in one part. Both
// kinds pass verification and are restored, even if the file is compressed again.
func TestPartsOfAliases(t *testing.T) {
	r := newRand(t)
	a, b := bf16("a", r, 64, 256), bf16("b", r, 64, 256)
	in := []save.Input{a, b, input("a_same", tensor.BF16, []int64{64, 16, 16}, a.Data),
		input("b.other", tensor.BF16, []int64{128, 128}, b.Data)}
	first := filepath.Join(t.TempDir(), "m.safetensors")
	write(t, save.Spec{Path: first, Compress: true, Parts: 4, ChunkBytes: 4096}, in)
	again := filepath.Join(t.TempDir(), "m.safetensors")
	convertTo(t, []string{filepath.Join(goldens, "other-rows-1.0", "parts.safetensors")}, again, save.Spec{Compress: true, Parts: 4, ChunkBytes: 4096})
	for p, want := range map[string]map[string]uint8{first: {"a": 4, "b": 1}, again: {"a": 1, "n": 1, "p": 4}} {
		if _, err := verify.Verify(bg, nil, []string{p}, format.Access{}, false); err != nil {
			t.Error(err)
		}
		m, err := stored.Open(bg, []string{p}, format.Access{}, false)
		if err != nil {
			t.Fatal(err)
		}
		for i := range m.Index.Tensors {
			x := &m.Index.Tensors[i]
			if parts, ok := want[x.Name]; ok != (x.Alias < 0) || x.Parts != parts {
				t.Errorf("%s: %s has %d column parts, not %d", p, x.Name, x.Parts, parts)
			}
		}
		m.Close()
	}
	same(t, in, read(t, first))
	same(t, otherRows(), read(t, again))
}

// otherRows returns the tensors of the golden file other-rows-1.0. Some aliases have rows of a different size than the
// tensors in column parts that they refer to.
func otherRows() []save.Input {
	r := fixedRand()
	a := gaussian(r, 64, 256)
	n := make([]byte, 256*128)
	for i := range n {
		n[i] = byte(8 * r.NormFloat64())
	}
	p := gaussian(r, 32, 512)
	return []save.Input{
		input("a", tensor.BF16, []int64{64, 256}, a), input("a_flat", tensor.BF16, []int64{1 << 14}, a),
		{Name: "a_tall", DType: tensor.BF16, Shape: []int64{1024, 16}, Data: a},
		input("a_wide", tensor.BF16, []int64{16, 4, 256}, a), input("a_same", tensor.BF16, []int64{64, 16, 16}, a),
		input("n", tensor.I8, []int64{256, 128}, n), input("n_flat", tensor.I8, []int64{1 << 15}, n),
		input("p", tensor.BF16, []int64{32, 512}, p), input("p_same", tensor.BF16, []int64{32, 2, 256}, p),
	}
}

// A golden file from an older writer, with aliases that have rows of a different size than their tensors in column
// parts, loads and passes verification.
func TestGoldenOtherRows(t *testing.T) {
	golden := filepath.Join(goldens, "other-rows-1.0", "parts.safetensors")
	same(t, otherRows(), read(t, golden))
	if _, err := verify.Verify(bg, nil, []string{golden}, format.Access{}, false); err != nil {
		t.Error(err)
	}
}

// exponentEntropy returns the order-0 entropy of bf16 exponents in bits.
func exponentEntropy(p []byte) (h float64) {
	var n [256]float64
	for i := 0; i < len(p); i += 2 {
		n[p[i+1]<<1|p[i]>>7]++
	}
	for _, c := range n {
		if c > 0 {
			h -= c * math.Log2(c*2/float64(len(p)))
		}
	}
	return h * 2 / float64(len(p))
}

func TestRatio(t *testing.T) {
	// The ratio of bf16 weights is within 1 % of the entropy bound. Noise is stored plain and grows by at most 0.1 %.
	r := fixedRand()
	p := filepath.Join(t.TempDir(), "m")
	w := bf16("w", r, 2048, 2048)
	rep := write(t, save.Spec{Path: p, Compress: true}, []save.Input{w})
	bound := (8 + exponentEntropy(w.Data)) / 16
	t.Logf("Gaussian bf16: %.4f, field entropy %.4f", rep.Ratio, bound)
	if rep.Ratio > bound*1.01 {
		t.Errorf("bf16 takes %.4f, the bound is %.4f", rep.Ratio, bound)
	}
	rep = write(t, save.Spec{Path: p, Compress: true},
		[]save.Input{input("n", tensor.BF16, []int64{4 << 20}, noise(r, 8<<20))})
	t.Logf("noise: %.5f", rep.Ratio)
	if rep.Ratio > 1.001 || rep.Compressed != 0 {
		t.Errorf("noise takes %.4f, %d compressed", rep.Ratio, rep.Compressed)
	}
}

func TestArguments(t *testing.T) {
	// Invalid input is refused with a typed error before the folder is touched.
	one := []byte{1}
	for name, c := range map[string]struct {
		spec save.Spec
		in   []save.Input
	}{
		"no path":      {save.Spec{}, nil},
		"parts":        {save.Spec{Path: "m", Parts: 3}, nil},
		"chunk":        {save.Spec{Path: "m", ChunkBytes: 5000}, nil},
		"huge chunk":   {save.Spec{Path: "m", ChunkBytes: 32 << 20}, nil},
		"shard":        {save.Spec{Path: "m", Shard: -1}, nil},
		"threads":      {save.Spec{Path: "m", Threads: -1}, nil},
		"our metadata": {save.Spec{Path: "m", Metadata: map[string]string{"overwire": "x"}}, nil},
		"bad metadata": {save.Spec{Path: "m", Metadata: map[string]string{"a": "\xff"}}, nil},
		"reserved":     {save.Spec{Path: "m"}, []save.Input{{Name: "overwire.index", DType: tensor.U8, Shape: []int64{1}, Data: one}}},
		"reserved 2":   {save.Spec{Path: "m"}, []save.Input{{Name: "__metadata__", DType: tensor.U8, Shape: []int64{1}, Data: one}}},
		"utf-8":        {save.Spec{Path: "m"}, []save.Input{{Name: "a\xff", DType: tensor.U8, Shape: []int64{1}, Data: one}}},
		"twice": {save.Spec{Path: "m"}, []save.Input{input("a", tensor.U8, []int64{1}, one),
			input("a", tensor.U8, []int64{1}, one)}},
		"size":      {save.Spec{Path: "m"}, []save.Input{{Name: "a", DType: tensor.U8, Shape: []int64{2}, Data: one}}},
		"negative":  {save.Spec{Path: "m"}, []save.Input{{Name: "a", DType: tensor.U8, Shape: []int64{-1, -1}, Data: one}}},
		"overflow":  {save.Spec{Path: "m"}, []save.Input{input("a", tensor.U8, []int64{1 << 62, 1 << 62}, one)}},
		"half byte": {save.Spec{Path: "m"}, []save.Input{{Name: "a", DType: tensor.F4, Shape: []int64{3}, Data: one}}},
		"dtype":     {save.Spec{Path: "m"}, []save.Input{{Name: "a", DType: 99, Shape: []int64{1}, Data: one}}},
		"rank":      {save.Spec{Path: "m"}, []save.Input{input("a", tensor.U8, slices.Repeat([]int64{1}, 65), one)}},
	} {
		dir := t.TempDir()
		if c.spec.Path != "" {
			c.spec.Path = filepath.Join(dir, c.spec.Path)
		}
		_, err := save.Write(bg, nil, c.spec, c.in)
		if !errors.Is(err, errs.ErrArgument) {
			t.Errorf("%s: %v", name, err)
		}
		if es, _ := os.ReadDir(dir); len(es) != 0 {
			t.Errorf("%s: the folder was touched", name)
		}
	}
}

func TestSchemes(t *testing.T) {
	// file:// is a local path. A scheme that cannot be written gives an error.
	p := filepath.Join(t.TempDir(), "m")
	write(t, save.Spec{Path: "file://" + p}, nil)
	if len(read(t, p)) != 0 {
		t.Fatal("not empty")
	}
	if _, err := save.Write(bg, nil, save.Spec{Path: "ftp://bucket/m"}, nil); !errors.Is(err, errs.ErrNotSupported) {
		t.Fatal(err)
	}
}

func TestProgress(t *testing.T) {
	// The counters end at their totals, including aliases and empty tensors.
	r := fixedRand()
	a := bf16("a", r, 600, 1000)
	in := []save.Input{a, input("tied", tensor.BF16, []int64{600, 1000}, a.Data), input("empty", tensor.F32, []int64{0}, nil)}
	for _, c := range []bool{false, true} {
		j := job.New("save")
		if _, err := save.Write(bg, j, save.Spec{Path: filepath.Join(t.TempDir(), "m"), Compress: c}, in); err != nil {
			t.Fatal(err)
		}
		b, tb, n, tn := j.Progress()
		if b != tb || n != tn || tb != 2*int64(len(a.Data)) || tn != 3 {
			t.Fatal(b, tb, n, tn)
		}
	}
}

func TestFileNextToAnIndex(t *testing.T) {
	// A single file is not written next to a shard index of its name, because the folder would still be loaded as the
	// old model. With a shard limit it replaces the shards. A file that the index lists can also be replaced.
	r := fixedRand()
	old := []save.Input{bf16("w", r, 40, 64), bf16("v", r, 40, 64)}
	next := []save.Input{bf16("w", r, 40, 64), bf16("v", r, 40, 64)}
	dir := t.TempDir()
	path := filepath.Join(dir, "model.safetensors")
	write(t, save.Spec{Path: path, Shard: 6000}, old)
	for _, spec := range []save.Spec{{Path: path}, {Path: path, Compress: true}, {Path: "file://" + path},
		{Path: link(t, path)}} {
		_, err := save.Write(bg, nil, spec, next)
		if !errors.Is(err, errs.ErrArgument) || !strings.Contains(err.Error(), "model.safetensors.index.json") {
			t.Fatalf("%+v: %v", spec, err)
		}
	}
	if _, err := os.Stat(path); err == nil {
		t.Fatal("something was written")
	}
	same(t, old, read(t, dir))
	if _, err := convert.Convert(bg, nil, []string{dir}, path, save.Spec{}); !errors.Is(err, errs.ErrArgument) {
		t.Fatal(err)
	}
	write(t, save.Spec{Path: filepath.Join(dir, "other.bin")}, next) // another name
	write(t, save.Spec{Path: path, Beside: true}, next)
	write(t, save.Spec{Path: path, Shard: 1 << 20}, next)
	same(t, next, read(t, dir))
	if _, err := os.Stat(path + ".index.json"); err == nil {
		t.Fatal("the index is still there")
	}
	for _, text := range []string{`{"weight_map": {"w": "model.safetensors", "v": "model.safetensors"}}`} {
		if err := os.WriteFile(path+".index.json", []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		write(t, save.Spec{Path: path}, old)
		same(t, old, read(t, dir))
	}
}

func link(t *testing.T, to string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "link.safetensors")
	if err := os.Symlink(to, path); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestNamesOfShards(t *testing.T) {
	// If an index.json cannot list the names of shards, the save is refused before anything is written. A single file
	// with such a name is written.
	r := fixedRand()
	in := []save.Input{bf16("w", r, 40, 64), bf16("v", r, 40, 64)}
	dir := t.TempDir()
	path := filepath.Join(dir, "caf\xe9.safetensors")
	if _, err := save.Write(bg, nil, save.Spec{Path: path, Shard: 6000}, in); !errors.Is(err, errs.ErrArgument) {
		t.Fatal(err)
	}
	if es, _ := os.ReadDir(dir); len(es) != 0 {
		t.Fatal("something was written")
	}
	write(t, save.Spec{Path: path, Shard: 1 << 20}, in)
	same(t, in, read(t, path))
	folder := filepath.Join(dir, "f\xe9")
	if err := os.Mkdir(folder, 0o777); err != nil {
		t.Fatal(err)
	}
	write(t, save.Spec{Path: filepath.Join(folder, "model.safetensors"), Shard: 6000}, in)
	same(t, in, read(t, folder))
}

func TestPrivateSets(t *testing.T) {
	// A private model stays private even if the names of its files change.
	r := fixedRand()
	in := []save.Input{bf16("w", r, 40, 64), bf16("v", r, 40, 64), bf16("u", r, 40, 64)}
	for name, steps := range map[string][]int64{"one, then shards": {1 << 20, 6000}, "shards, then others": {6000, 11000}, "shards, then one": {6000, 1 << 20}} {
		path := filepath.Join(t.TempDir(), "model.safetensors")
		for i, shard := range steps {
			write(t, save.Spec{Path: path, Shard: shard}, in)
			es, _ := os.ReadDir(filepath.Dir(path))
			for _, e := range es {
				st, _ := e.Info()
				if i > 0 && st.Mode() != 0o600 {
					t.Errorf("%s: %s has %v", name, e.Name(), st.Mode())
				}
				if err := os.Chmod(filepath.Join(filepath.Dir(path), e.Name()), 0o600); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	dir := t.TempDir()
	if err := os.WriteFile(dir+"/x.pkl", nil, 0o600); err != nil {
		t.Fatal(err)
	}
	write(t, save.Spec{Path: dir + "/x.safetensors", Like: dir + "/x.pkl"}, in)
	if st, _ := os.Stat(dir + "/x.safetensors"); st.Mode() != 0o600 {
		t.Error(st.Mode())
	}
}

func TestDotDot(t *testing.T) {
	// ".." after a symbolic link is resolved as the system does.
	r := fixedRand()
	in := []save.Input{bf16("w", r, 40, 64), bf16("v", r, 40, 64)}
	dir := t.TempDir()
	if err := errors.Join(os.MkdirAll(dir+"/real/deep", 0o777), os.Symlink("real/deep", dir+"/link")); err != nil {
		t.Fatal(err)
	}
	for _, spec := range []save.Spec{{Path: dir + "/link/../model.safetensors"}, {Path: dir + "/link/../m.safetensors", Shard: 6000}} {
		write(t, spec, in)
	}
	if es, _ := os.ReadDir(dir); len(es) != 2 {
		t.Fatal(es)
	}
	same(t, in, read(t, dir+"/link/../model.safetensors"))
	same(t, in, read(t, dir+"/link/../m.safetensors.index.json"))
	same(t, in, read(t, dir+"/link/.."))
}
