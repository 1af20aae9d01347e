package save

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"github.com/overwire/overwire/gosrc/format"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/job"
	"github.com/overwire/overwire/gosrc/tensor"
)

var bg = context.Background()

// newRand prints its seed, so that a failure can be run again.
func newRand(t testing.TB) *rand.Rand {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	return rand.New(rand.NewPCG(seed, 1))
}

func fixedRand() *rand.Rand { return rand.New(rand.NewPCG(1, 2)) }

// gaussian makes bf16 weights as training leaves them: normal, with a scale of
// its own for every row.
func gaussian(r *rand.Rand, rows, cols int) []byte {
	out := make([]byte, 0, rows*cols*2)
	for range rows {
		scale := 0.02 * math.Exp(0.2*r.NormFloat64())
		for range cols {
			b := math.Float32bits(float32(r.NormFloat64()*scale)) >> 16
			out = append(out, byte(b), byte(b>>8))
		}
	}
	return out
}

func noise(r *rand.Rand, n int) []byte {
	out := make([]byte, n)
	for i := range out {
		out[i] = byte(r.Uint32())
	}
	return out
}

func bf16(name string, r *rand.Rand, rows, cols int) Input {
	return Input{name, tensor.BF16, []int64{int64(rows), int64(cols)}, gaussian(r, rows, cols)}
}

// read gives every tensor of some files, through the engine's own way.
func read(t testing.TB, uris ...string) map[string]Input {
	t.Helper()
	m, err := openModel(bg, uris, format.Access{}, false)
	if err != nil {
		t.Fatal(err)
	}
	defer m.closeSources()
	out := map[string]Input{}
	for _, it := range m.items(2) {
		data := make([]byte, it.bytes)
		if len(data) > 0 {
			if _, err := it.body.bytes(bg, data, 0); err != nil {
				t.Fatal(err)
			}
		}
		out[it.name] = Input{it.name, it.dtype, it.shape, data}
	}
	return out
}

func same(t testing.TB, want []Input, got map[string]Input) {
	t.Helper()
	if len(want) != len(got) {
		t.Fatalf("%d tensors came back of %d", len(got), len(want))
	}
	for _, w := range want {
		g, ok := got[w.Name]
		switch {
		case !ok:
			t.Fatalf("%q is missing", w.Name)
		case g.DType != w.DType || !slices.Equal(g.Shape, w.Shape):
			t.Fatalf("%q came back as %v %v, not %v %v", w.Name, g.DType, g.Shape, w.DType, w.Shape)
		case !bytes.Equal(g.Data, w.Data):
			t.Fatalf("%q came back with other bytes", w.Name)
		}
	}
}

func write(t testing.TB, spec Spec, in []Input) Report {
	t.Helper()
	rep, err := Write(bg, nil, spec, in)
	if err != nil {
		t.Fatal(err)
	}
	return rep
}

func sha256Of(t testing.TB, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("%x", sha256.Sum256(b))
}

// noTemps fails if a save has left anything behind.
func noTemps(t testing.TB, dir string) {
	t.Helper()
	es, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range es {
		if strings.HasPrefix(e.Name(), ".") {
			t.Fatalf("left behind: %s", e.Name())
		}
	}
}

// ugly has every dtype and every shape that has been trouble somewhere.
func ugly(r *rand.Rand) []Input {
	var in []Input
	add := func(name string, d tensor.DType, shape ...int64) {
		n, err := tensor.Size(d, shape)
		if err != nil {
			panic(err)
		}
		data := noise(r, int(n))
		if r.IntN(2) == 0 { // something to gain, for every dtype
			for i := range data {
				data[i] &= 0x33
			}
		}
		in = append(in, Input{name, d, shape, data})
	}
	for d := tensor.DType(1); int(d) <= tensor.NumDTypes; d++ {
		n := d.String()
		if d.Bits()%8 == 0 {
			add(n+".scalar", d)
			add(n+".odd", d, 7, 3, 11)
			add(n+".one", d, 1)
		}
		add(n+".empty", d, 0)
		add(n+".hollow", d, 3, 0, 8)
		add(n+".small", d, 16, 24)
		add(n+".rows", d, 40, 1032)
	}
	deep := slices.Repeat([]int64{1}, 63)
	add("rank64", tensor.F32, append(deep, 5)...)
	add("tall", tensor.BF16, 5003, 1)
	add(strings.Repeat("ü\"\\\n\x01<&>\u2028", 800), tensor.U8, 3)
	add("", tensor.U8, 2)
	return in
}

