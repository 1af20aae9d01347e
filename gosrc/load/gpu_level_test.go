package load_test

import (
	"bytes"
	"math/rand/v2"
	"path/filepath"
	"testing"

	"github.com/overwire/overwire/gosrc/device/cuda"
	"github.com/overwire/overwire/gosrc/job"
	"github.com/overwire/overwire/gosrc/load"
	"github.com/overwire/overwire/gosrc/load/loadtest"
	"github.com/overwire/overwire/gosrc/save"
	"github.com/overwire/overwire/gosrc/tensor"
)

// Files of level "smaller" have chunks that only the CPU decodes and chunks that the GPU decodes. Both load to a GPU
// bit for bit, from the file and from pinned memory.
func TestLevelSmaller(t *testing.T) {
	loadtest.UseEngine(t)
	_, m, want := loadtest.WriteModel(t, save.Spec{Compress: true, Level: "smaller", ChunkBytes: 64 << 10}, "hostile",
		0)
	planes, x16 := 0, 0
	for _, c := range m.Index().Chunks {
		switch c.Codec {
		case tensor.CodecPlanes:
			planes++
		case tensor.CodecX16:
			x16++
		}
	}
	if planes == 0 || x16 == 0 {
		t.Fatalf("%d chunks of codec 6, %d of X16", planes, x16)
	}
	loadtest.LoadAll(t, m, want, 0)
	j, err := m.Pin(load.Options{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := j.Wait(-1); err != nil {
		t.Fatal(err)
	}
	loadtest.LoadAll(t, m, want, 0)
	m.Close()
}

// Kernels for nibbles decode integers with packed nibbles, and kernels for bytes decode bytes.
func TestPackedIntegers(t *testing.T) {
	loadtest.UseEngine(t)
	r := rand.New(rand.NewPCG(4, 4))
	var in []save.Input
	for _, d := range []tensor.DType{tensor.I16, tensor.U16, tensor.I32, tensor.U32, tensor.I64, tensor.U64} {
		each := int64(d.Bits() / 8)
		nibbles, small := make([]byte, each*9001), make([]byte, each*9001)
		for i := range nibbles {
			nibbles[i] = byte(r.IntN(5) + 6 | (r.IntN(5)+6)<<4)
			if int64(i)%each == 0 {
				small[i] = byte(r.IntN(9) * 31)
			}
		}
		in = append(in, save.Input{Name: "nibbles." + d.String(), DType: d, Shape: []int64{9001}, Data: nibbles},
			save.Input{Name: "small." + d.String(), DType: d, Shape: []int64{9001}, Data: small})
	}
	path := filepath.Join(t.TempDir(), "x.safetensors")
	rep, err := save.Write(t.Context(), job.New("save"), save.Spec{Path: path, Compress: true}, in)
	if err != nil || rep.Compressed != len(in) {
		t.Fatalf("%v, %d compressed", err, rep.Compressed)
	}
	m := loadtest.OpenModel(t, path)
	d, err := cuda.Open(0)
	if err != nil {
		t.Fatal(err)
	}
	l, err := m.Start(nil, load.Options{Device: "cuda:0"})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if err := loadtest.Finish(t, l); err != nil {
		t.Fatal(err)
	}
	find := m.Index().Finder()
	for _, w := range in {
		i := find(0, w.Name)
		if !bytes.Equal(loadtest.ExportBytes(t, d, l, i), w.Data) {
			t.Errorf("%s: wrong bytes", w.Name)
		}
	}
	m.Close()
}
