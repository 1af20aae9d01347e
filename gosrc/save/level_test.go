package save_test

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/overwire/overwire/gosrc/convert"
	"github.com/overwire/overwire/gosrc/format"
	"github.com/overwire/overwire/gosrc/save"
	"github.com/overwire/overwire/gosrc/save/savetest"
	"github.com/overwire/overwire/gosrc/stored"
	"github.com/overwire/overwire/gosrc/tensor"
	"github.com/overwire/overwire/gosrc/verify"
)

// packed returns compressible nibbles, eight per I32, as GPTQ packs them.
func packed(name string, n int) save.Input {
	r := fixedRand()
	data := make([]byte, 4*n)
	nibble := func() byte { return byte(max(0, min(15, 8+2.2*r.NormFloat64()))) }
	for i := range data {
		data[i] = nibble() | nibble()<<4
	}
	return save.Input{Name: name, DType: tensor.I32, Shape: []int64{int64(n)}, Data: data}
}

// The golden files of formats 1.2 and 1.4, one per feature, load, and the writer still writes the files of 1.4. They
// were written with: go test ./gosrc/save -run TestGoldenLevel -args write-goldens
func TestGoldenLevel(t *testing.T) {
	in := append(savetest.GoldenTensors(), bf16("bf16", fixedRand(), 64, 96), packed("qweight", 9000))
	for name, level := range map[string]string{"container": "smaller", "packed": "default"} {
		golden := filepath.Join(goldens, "level-1.4", name+".safetensors")
		spec := save.Spec{Path: filepath.Join(t.TempDir(), "x.safetensors"), Compress: true, Level: level}
		if slices.Contains(os.Args, "write-goldens") {
			spec.Path = golden
			_ = os.MkdirAll(filepath.Dir(golden), 0o755)
		}
		write(t, spec, in)
		same(t, in, read(t, golden))
		same(t, in, read(t, filepath.Join(goldens, "level-1.2", name+".safetensors")))
		if sha256Of(t, spec.Path) != sha256Of(t, golden) {
			t.Errorf("%s: the writer has changed: add a new version folder for the new format", name)
		}
	}
}

func storedIn(t *testing.T, path string) (*stored.Model, map[tensor.Codec]int) {
	t.Helper()
	m, err := stored.Open(bg, []string{path}, format.Access{}, false)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(m.Close)
	codecs := map[tensor.Codec]int{}
	for _, c := range m.Index.Chunks {
		codecs[c.Codec]++
	}
	return m, codecs
}

// Nibbles packed in integers are compressed at every level, and small tensors stay plain.
func TestPackedIntegers(t *testing.T) {
	path := filepath.Join(t.TempDir(), "x.safetensors")
	in := []save.Input{packed("qweight", 300_000), packed("few", 2000)}
	rep := write(t, save.Spec{Path: path, Compress: true}, in)
	same(t, in, read(t, path))
	if rep.Compressed != 1 || rep.Ratio > 0.85 {
		t.Errorf("%+v", rep)
	}
	if _, codecs := storedIn(t, path); codecs[tensor.CodecX16] == 0 || codecs[tensor.CodecPlanes] != 0 {
		t.Errorf("codecs %v", codecs)
	}
}

// At level "smaller" every dtype is restored bit for bit, for any number of parts and chunks. The file is not larger
// than by default. Converting it back to the default level gives the default file.
func TestSmaller(t *testing.T) {
	r := newRand(t)
	in := append(ugly(r), bf16("weights", r, 300, 1000), packed("qweight", 70_000))
	dir := t.TempDir()
	for _, spec := range []save.Spec{{ChunkBytes: 4096}, {Parts: 4}, {}} {
		spec.Path, spec.Compress = filepath.Join(dir, "default.safetensors"), true
		usual := write(t, spec, in)
		want := sha256Of(t, spec.Path)
		spec.Path, spec.Level = filepath.Join(dir, "smaller.safetensors"), "smaller"
		rep := write(t, spec, in)
		same(t, in, read(t, spec.Path))
		if v, err := verify.Verify(bg, nil, []string{spec.Path}, format.Access{}, false); err != nil || !v.OK {
			t.Fatal(err)
		}
		if rep.BytesOut > usual.BytesOut {
			t.Errorf("%+v: %d bytes, by default %d", spec, rep.BytesOut, usual.BytesOut)
		}
		if _, codecs := storedIn(t, spec.Path); codecs[tensor.CodecPlanes] == 0 {
			t.Errorf("%+v: codecs %v", spec, codecs)
		}
		again := spec
		again.Path, again.Level = filepath.Join(dir, "again.safetensors"), ""
		if _, err := convert.Convert(bg, nil, []string{spec.Path}, again.Path, again); err != nil {
			t.Fatal(err)
		}
		if sha256Of(t, again.Path) != want {
			t.Errorf("%+v: a different file than by default", spec)
		}
		again.Path, again.Level = filepath.Join(dir, "back.safetensors"), "smaller"
		if _, err := convert.Convert(bg, nil, []string{filepath.Join(dir, "default.safetensors")}, again.Path, again); err != nil {
			t.Fatal(err)
		}
		if sha256Of(t, again.Path) != sha256Of(t, spec.Path) {
			t.Errorf("%+v: a different file than from the tensors", spec)
		}
		for _, n := range []string{"default", "smaller", "again", "back"} {
			if err := os.Remove(filepath.Join(dir, n+".safetensors")); err != nil {
				t.Fatal(err)
			}
		}
	}
}
