package load

import (
	"bytes"
	"errors"
	"os"
	"testing"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/job"
	"github.com/overwire/overwire/gosrc/save"
	"github.com/overwire/overwire/gosrc/tensor"
)

// packed writes a compressed file of two tensors with several chunks each. It returns the path and the tensors' bytes.
func packed(t testing.TB) (string, [][]byte) {
	t.Helper()
	path := t.TempDir() + "/m.safetensors"
	var in []save.Input
	var want [][]byte
	for i, name := range []string{"a", "b"} {
		b := make([]byte, 400_000)
		for k := range b {
			b[k] = byte(k%7*i + k%3)
		}
		want = append(want, b)
		in = append(in, save.Input{Name: name, DType: tensor.U8, Shape: []int64{400, 1000}, Data: b})
	}
	if _, err := save.Write(t.Context(), job.New("save"), save.Spec{Path: path, Compress: true, ChunkBytes: 64 << 10},
		in); err != nil {
		t.Fatal(err)
	}
	return path, want
}

func pin(t testing.TB, m *Model) error {
	t.Helper()
	j, err := m.Pin(Options{})
	if err != nil {
		return err
	}
	_, err = j.Wait(-1)
	return err
}

// A pinned model, compressed or plain, loads tensors and slices without its files. Several loads can run at the same
// time, and continue after the model is closed.
func TestPin(t *testing.T) {
	plain, b0 := write(t, "a", []int64{400, 1000}, []int64{0, 3}, []int64{300, 700})
	coded, b1 := packed(t)
	for path, want := range map[string][][]byte{plain: b0, coded: b1} {
		m := opened(t, Spec{URIs: []string{path}})
		if err := pin(t, m); err != nil {
			t.Fatal(err)
		}
		if _, err := m.Pin(Options{}); !errors.Is(err, errs.ErrArgument) {
			t.Errorf("pinned twice: %v", err)
		}
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
		var loads []*Loading
		for range 4 {
			l, err := m.Start(nil, Options{})
			if err != nil {
				t.Fatal(err)
			}
			loads = append(loads, l)
		}
		cols, err := m.Start([]Request{{Tensor: 0, Lo0: 1, Hi0: 399, Lo1: 5, Hi1: 990}}, Options{})
		if err != nil {
			t.Fatal(err)
		}
		m.Close()
		for _, l := range loads {
			if _, err := l.Job().Wait(-1); err != nil {
				t.Fatal(err)
			}
			for i := range want {
				mem, _, _, ok := l.Take(i)
				if !ok || !bytes.Equal(mem.Slice(), want[i]) {
					t.Errorf("%s: tensor %d differs", path, i)
				}
				mem.Release()
			}
			l.Close()
		}
		if _, err := cols.Job().Wait(-1); err != nil {
			t.Fatal(err)
		}
		var part []byte
		for r := 1; r < 399; r++ {
			part = append(part, want[0][r*1000+5:r*1000+990]...)
		}
		if mem, _, _, _ := cols.Take(0); !bytes.Equal(mem.Slice(), part) {
			t.Errorf("%s: a slice differs", path)
		} else {
			mem.Release()
		}
		cols.Close()
		if _, err := m.Pin(Options{}); !errors.Is(err, errs.ErrArgument) {
			t.Errorf("closed: %v", err)
		}
	}
	settled(t)
}

// If Pin fails, the model is unchanged. The error names the corrupt chunk, and intact tensors still load.
func TestPinFails(t *testing.T) {
	path, want := packed(t)
	whole := opened(t, Spec{URIs: []string{path}})
	x := whole.ix.Tensors[1]
	c := whole.ix.Chunks[x.First+2]
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	data[c.Off+3] ^= 1
	if err := os.WriteFile(path, data, 0o600); err != nil {
		t.Fatal(err)
	}
	m := opened(t, Spec{URIs: []string{path}})
	for range 2 {
		var at *errs.At
		if err := pin(t, m); !errors.Is(err, errs.ErrCorrupt) || !errors.As(err, &at) || at.Tensor != "b" ||
			at.Chunk != 2 || at.Offset != c.Off || at.Source != path {
			t.Fatalf("damaged: %v", err)
		}
	}
	l, err := m.Start([]Request{{Tensor: 0, Hi0: -1, Hi1: -1}}, Options{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := l.Job().Wait(-1); err != nil {
		t.Fatal(err)
	}
	if mem, _, _, ok := l.Take(0); !ok || !bytes.Equal(mem.Slice(), want[0]) {
		t.Error("the intact tensor differs")
	} else {
		mem.Release()
	}
	l.Close()
	settled(t)
	if err := m.Hold(); err != nil { // as a running load does
		t.Fatal(err)
	}
	if _, err := m.Pin(Options{}); !errors.Is(err, errs.ErrArgument) {
		t.Errorf("pinned while a load runs: %v", err)
	}
	m.Drop()
	if err := os.Truncate(path, 1000); err != nil {
		t.Fatal(err)
	}
	if err := pin(t, whole); !errors.Is(err, errs.ErrCorrupt) {
		t.Errorf("truncated: %v", err)
	}
	other, _ := packed(t)
	m = opened(t, Spec{URIs: []string{other}})
	j, err := m.Pin(Options{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := m.Start(nil, Options{}); err != nil && !errors.Is(err, errs.ErrArgument) {
		t.Error(err) // Start succeeds if Pin has already finished
	}
	j.Cancel()
	if _, err := j.Wait(-1); err != nil && !errors.Is(err, errs.ErrCancelled) {
		t.Errorf("cancelled: %v", err)
	}
	settled(t)
}
