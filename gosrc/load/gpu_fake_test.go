//go:build owfake

package load_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/overwire/overwire/gosrc/device/cuda"
	"github.com/overwire/overwire/gosrc/device/cuda/cudatest"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/load"
	"github.com/overwire/overwire/gosrc/load/loadtest"
	"github.com/overwire/overwire/gosrc/plan"
	"github.com/overwire/overwire/gosrc/save"
)

// If any driver call fails during a load, once or permanently, the load continues or ends with a typed error. The error
// names the file, the call, and the tensor if one was in progress. Nothing leaks.
func TestLoadEveryCallFails(t *testing.T) {
	path, m, want := loadtest.WriteModel(t, save.Spec{Compress: true, ChunkBytes: 64 << 10}, "hostile", 0)
	// A few tensors of each kind: compressed, raw, sliced and empty.
	var reqs []load.Request
	for i := range m.Index().Tensors {
		x := &m.Index().Tensors[i]
		q := load.Request{Tensor: int64(i), Hi0: plan.Whole, Hi1: plan.Whole}
		switch {
		case strings.HasPrefix(x.Name, "hostile.BF16.") && x.Bytes < 20_000,
			strings.HasPrefix(x.Name, "hostile.F8_E4M3.r"):
		case x.Name == "hostile.F32.random":
			q.Lo1, q.Hi1 = 2, 5
		default:
			continue
		}
		reqs = append(reqs, q)
	}
	t.Logf("%d of %d tensors", len(reqs), len(want))
	step := int64(1)
	if testing.Short() {
		step = 7
	}
	m.Close()
	for _, c := range []struct {
		code   int
		sticky bool
		pin    bool
		class  error
		index  int
	}{{999, false, false, errs.ErrDevice, 0}, {999, true, false, errs.ErrDevice, 0},
		{2, false, false, errs.ErrMemory, 0}, {999, false, true, errs.ErrDevice, 0},
		{999, false, false, errs.ErrDevice, 1}, {999, true, false, errs.ErrDevice, 1},
		{2, false, false, errs.ErrMemory, 1}, {999, false, true, errs.ErrDevice, 1}} {
		failed, moving := 0, 0
		for nth := int64(1); ; nth += step {
			end := cuda.Fake(512 << 20)
			cudatest.FailCall(nth, c.code, c.sticky)
			m, err := load.Open(t.Context(), load.Spec{URIs: []string{path}})
			if err != nil {
				t.Fatal(err)
			}
			if c.pin {
				j, e := m.Pin(load.Options{Device: fmt.Sprint("cuda:", 1-c.index)})
				if err = e; err == nil {
					_, err = j.Wait(-1)
				}
			}
			if err == nil {
				l, e := m.Start(reqs, load.Options{Device: fmt.Sprint("cuda:", c.index), Stream: 1})
				if err = e; err == nil {
					err = loadtest.Finish(t, l)
					l.Close()
				}
			}
			m.Close()
			calls := cudatest.CountCalls()
			what := fmt.Sprintf("call %d fails with %d: %v", nth, c.code, err)
			if left := end(); left != "" {
				t.Fatalf("%s; left: %s", what, left)
			}
			if err != nil {
				failed++
				var at *errs.At
				if !errors.Is(err, c.class) || !errors.As(err, &at) || at.Source != path {
					t.Fatal(what)
				}
				if at.Tensor != "" {
					moving++
				}
				if (at.Verb == "copy" || at.Verb == "decode") != (at.Tensor != "") {
					t.Fatalf("%s: the error names no tensor", what)
				}
				if !loadtest.DriverCall.MatchString(err.Error()) {
					t.Fatalf("%s: the error names no call", what)
				}
			}
			if calls < nth {
				break
			}
		}
		t.Logf("cuda:%d, code %d, sticky %v, pinned %v: %d loads failed, %d with a tensor in progress", c.index,
			c.code, c.sticky, c.pin, failed, moving)
		if failed < 60/int(step) || moving == 0 {
			t.Error("too few loads failed")
		}
	}
	loadtest.CheckQuiet(t)
	loadtest.UseEngine(t)
	loadtest.LoadAll(t, loadtest.OpenModel(t, path), want, 1)
}

// The error of a load that does not fit on the device says how much memory it needed and how much was free. The load
// frees what it has allocated. A load also works if only cached memory occupies the space.
func TestOutOfMemory(t *testing.T) {
	_, m, want := loadtest.WriteModel(t, save.Spec{Compress: true, ChunkBytes: 64 << 10}, "", 4<<20)
	var bytes int64
	for i := range m.Index().Tensors {
		bytes += m.Index().Tensors[i].Bytes
	}
	const queue = 8 << 20 // for a small ring
	for _, c := range []struct {
		name  string
		room  int64
		asked int64
	}{{"tensors", bytes / 2, bytes}, {"staging", bytes + bytes/8 + 1<<20, 0}} {
		end := cuda.Fake(c.room)
		for range 3 {
			l, err := m.Start(nil, load.Options{Device: "cuda"})
			if err == nil {
				err = loadtest.Finish(t, l)
				l.Close()
			}
			var mem *errs.Memory
			if !errors.As(err, &mem) || mem.Asked < c.asked || mem.Asked <= mem.Free || mem.Free > mem.Total ||
				mem.Total != c.room {
				t.Errorf("%s: %v", c.name, err)
			}
		}
		if left := end(); left != "" {
			t.Fatalf("%s: %s", c.name, left)
		}
	}
	end := cuda.Fake(bytes + queue + 4<<20)
	for range 3 { // tensors of the previous load are released, but not yet freed
		loadtest.LoadAll(t, m, want, 0)
	}
	if err := cuda.Trim(); err != nil {
		t.Fatal(err)
	}
	d, err := cuda.Open(0)
	if err != nil {
		t.Fatal(err)
	}
	if unused, total, err := d.MemoryInfo(); err != nil || unused != total {
		t.Errorf("after Trim %d bytes are free of %d, %v", unused, total, err)
	}
	if left := end(); left != "" {
		t.Error(left)
	}
}

// Kernels read chunks in pinned memory only for loads to the coherent device and loads that request it, although all
// loads share one queue.
func TestOnlySomeLoadsReadInPlace(t *testing.T) {
	loadtest.UseEngine(t)
	for _, spec := range []save.Spec{{Compress: true, ChunkBytes: 64 << 10}, {}} {
		_, m, _ := loadtest.WriteModel(t, spec, "fp8-e4m3", 1<<18)
		reqs := loadtest.AskForParts(m)
		want, _ := loadtest.LoadParts(t, m, reqs, load.Options{}, 0)
		for _, c := range []struct {
			index      int
			asked, yes bool
		}{{0, false, false}, {0, true, true}, {0, false, false}, {1, false, true}, {1, true, true}, {0, false, false}} {
			before := cudatest.BytesReadInPlace()
			got, sums := loadtest.LoadParts(t, m, reqs, load.Options{InPlace: c.asked}, c.index)
			loadtest.CompareParts(t, fmt.Sprintf("%+v", c), got, want, sums)
			if n := cudatest.BytesReadInPlace() - before; (n > 0) != c.yes {
				t.Errorf("compressed %v, %+v: %d bytes were read in place", spec.Compress, c, n)
			}
		}
	}
}
