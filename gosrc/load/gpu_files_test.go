package load_test

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"github.com/overwire/overwire/gosrc/device/cuda/driver"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/job"
	"github.com/overwire/overwire/gosrc/load"
	"github.com/overwire/overwire/gosrc/load/loadtest"
	"github.com/overwire/overwire/gosrc/plan"
	"github.com/overwire/overwire/gosrc/save"
	"github.com/overwire/overwire/gosrc/tensor"
)

// inputs returns tensors that compress, tensors that do not, and very small or empty tensors.
func inputs() []save.Input {
	r := rand.New(rand.NewPCG(1, 1))
	var in []save.Input
	add := func(name string, d tensor.DType, shape ...int64) {
		n := int64(d.Bits() / 8)
		for _, x := range shape {
			n *= x
		}
		b := make([]byte, n)
		for i := 0; i+1 < len(b); i += 2 {
			b[i], b[i+1] = byte(r.Uint32()), byte(60+int(1.5*r.NormFloat64())/2)
		}
		in = append(in, save.Input{Name: name, DType: d, Shape: shape, Data: b})
	}
	add("a.weight", tensor.BF16, 300, 512)
	add("b.weight", tensor.BF16, 128, 1000)
	add("c.weight", tensor.F16, 64, 512)
	for i := range 40 {
		add("norm."+string(rune('a'+i)), tensor.F32, int64(i))
	}
	add("ids", tensor.I64, 777)
	add("none", tensor.BF16, 0, 4)
	add("one", tensor.U8, 1)
	return in
}

// Files load to the GPU unchanged, whole and in slices: compressed in one or several column parts, and plain.
func TestLoad(t *testing.T) {
	loadtest.UseEngine(t)
	in := inputs()
	for _, spec := range []save.Spec{{Compress: true}, {Compress: true, Parts: 4, ChunkBytes: 64 << 10}, {}} {
		spec.Path = filepath.Join(t.TempDir(), "model.safetensors")
		if _, err := save.Write(t.Context(), job.New("save"), spec, in); err != nil {
			t.Fatal(err)
		}
		m, err := load.Open(t.Context(), load.Spec{URIs: []string{spec.Path}})
		if err != nil {
			t.Fatal(err)
		}
		l, err := m.Start(nil, load.Options{Device: "cuda", Stream: 1})
		if err != nil {
			t.Fatal(err)
		}
		if err := loadtest.Finish(t, l); err != nil {
			t.Fatalf("%+v: %v", spec, err)
		}
		got := loadtest.TakeBytes(t, l, 0)
		l.Close()
		byName := map[string][]byte{}
		for i := range m.Index().Tensors {
			byName[m.Index().Tensors[i].Name] = got[i]
		}
		for _, x := range in {
			if !bytes.Equal(byName[x.Name], x.Data) {
				t.Errorf("%+v: %s differs", spec, x.Name)
			}
		}
		// Rows 17 to 201 and columns 33 to 400 of the first tensor.
		var reqs []load.Request
		for i := range m.Index().Tensors {
			if m.Index().Tensors[i].Name == "a.weight" {
				reqs = []load.Request{{Tensor: int64(i), Lo0: 17, Hi0: 201, Lo1: 33, Hi1: 400},
					{Tensor: int64(i), Lo0: 5, Hi0: 299, Hi1: plan.Whole}}
			}
		}
		l, err = m.Start(reqs, load.Options{Device: "cuda:0"})
		if err != nil {
			t.Fatal(err)
		}
		if err := loadtest.Finish(t, l); err != nil {
			t.Fatalf("%+v: %v", spec, err)
		}
		got = loadtest.TakeBytes(t, l, 0)
		var want []byte
		for r := 17; r < 201; r++ {
			want = append(want, in[0].Data[r*1024+66:r*1024+800]...)
		}
		if !bytes.Equal(got[0], want) || !bytes.Equal(got[1], in[0].Data[5*1024:299*1024]) {
			t.Errorf("%+v: a slice differs", spec)
		}
		l.Close()
		m.Close()
	}
}

// A changed byte in a file is reported as a corrupt chunk, and the next load succeeds.
func TestLoadCorrupt(t *testing.T) {
	loadtest.UseEngine(t)
	path := filepath.Join(t.TempDir(), "model.safetensors")
	if _, err := save.Write(t.Context(), job.New("save"), save.Spec{Path: path, Compress: true}, inputs()); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for _, hurt := range []bool{true, false} {
		b[len(b)/2] ^= 1 // the second time restores it
		if err := os.WriteFile(path, b, 0o600); err != nil {
			t.Fatal(err)
		}
		m, err := load.Open(t.Context(), load.Spec{URIs: []string{path}})
		if err != nil {
			t.Fatal(err)
		}
		l, err := m.Start(nil, load.Options{Device: "cuda"})
		if err != nil {
			t.Fatal(err)
		}
		if err = loadtest.Finish(t, l); hurt && !errors.Is(err, errs.ErrCorrupt) {
			t.Errorf("a changed byte: %v", err)
		}
		if !hurt && err != nil {
			t.Error(err)
		}
		l.Close()
		m.Close()
	}
}

// A traced load reports when the device copied and decoded. The next load on the same queue is not timed. A load that
// reads in place has no copies.
func TestLoadTrace(t *testing.T) {
	loadtest.UseEngine(t)
	dir := t.TempDir()
	path, trace := filepath.Join(dir, "model.safetensors"), filepath.Join(dir, "trace.json")
	if _, err := save.Write(t.Context(), job.New("save"), save.Spec{Path: path, Compress: true}, inputs()); err != nil {
		t.Fatal(err)
	}
	m, err := load.Open(t.Context(), load.Spec{URIs: []string{path}})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	info, err := driver.Info()
	if err != nil {
		t.Fatal(err)
	}
	for i, file := range []string{trace, "", trace} {
		inPlace := i == 0
		l, err := m.Start(nil, load.Options{Device: "cuda", Trace: file, InPlace: inPlace})
		if err != nil {
			t.Fatal(err)
		}
		if err := loadtest.Finish(t, l); err != nil {
			t.Fatal(err)
		}
		rep := l.Job().Value().(load.Report)
		l.Close()
		if (rep.Trace != nil) != (file != "") {
			t.Fatalf("trace %q: %+v", file, rep.Trace)
		}
		if rep.Trace == nil {
			continue
		}
		spans := map[string]int64{}
		for _, s := range rep.Trace.Stages {
			spans[s.Verb] = int64(s.Spans)
		}
		copies := rep.Stages.Pieces
		if inPlace || info[0].Coherent {
			copies = 0
		}
		if spans["copy"] != copies || spans["submit"] != rep.Stages.Pieces || spans["decode"] == 0 ||
			spans["land"] == 0 {
			t.Errorf("%v of %d pieces", spans, rep.Stages.Pieces)
		}
		if c := rep.Trace.Copy; (c == nil) != (copies == 0) || c != nil && (c.Busy <= 0 || c.Lead < 0 || c.Tail < 0) {
			t.Errorf("%+v", c)
		}
	}
	if b, err := os.ReadFile(trace); err != nil || bytes.Contains(b, []byte(`"copies"`)) == info[0].Coherent {
		t.Errorf("the trace has no row for the copies: %v", err)
	}
}
