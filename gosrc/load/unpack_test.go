package load

import (
	"bytes"
	"errors"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/job"
	"github.com/overwire/overwire/gosrc/save"
	"github.com/overwire/overwire/gosrc/tensor"
)

// smaller writes a container with large and small tensors, some in codec 6, some in X16 and some uncompressed. It
// returns the path and the contents.
func smaller(t *testing.T) (string, []save.Input) {
	t.Helper()
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 9))
	floats := func(name string, d tensor.DType, rows, cols int64) save.Input {
		var b []byte
		for range rows * cols {
			bits := math.Float32bits(float32(r.NormFloat64()) * 0.02)
			if d == tensor.BF16 {
				bits >>= 16
				b = append(b, byte(bits), byte(bits>>8))
				continue
			}
			b = append(b, byte(bits), byte(bits>>8), byte(bits>>16), byte(bits>>24))
		}
		return save.Input{Name: name, DType: d, Shape: []int64{rows, cols}, Data: b}
	}
	noise := make([]byte, 70_001)
	for i := range noise {
		noise[i] = byte(r.Uint32())
	}
	in := []save.Input{floats("a", tensor.BF16, 1500, 1001), floats("b", tensor.F32, 300, 77),
		floats("c", tensor.BF16, 3, 5),
		{Name: "d", DType: tensor.U8, Shape: []int64{70_001}, Data: noise}, floats("e", tensor.F32, 1100, 1000)}
	for i := range 12 { // small neighbours, which share a read
		in = append(in, floats(string(rune('f'+i)), tensor.BF16, 60, 64))
	}
	path := filepath.Join(t.TempDir(), "x.safetensors")
	spec := save.Spec{Path: path, Compress: true, Level: "smaller", ChunkBytes: 256 << 10}
	if _, err := save.Write(t.Context(), job.New("save"), spec, in); err != nil {
		t.Fatal(err)
	}
	return path, in
}

// Tensors in codec 6 load whole, by rows and by columns, from the file and from pinned memory. Index shows them as they
// are stored.
func TestUnpacked(t *testing.T) {
	path, in := smaller(t)
	m := opened(t, Spec{URIs: []string{path}})
	stored, planes := int64(0), 0
	for i := range m.Index().Tensors {
		stored += m.Index().Tensors[i].Stored
	}
	for _, c := range m.Index().Chunks {
		if c.Codec == tensor.CodecPlanes {
			planes++
		}
	}
	file, err := os.Stat(path)
	if err != nil || stored > file.Size() || planes < 10 {
		t.Fatalf("%v: %d bytes stored of %d, %d chunks of codec 6", err, stored, file.Size(), planes)
	}
	check := func() {
		t.Helper()
		l, _ := ended(t, m, Options{})
		find := m.Index().Finder()
		for _, w := range in {
			i := find(0, w.Name)
			mem, _, _, ok := l.Take(i)
			if !ok || !bytes.Equal(mem.Slice(), w.Data) {
				t.Errorf("%s: %v, or wrong bytes", w.Name, ok)
			}
			mem.Release()
		}
		l.Close()
		at := find(0, "a")
		s, err := m.Start([]Request{{Tensor: int64(at), Lo0: 17, Hi0: 913, Hi1: -1},
			{Tensor: int64(at), Hi0: -1, Lo1: 500, Hi1: 999}}, Options{})
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		if _, err := s.Job().Wait(-1); err != nil {
			t.Fatal(err)
		}
		rows, _, _, _ := s.Take(0)
		cols, _, _, _ := s.Take(1)
		defer rows.Release()
		defer cols.Release()
		if !bytes.Equal(rows.Slice(), in[0].Data[17*2002:913*2002]) {
			t.Error("wrong rows")
		}
		for r := range 1500 {
			if !bytes.Equal(cols.Slice()[r*998:(r+1)*998], in[0].Data[r*2002+1000:r*2002+1998]) {
				t.Fatalf("wrong columns in row %d", r)
			}
		}
	}
	check()
	j, err := m.Pin(Options{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := j.Wait(-1); err != nil {
		t.Fatal(err)
	}
	check()
}

// Loads and Pin detect a changed byte in a chunk of codec 6 by its checksum. The load's error names the chunk.
func TestUnpackedDamage(t *testing.T) {
	path, _ := smaller(t)
	m := opened(t, Spec{URIs: []string{path}})
	i := m.Index().Finder()(0, "e")
	c := m.Index().Chunks[m.Index().Tensors[i].First+2]
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	b[c.Off+int64(c.Stored)/2] ^= 4
	if err := os.WriteFile(path, b, 0o644); err != nil {
		t.Fatal(err)
	}
	m = opened(t, Spec{URIs: []string{path}})
	l, err := m.Start(nil, Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	_, err = l.Job().Wait(-1)
	var at *errs.At
	if !errors.Is(err, errs.ErrCorrupt) || !errors.As(err, &at) || at.Tensor != "e" || at.Chunk != 2 ||
		at.Offset != c.Off {
		t.Errorf("%v", err)
	}
	m = opened(t, Spec{URIs: []string{path}})
	j, err := m.Pin(Options{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := j.Wait(-1); !errors.Is(err, errs.ErrCorrupt) {
		t.Errorf("pin: %v", err)
	}
}