func TestRoundTrip(t *testing.T) {
	// Promise: whatever can be saved comes back bit for bit, plain or
	// compressed, in any number of column parts and chunks, and verifies.
	in := ugly(newRand(t))
	meta := map[string]string{"format": "pt", "": "empty key", "ключ": "\x00\"quote"}
	for _, spec := range []Spec{
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
			v, err := Verify(bg, nil, []string{spec.Path}, format.Access{}, false)
			if err != nil || !v.OK || v.Tensors != len(in) {
				t.Fatalf("%+v %v", v, err)
			}
			st, _ := os.Stat(spec.Path)
			if rep.BytesOut != st.Size() || rep.Tensors != len(in) {
				t.Fatalf("report %+v, size %d", rep, st.Size())
			}
			m, err := openModel(bg, []string{spec.Path}, format.Access{}, false)
			if err != nil {
				t.Fatal(err)
			}
			defer m.closeSources()
			if got := m.metadata(0); len(got) != len(meta) || got["ключ"] != meta["ключ"] || got["format"] != "pt" {
				t.Fatalf("metadata %q", got)
			}
		})
	}
}

func TestNothing(t *testing.T) {
	// Promise: a model without tensors is a file like any other.
	for _, c := range []bool{false, true} {
		p := filepath.Join(t.TempDir(), "m.safetensors")
		write(t, Spec{Path: p, Compress: c}, nil)
		if got := read(t, p); len(got) != 0 {
			t.Fatal(got)
		}
		if _, err := Verify(bg, nil, []string{p}, format.Access{}, false); err != nil {
			t.Fatal(err)
		}
	}
}

func TestDeterministic(t *testing.T) {
	// Promise: the same input gives the same bytes for any number of threads,
	// any order of the tensors, and any time.
	r := newRand(t)
	in := append(ugly(r), bf16("big", r, 900, 1500), bf16("big2", r, 2100, 300))
	in = append(in, Input{"twin", tensor.BF16, []int64{1500, 900}, bytes.Clone(in[len(in)-2].Data)})
	for _, spec := range []Spec{{}, {Compress: true}, {Compress: true, Parts: 4, ChunkBytes: 1 << 16}} {
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
				t.Fatalf("%+v: other bytes", spec)
			}
		}
	}
}

func TestAliases(t *testing.T) {
	// Promise: tied and identical tensors are stored once, whatever their
	// shapes; the same bytes as another dtype, and near twins, are not.
	r := newRand(t)
	a := bf16("m.a", r, 64, 64)
	small := noise(r, 100)
	near := bytes.Clone(a.Data)
	near[5001] ^= 1
	in := []Input{
		a,
		{"z.tied", tensor.BF16, []int64{64, 64}, a.Data},
		{"b.equal", tensor.BF16, []int64{4096}, bytes.Clone(a.Data)},
		{"other.dtype", tensor.F16, []int64{4096}, bytes.Clone(a.Data)},
		{"near", tensor.BF16, []int64{64, 64}, near},
		{"small.1", tensor.U8, []int64{100}, small},
		{"small.2", tensor.U8, []int64{100}, bytes.Clone(small)},
		{"small.tied", tensor.U8, []int64{10, 10}, small},
		{"e1", tensor.U8, []int64{0}, nil},
		{"e2", tensor.U8, []int64{0}, nil},
	}
	p := filepath.Join(t.TempDir(), "m")
	rep := write(t, Spec{Path: p, Compress: true}, in)
	same(t, in, read(t, p))
	if rep.Aliases != 3 {
		t.Fatalf("%d aliases", rep.Aliases)
	}
	got, err := Inspect(bg, []string{p}, format.Access{})
	if err != nil {
		t.Fatal(err)
	}
	for _, it := range got.Sources[0].Tensors {
		want := map[string]string{"m.a": "b.equal", "z.tied": "b.equal", "small.tied": "small.1"}[it.Name]
		if it.AliasOf != want {
			t.Errorf("%s is an alias of %q, not %q", it.Name, it.AliasOf, want)
		}
	}
	if rep := write(t, Spec{Path: p}, in); rep.Aliases != 0 {
		t.Fatal("a plain file has no aliases")
	}
	same(t, in, read(t, p))
}

