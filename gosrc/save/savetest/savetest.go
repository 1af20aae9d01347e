// Package savetest makes tensors for tests of saves and conversions, and compares the written files.
package savetest

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/overwire/overwire/gosrc/format"
	"github.com/overwire/overwire/gosrc/save"
	"github.com/overwire/overwire/gosrc/stored"
	"github.com/overwire/overwire/gosrc/tensor"
)

// Goldens is the folder of golden files, relative to a package's folder.
const Goldens = "../../tests/goldens/save"

// NewRand returns a random generator and logs its seed, so a failure can be reproduced.
func NewRand(t testing.TB) *rand.Rand {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	return rand.New(rand.NewPCG(seed, 1))
}

// FixedRand returns a generator that gives the same numbers in every run.
func FixedRand() *rand.Rand { return rand.New(rand.NewPCG(1, 2)) }

// Gaussian returns bf16 weights that resemble trained ones: normally distributed, with a different scale for each row.
func Gaussian(r *rand.Rand, rows, cols int) []byte {
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

// Noise returns n random bytes.
func Noise(r *rand.Rand, n int) []byte {
	out := make([]byte, n)
	for i := range out {
		out[i] = byte(r.Uint32())
	}
	return out
}

// Input returns a tensor with the given bytes.
func Input(name string, d tensor.DType, shape []int64, data []byte) save.Input {
	return save.Input{Name: name, DType: d, Shape: shape, Data: data}
}

// BF16 returns a tensor with Gaussian weights.
func BF16(name string, r *rand.Rand, rows, cols int) save.Input {
	return Input(name, tensor.BF16, []int64{int64(rows), int64(cols)}, Gaussian(r, rows, cols))
}

// Read returns the tensors of files by name.
func Read(t testing.TB, uris ...string) map[string]save.Input {
	t.Helper()
	return ReadFrom(t, format.Access{}, uris...)
}

// ReadFrom is Read with access options.
func ReadFrom(t testing.TB, access format.Access, uris ...string) map[string]save.Input {
	t.Helper()
	m, err := stored.Open(t.Context(), uris, access, false)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	out := map[string]save.Input{}
	for i, r := range m.Readers(stored.NewCache(2)) {
		x := &m.Index.Tensors[i]
		data := make([]byte, x.Bytes)
		if len(data) > 0 {
			if err := r.Fill(t.Context(), data, 0); err != nil {
				t.Fatal(err)
			}
		}
		out[x.Name] = save.Input{Name: x.Name, DType: x.DType, Shape: x.Shape, Data: data}
	}
	return out
}

// Same fails unless the tensors equal the wanted ones byte for byte.
func Same(t testing.TB, want []save.Input, got map[string]save.Input) {
	t.Helper()
	if len(want) != len(got) {
		t.Fatalf("%d tensors were read, expected %d", len(got), len(want))
	}
	for _, w := range want {
		g, ok := got[w.Name]
		switch {
		case !ok:
			t.Fatalf("%q is missing", w.Name)
		case g.DType != w.DType || !slices.Equal(g.Shape, w.Shape):
			t.Fatalf("%q was read as %v %v, expected %v %v", w.Name, g.DType, g.Shape, w.DType, w.Shape)
		case !bytes.Equal(g.Data, w.Data):
			t.Fatalf("%q has wrong bytes", w.Name)
		}
	}
}

// Write saves tensors, and fails the test if that fails.
func Write(t testing.TB, spec save.Spec, in []save.Input) save.Report {
	t.Helper()
	rep, err := save.Write(t.Context(), nil, spec, in)
	if err != nil {
		t.Fatal(err)
	}
	return rep
}

// SHA256Of returns a file's SHA-256 in hex.
func SHA256Of(t testing.TB, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("%x", sha256.Sum256(b))
}

// NoTemps fails if a folder has hidden files, which an unfinished save might leave.
func NoTemps(t testing.TB, dir string) {
	t.Helper()
	es, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range es {
		if strings.HasPrefix(e.Name(), ".") {
			t.Fatalf("not removed: %s", e.Name())
		}
	}
}

// Ugly returns tensors of every dtype, and of shapes and names that are easy to get wrong.
func Ugly(r *rand.Rand) []save.Input {
	var in []save.Input
	add := func(name string, d tensor.DType, shape ...int64) {
		n, err := tensor.Size(d, shape)
		if err != nil {
			panic(err)
		}
		data := Noise(r, int(n))
		if r.IntN(2) == 0 { // compressible, for every dtype
			for i := range data {
				data[i] &= 0x33
			}
		}
		in = append(in, save.Input{Name: name, DType: d, Shape: shape, Data: data})
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

// Some returns a model with all kinds of tensors that conversion treats differently.
func Some(r *rand.Rand) []save.Input {
	in := append(Ugly(r), BF16("big", r, 700, 1024), BF16("wide", r, 16, 40000))
	return append(in, Input("tied", in[len(in)-2].DType, in[len(in)-2].Shape, in[len(in)-2].Data))
}

// Put creates files below dir with the given contents. The content "-> PATH" creates a symbolic link to PATH.
func Put(t *testing.T, dir string, files map[string]string) {
	t.Helper()
	for name, text := range files {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		to, link := strings.CutPrefix(text, "-> ")
		err := os.WriteFile(path, []byte(text), 0o600)
		if link {
			err = errors.Join(os.Remove(path), os.Symlink(to, path))
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

// Names returns paths relative to dir, sorted.
func Names(dir string, paths []string) (out []string) {
	for _, p := range paths {
		rel, _ := filepath.Rel(dir, p)
		out = append(out, rel)
	}
	slices.Sort(out)
	return out
}

// Of returns a model of n tensors. All of their bytes are k.
func Of(k byte, n int) (in []save.Input) {
	for i := range n {
		in = append(in, save.Input{Name: string(rune('a' + i)), DType: tensor.U8, Shape: []int64{1000 + int64(i)},
			Data: bytes.Repeat([]byte{k}, 1000+i)})
	}
	return in
}

// Odd returns a safetensors file with an arbitrary header, padded so the data begin on a multiple of pad.
func Odd(header string, pad int, data []byte) []byte {
	for (8+len(header))%pad != 0 {
		header += " "
	}
	b := binary.LittleEndian.AppendUint64(nil, uint64(len(header)))
	return append(append(b, header...), data...)
}

// GoldenTensors returns the contents of the golden files. They never change. See tests/goldens/save/README.md.
func GoldenTensors() []save.Input {
	r := FixedRand()
	w := BF16("layer.weight", r, 24, 128)
	return []save.Input{
		w,
		{Name: "layer.tied", DType: tensor.BF16, Shape: []int64{128, 24}, Data: w.Data},
		{Name: "scale", DType: tensor.F32, Shape: []int64{5}, Data: Noise(r, 20)},
		{Name: "flat", DType: tensor.U8, Shape: []int64{640}, Data: bytes.Repeat([]byte{7}, 640)},
		{Name: "empty", DType: tensor.F16, Shape: []int64{0, 4}, Data: nil},
		{Name: "step", DType: tensor.I64, Shape: nil, Data: []byte{42, 0, 0, 0, 0, 0, 0, 0}},
	}
}
