package loadtest

// Writes models, loads them and reads their bytes back.

import (
	"bytes"
	"fmt"
	"path/filepath"
	"regexp"
	"testing"
	"time"
	"unsafe"

	"github.com/overwire/overwire/gosrc/codec/digest"
	"github.com/overwire/overwire/gosrc/device/cuda"
	"github.com/overwire/overwire/gosrc/device/cuda/memory"
	"github.com/overwire/overwire/gosrc/device/cuda/stream"
	"github.com/overwire/overwire/gosrc/dlpack"
	"github.com/overwire/overwire/gosrc/internal/spawn"
	"github.com/overwire/overwire/gosrc/job"
	"github.com/overwire/overwire/gosrc/load"
	"github.com/overwire/overwire/gosrc/plan"
	"github.com/overwire/overwire/gosrc/save"
	"github.com/overwire/overwire/gosrc/weights"
)

// DriverCall finds the driver's name of a call in an error.
var DriverCall = regexp.MustCompile(`\bcu[A-Z]`)

// WriteModel saves generated weights and opens the file.
func WriteModel(t testing.TB, spec save.Spec, kind string, size int64) (string, *load.Model,
	map[string]weights.Tensor) {
	t.Helper()
	made, err := weights.Make(weights.Options{Kind: kind, Size: size, Seed: 3})
	if err != nil {
		t.Fatal(err)
	}
	in := make([]save.Input, len(made))
	byName := map[string]weights.Tensor{}
	for i, w := range made {
		in[i] = save.Input{Name: w.Name, DType: w.DType, Shape: w.Shape, Data: w.Data}
		byName[w.Name] = w
	}
	spec.Path = filepath.Join(t.TempDir(), "model.safetensors")
	if _, err := save.Write(t.Context(), job.New("save"), spec, in); err != nil {
		t.Fatal(err)
	}
	return spec.Path, OpenModel(t, spec.Path), byName
}

func OpenModel(t testing.TB, path string) *load.Model {
	t.Helper()
	m, err := load.Open(t.Context(), load.Spec{URIs: []string{path}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(m.Close)
	return m
}

// BytesOf returns a model's tensors as they were generated.
func BytesOf(m *load.Model, want map[string]weights.Tensor) func(int) []byte {
	return func(i int) []byte { return want[m.Index().Tensors[i].Name].Data }
}

// Finish waits for a load's end.
func Finish(t *testing.T, l *load.Loading) error {
	t.Helper()
	done, err := l.Job().Wait(2 * time.Minute)
	if !done {
		t.Fatal("the load does not end")
	}
	return err
}

// TakeBytes waits for a load and returns its tensors' bytes, read back from the GPU.
func TakeBytes(t *testing.T, l *load.Loading, index int) [][]byte {
	t.Helper()
	d, err := cuda.Open(index)
	if err != nil {
		t.Fatal(err)
	}
	var all [][]byte
	for i := range l.Len() {
		mem, _, _, ok := l.Take(i)
		if !ok {
			t.Fatalf("tensor %d was not there to take", i)
		}
		b := make([]byte, mem.Bytes)
		if err := d.Read(b, mem); err != nil {
			t.Fatal(err)
		}
		mem.Release()
		all = append(all, b)
	}
	return all
}

// ExportBytes takes a tensor as Python does, through DLPack; its deleter frees the tensor.
func ExportBytes(t *testing.T, d *cuda.Device, l *load.Loading, i int) []byte {
	t.Helper()
	mem, shape, dtype, ok := l.Take(i)
	if !ok {
		t.Fatalf("tensor %d was not there to take", i)
	}
	if mem.Bytes > 0 && (uintptr(mem.Ptr)%memory.Align != 0 || mem.CUDA != int32(d.Index()+1)) {
		t.Errorf("tensor %d at %p of device %d", i, mem.Ptr, mem.CUDA-1)
	}
	b := make([]byte, mem.Bytes)
	if err := d.Read(b, mem); err != nil {
		t.Fatal(err)
	}
	typ, dims := dlpack.Describe(dtype, shape, mem.Bytes, false)
	one := dlpack.NewBatch(1)
	one.Add(mem, typ, dims)
	if err := one.Make(func(_ int, managed unsafe.Pointer) { dlpack.Delete(managed) }); err != nil {
		t.Fatal(err)
	}
	return b
}

// LoadAll loads every tensor and compares it.
func LoadAll(t *testing.T, m *load.Model, want map[string]weights.Tensor, index int) {
	t.Helper()
	d, err := cuda.Open(index)
	if err != nil {
		t.Fatal(err)
	}
	l, err := m.Start(nil, load.Options{Device: fmt.Sprint("cuda:", index)})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if err := Finish(t, l); err != nil {
		t.Fatal(err)
	}
	if l.Len() != len(want) {
		t.Fatalf("%d tensors of %d", l.Len(), len(want))
	}
	for i := range l.Len() {
		name := m.Index().Tensors[i].Name
		if !bytes.Equal(ExportBytes(t, d, l, i), want[name].Data) {
			t.Errorf("%s differs", name)
		}
	}
}

// AskForParts requests every tensor whole, and rows and columns where it has them.
func AskForParts(m *load.Model) (reqs []load.Request) {
	for i := range m.Index().Tensors {
		q := load.Request{Tensor: int64(i), Hi0: plan.Whole, Hi1: plan.Whole}
		reqs = append(reqs, q)
		if x := &m.Index().Tensors[i]; len(x.Shape) > 1 && x.Shape[0] > 4 && x.Shape[1] > 8 && x.DType.Bits() >= 8 {
			q.Lo0, q.Hi0 = 1, 4
			if i%2 == 0 {
				q.Lo1, q.Hi1 = 2, 7
			}
			reqs = append(reqs, q)
		}
	}
	return reqs
}

// LoadParts loads, and returns the bytes and the device's digests of the result.
func LoadParts(t *testing.T, m *load.Model, reqs []load.Request, opt load.Options, index int) (all [][]byte,
	sums []digest.Sum) {
	t.Helper()
	d, err := cuda.Open(index)
	if err != nil {
		t.Fatal(err)
	}
	opt.Device = fmt.Sprint("cuda:", index)
	l, err := m.Start(reqs, opt)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if err := Finish(t, l); err != nil {
		t.Fatalf("%+v: %v", opt, err)
	}
	var views []digest.View
	for i := range l.Len() {
		mem, _, _, ok := l.Take(i)
		if !ok {
			t.Fatalf("request %d was not there to take", i)
		}
		defer mem.Release()
		b := make([]byte, mem.Bytes)
		if err := d.Read(b, mem); err != nil {
			t.Fatal(err)
		}
		all, views = append(all, b), append(views, digest.Contiguous(uint64(uintptr(mem.Ptr)), mem.Bytes))
	}
	if sums, err = d.Digest(stream.Order{Stream: 1}, views); err != nil {
		t.Fatal(err)
	}
	return all, sums
}

// CompareParts compares the results of two ways of loading, and the digests with the bytes.
func CompareParts(t *testing.T, what string, got, want [][]byte, sums []digest.Sum) {
	t.Helper()
	for i := range want {
		if !bytes.Equal(got[i], want[i]) {
			t.Errorf("%s: request %d differs", what, i)
		} else if sums[i] != digest.Of(want[i]) {
			t.Errorf("%s: request %d has another digest", what, i)
		}
	}
}

// CheckQuiet waits until no goroutine of a load is left. The reapers of devices with live memory do not count.
func CheckQuiet(t *testing.T) {
	t.Helper()
	if n := spawn.Left(); len(n) != 0 {
		t.Errorf("still running: %v", n)
	}
}