// A tensor keeps its column parts where all its aliases have rows of its size, and is stored
// in one part where one has others; both verify and come back, also when the file is
// compressed again.
func TestPartsOfAliases(t *testing.T) {
	r := newRand(t)
	a, b := bf16("a", r, 64, 256), bf16("b", r, 64, 256)
	in := []Input{a, b, {"a_same", tensor.BF16, []int64{64, 16, 16}, a.Data}, {"b.other", tensor.BF16, []int64{128, 128}, b.Data}}
	first := filepath.Join(t.TempDir(), "m.safetensors")
	write(t, Spec{Path: first, Compress: true, Parts: 4, ChunkBytes: 4096}, in)
	again := filepath.Join(t.TempDir(), "m.safetensors")
	convert(t, []string{filepath.Join(goldens, "other-rows-1.0", "parts.safetensors")}, again, Spec{Compress: true, Parts: 4, ChunkBytes: 4096})
	for p, want := range map[string]map[string]uint8{first: {"a": 4, "b": 1}, again: {"a": 1, "n": 1, "p": 4}} {
		if _, err := Verify(bg, nil, []string{p}, format.Access{}, false); err != nil {
			t.Error(err)
		}
		m, err := openModel(bg, []string{p}, format.Access{}, false)
		if err != nil {
			t.Fatal(err)
		}
		for i := range m.ix.Tensors {
			x := &m.ix.Tensors[i]
			if parts, ok := want[x.Name]; ok != (x.Alias < 0) || x.Parts != parts {
				t.Errorf("%s: %s has %d column parts, not %d", p, x.Name, x.Parts, parts)
			}
		}
		m.closeSources()
	}
	same(t, in, read(t, first))
	same(t, otherRows(), read(t, again))
}

// otherRows are the tensors of the golden file of column parts that have aliases of other
// rows.
func otherRows() []Input {
	r := fixedRand()
	a := gaussian(r, 64, 256)
	n := make([]byte, 256*128)
	for i := range n {
		n[i] = byte(8 * r.NormFloat64())
	}
	p := gaussian(r, 32, 512)
	return []Input{
		{"a", tensor.BF16, []int64{64, 256}, a}, {"a_flat", tensor.BF16, []int64{1 << 14}, a},
		{"a_tall", tensor.BF16, []int64{1024, 16}, a},
		{"a_wide", tensor.BF16, []int64{16, 4, 256}, a}, {"a_same", tensor.BF16, []int64{64, 16, 16}, a},
		{"n", tensor.I8, []int64{256, 128}, n}, {"n_flat", tensor.I8, []int64{1 << 15}, n},
		{"p", tensor.BF16, []int64{32, 512}, p}, {"p_same", tensor.BF16, []int64{32, 2, 256}, p},
	}
}

// The golden file that a writer without that rule has made loads and verifies; no writer
// makes it any more.
func TestGoldenOtherRows(t *testing.T) {
	golden := filepath.Join(goldens, "other-rows-1.0", "parts.safetensors")
	same(t, otherRows(), read(t, golden))
	if _, err := Verify(bg, nil, []string{golden}, format.Access{}, false); err != nil {
		t.Error(err)
	}
}

// exponentEntropy is the order-0 entropy of the exponents of bf16, in bits.
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
	// Promise: generated bf16 weights come within 1 %
	// of the entropy of their exponents, noise takes never more than
	// 1.001, and what does not gain 1 % is left readable for everyone.
	r := fixedRand()
	p := filepath.Join(t.TempDir(), "m")
	w := bf16("w", r, 2048, 2048)
	rep := write(t, Spec{Path: p, Compress: true}, []Input{w})
	bound := (8 + exponentEntropy(w.Data)) / 16
	t.Logf("Gaussian bf16: %.4f, field entropy %.4f", rep.Ratio, bound)
	if rep.Ratio > bound*1.01 {
		t.Errorf("bf16 takes %.4f, the bound is %.4f", rep.Ratio, bound)
	}
	rep = write(t, Spec{Path: p, Compress: true}, []Input{{"n", tensor.BF16, []int64{4 << 20}, noise(r, 8<<20)}})
	t.Logf("noise: %.5f", rep.Ratio)
	if rep.Ratio > 1.001 || rep.Compressed != 0 {
		t.Errorf("noise takes %.4f, %d compressed", rep.Ratio, rep.Compressed)
	}
}

func TestArguments(t *testing.T) {
	// Promise: what no file can hold is refused by class, with the tensor's
	// name, before the folder is touched.
	one := []byte{1}
	for name, c := range map[string]struct {
		spec Spec
		in   []Input
	}{
		"no path":      {Spec{}, nil},
		"parts":        {Spec{Path: "m", Parts: 3}, nil},
		"chunk":        {Spec{Path: "m", ChunkBytes: 5000}, nil},
		"huge chunk":   {Spec{Path: "m", ChunkBytes: 32 << 20}, nil},
		"shard":        {Spec{Path: "m", Shard: -1}, nil},
		"threads":      {Spec{Path: "m", Threads: -1}, nil},
		"our metadata": {Spec{Path: "m", Metadata: map[string]string{"overwire": "x"}}, nil},
		"bad metadata": {Spec{Path: "m", Metadata: map[string]string{"a": "\xff"}}, nil},
		"reserved":     {Spec{Path: "m"}, []Input{{"overwire.index", tensor.U8, []int64{1}, one}}},
		"reserved 2":   {Spec{Path: "m"}, []Input{{"__metadata__", tensor.U8, []int64{1}, one}}},
		"utf-8":        {Spec{Path: "m"}, []Input{{"a\xff", tensor.U8, []int64{1}, one}}},
		"twice":        {Spec{Path: "m"}, []Input{{"a", tensor.U8, []int64{1}, one}, {"a", tensor.U8, []int64{1}, one}}},
		"size":         {Spec{Path: "m"}, []Input{{"a", tensor.U8, []int64{2}, one}}},
		"negative":     {Spec{Path: "m"}, []Input{{"a", tensor.U8, []int64{-1, -1}, one}}},
		"overflow":     {Spec{Path: "m"}, []Input{{"a", tensor.U8, []int64{1 << 62, 1 << 62}, one}}},
		"half byte":    {Spec{Path: "m"}, []Input{{"a", tensor.F4, []int64{3}, one}}},
		"dtype":        {Spec{Path: "m"}, []Input{{"a", 99, []int64{1}, one}}},
		"rank":         {Spec{Path: "m"}, []Input{{"a", tensor.U8, slices.Repeat([]int64{1}, 65), one}}},
	} {
		dir := t.TempDir()
		if c.spec.Path != "" {
			c.spec.Path = filepath.Join(dir, c.spec.Path)
		}
		_, err := Write(bg, nil, c.spec, c.in)
		if !errors.Is(err, errs.ErrArgument) {
			t.Errorf("%s: %v", name, err)
		}
		if es, _ := os.ReadDir(dir); len(es) != 0 {
			t.Errorf("%s: the folder was touched", name)
		}
	}
}

func TestSchemes(t *testing.T) {
	// Promise: file:// is a local path; what cannot be written to says so.
	p := filepath.Join(t.TempDir(), "m")
	write(t, Spec{Path: "file://" + p}, nil)
	if len(read(t, p)) != 0 {
		t.Fatal("not empty")
	}
	if _, err := Write(bg, nil, Spec{Path: "ftp://bucket/m"}, nil); !errors.Is(err, errs.ErrNotSupported) {
		t.Fatal(err)
	}
}

func TestProgress(t *testing.T) {
	// Promise: the counters end at their totals, aliases and empty tensors
	// included.
	r := fixedRand()
	a := bf16("a", r, 600, 1000)
	in := []Input{a, {"tied", tensor.BF16, []int64{600, 1000}, a.Data}, {"empty", tensor.F32, []int64{0}, nil}}
	for _, c := range []bool{false, true} {
		j := job.New("save")
		if _, err := Write(bg, j, Spec{Path: filepath.Join(t.TempDir(), "m"), Compress: c}, in); err != nil {
			t.Fatal(err)
		}
		b, tb, n, tn := j.Progress()
		if b != tb || n != tn || tb != 2*int64(len(a.Data)) || tn != 3 {
			t.Fatal(b, tb, n, tn)
		}
	}
}

func TestBesideAnIndex(t *testing.T) {
	// Promise: one file is not written beside the index of shards of its name, by which
	// the folder is still loaded as the old model; with a limit for shards it replaces
	// them, as does anything where the index names it or is none.
	r := fixedRand()
	old := []Input{bf16("w", r, 40, 64), bf16("v", r, 40, 64)}
	next := []Input{bf16("w", r, 40, 64), bf16("v", r, 40, 64)}
	dir := t.TempDir()
	path := filepath.Join(dir, "model.safetensors")
	write(t, Spec{Path: path, Shard: 6000}, old)
	for _, spec := range []Spec{{Path: path}, {Path: path, Compress: true}, {Path: "file://" + path}, {Path: link(t, path)}} {
		_, err := Write(bg, nil, spec, next)
		if !errors.Is(err, errs.ErrArgument) || !strings.Contains(err.Error(), "model.safetensors.index.json") {
			t.Fatalf("%+v: %v", spec, err)
		}
	}
	if _, err := os.Stat(path); err == nil {
		t.Fatal("something was written")
	}
	same(t, old, read(t, dir))
	if _, err := Convert(bg, nil, []string{dir}, path, Spec{}); !errors.Is(err, errs.ErrArgument) {
		t.Fatal(err)
	}
	write(t, Spec{Path: filepath.Join(dir, "other.bin")}, next) // another name
	write(t, Spec{Path: path, Beside: true}, next)
	write(t, Spec{Path: path, Shard: 1 << 20}, next)
	same(t, next, read(t, dir))
	if _, err := os.Stat(path + ".index.json"); err == nil {
		t.Fatal("the index is still there")
	}
	for _, text := range []string{`{"weight_map": {"w": "model.safetensors", "v": "model.safetensors"}}`} {
		if err := os.WriteFile(path+".index.json", []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		write(t, Spec{Path: path}, old)
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
	// Promise: shards that no index.json can list are refused before anything is
	// written; one file of such a name is not.
	r := fixedRand()
	in := []Input{bf16("w", r, 40, 64), bf16("v", r, 40, 64)}
	dir := t.TempDir()
	path := filepath.Join(dir, "caf\xe9.safetensors")
	if _, err := Write(bg, nil, Spec{Path: path, Shard: 6000}, in); !errors.Is(err, errs.ErrArgument) {
		t.Fatal(err)
	}
	if es, _ := os.ReadDir(dir); len(es) != 0 {
		t.Fatal("something was written")
	}
	write(t, Spec{Path: path, Shard: 1 << 20}, in)
	same(t, in, read(t, path))
	folder := filepath.Join(dir, "f\xe9")
	if err := os.Mkdir(folder, 0o777); err != nil {
		t.Fatal(err)
	}
	write(t, Spec{Path: filepath.Join(folder, "model.safetensors"), Shard: 6000}, in)
	same(t, in, read(t, folder))
}

func TestPrivateSets(t *testing.T) {
	// Promise: a private model stays private, whatever its files are called after.
	r := fixedRand()
	in := []Input{bf16("w", r, 40, 64), bf16("v", r, 40, 64), bf16("u", r, 40, 64)}
	for name, steps := range map[string][]int64{"one, then shards": {1 << 20, 6000}, "shards, then others": {6000, 11000}, "shards, then one": {6000, 1 << 20}} {
		path := filepath.Join(t.TempDir(), "model.safetensors")
		for i, shard := range steps {
			write(t, Spec{Path: path, Shard: shard}, in)
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
	write(t, Spec{Path: dir + "/x.safetensors", Like: dir + "/x.pkl"}, in)
	if st, _ := os.Stat(dir + "/x.safetensors"); st.Mode() != 0o600 {
		t.Error(st.Mode())
	}
}

func TestDotDot(t *testing.T) {
	// Promise: ".." after a symbolic link is where the system finds it.
	r := fixedRand()
	in := []Input{bf16("w", r, 40, 64), bf16("v", r, 40, 64)}
	dir := t.TempDir()
	if err := errors.Join(os.MkdirAll(dir+"/real/deep", 0o777), os.Symlink("real/deep", dir+"/link")); err != nil {
		t.Fatal(err)
	}
	for _, spec := range []Spec{{Path: dir + "/link/../model.safetensors"}, {Path: dir + "/link/../m.safetensors", Shard: 6000}} {
		write(t, spec, in)
	}
	if es, _ := os.ReadDir(dir); len(es) != 2 {
		t.Fatal(es)
	}
	same(t, in, read(t, dir+"/link/../model.safetensors"))
	same(t, in, read(t, dir+"/link/../m.safetensors.index.json"))
	same(t, in, read(t, dir+"/link/.."))
}
