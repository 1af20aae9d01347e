package load_test

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"
	"unsafe"

	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/device/cuda"
	"github.com/overwire/overwire/gosrc/device/cuda/driver"
	"github.com/overwire/overwire/gosrc/device/cuda/queue"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/format"
	"github.com/overwire/overwire/gosrc/job"
	"github.com/overwire/overwire/gosrc/load"
	"github.com/overwire/overwire/gosrc/load/loadtest"
	"github.com/overwire/overwire/gosrc/plan"
	"github.com/overwire/overwire/gosrc/save"
	"github.com/overwire/overwire/gosrc/serve"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/tensor"
	"github.com/overwire/overwire/gosrc/weights"
)

// Weights of every kind and dtype, compressed and plain, load into engine memory exported through DLPack, and into
// memory of the caller at any offset.
func TestLoadEveryKind(t *testing.T) {
	loadtest.UseEngine(t)
	for _, kind := range weights.Kinds() {
		if kind.Name == "moe-bf16" {
			continue // slow: it has as many tensors as a real model
		}
		for _, spec := range []save.Spec{{Compress: true, ChunkBytes: 64 << 10}, {}} {
			t.Run(fmt.Sprintf("%s/%v", kind.Name, spec.Compress), func(t *testing.T) {
				_, m, want := loadtest.WriteModel(t, spec, kind.Name, 1<<20)
				loadtest.LoadAll(t, m, want, 0)
				d, err := cuda.Open(0)
				if err != nil {
					t.Fatal(err)
				}
				// One buffer of the caller, with tensors at odd offsets.
				var reqs []load.Request
				var total int64
				for i := range m.Index().Tensors {
					total += m.Index().Tensors[i].Bytes + int64(i%5)
				}
				mem, err := d.Alloc([]int64{total})
				if err != nil {
					t.Fatal(err)
				}
				defer mem[0].Release()
				var at int64
				for i := range m.Index().Tensors {
					at += int64(i % 5)
					reqs = append(reqs, load.Request{Tensor: int64(i), Dest: uintptr(mem[0].Ptr) + uintptr(at),
						Hi0: plan.Whole, Hi1: plan.Whole})
					at += m.Index().Tensors[i].Bytes
				}
				l, err := m.Start(reqs, load.Options{Device: "cuda:0", Stream: 1})
				if err != nil {
					t.Fatal(err)
				}
				defer l.Close()
				if err := loadtest.Finish(t, l); err != nil {
					t.Fatal(err)
				}
				for i, q := range reqs {
					x := &m.Index().Tensors[i]
					got := make([]byte, x.Bytes)
					if err := d.Read(got, device.Memory{Ptr: unsafe.Add(mem[0].Ptr,
						int64(q.Dest)-int64(uintptr(mem[0].Ptr))), Bytes: x.Bytes}); err != nil {
						t.Fatal(err)
					}
					if !bytes.Equal(got, want[x.Name].Data) {
						t.Errorf("%s differs in the caller's memory", x.Name)
					}
					if _, _, _, ok := l.Take(i); ok && x.Bytes > 0 {
						t.Errorf("%s: Take returned memory for a request with a destination", x.Name)
					}
				}
			})
		}
	}
}

// The error for a changed chunk names the chunk, and the next load succeeds.
func TestCorruptChunkIsNamed(t *testing.T) {
	loadtest.UseEngine(t)
	path, good, want := loadtest.WriteModel(t, save.Spec{Compress: true, ChunkBytes: 32 << 10}, "", 4<<20)
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	ix := good.Index()
	tested := 0
	for i := range ix.Tensors {
		x := &ix.Tensors[i]
		if x.Count < 3 || tested == 3 {
			continue
		}
		tested++
		c := ix.Chunks[x.First+1]
		hurt := bytes.Clone(data)
		hurt[c.Off+int64(c.Stored)/2] ^= 4
		other := filepath.Join(t.TempDir(), "hurt.safetensors")
		if err := os.WriteFile(other, hurt, 0o600); err != nil {
			t.Fatal(err)
		}
		l, err := loadtest.OpenModel(t, other).Start(nil, load.Options{Device: "cuda"})
		if err != nil {
			t.Fatal(err)
		}
		err = loadtest.Finish(t, l)
		var at *errs.At
		if !errors.Is(err, errs.ErrCorrupt) || !errors.As(err, &at) || at.Source != other || at.Tensor != x.Name ||
			at.Chunk != 1 || at.Offset != c.Off {
			t.Errorf("%s: %v", x.Name, err)
		}
		l.Close()
		loadtest.LoadAll(t, good, want, 0)
	}
	if tested == 0 {
		t.Fatal("no tensor has three chunks")
	}
}

// A load ends if it is closed at any moment, and the next load is correct.
func TestCancelAtAnyMoment(t *testing.T) {
	loadtest.UseEngine(t)
	_, m, want := loadtest.WriteModel(t, save.Spec{Compress: true, ChunkBytes: 64 << 10}, "", 4<<20)
	cancelled := 0
	for i := 0; i < 30 || cancelled == 0; i++ {
		if i == 1000 {
			t.Fatal("every load finished before it was cancelled")
		}
		l, err := m.Start(nil, load.Options{Device: "cuda"})
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Duration(i%30*(i%30)*20) * time.Microsecond)
		l.Close()
		switch err := loadtest.Finish(t, l); {
		case errors.Is(err, errs.ErrCancelled):
			cancelled++
		case err != nil:
			t.Fatal(err)
		}
		if _, _, _, ok := l.Take(0); ok {
			t.Fatal("Take returned memory from a closed load")
		}
	}
	loadtest.LoadAll(t, m, want, 0)
	t.Logf("%d loads were cancelled while they ran", cancelled)
}

// Simultaneous loads to two devices do not interfere.
func TestTwoDevicesAtOnce(t *testing.T) {
	loadtest.UseEngine(t)
	all, err := driver.Info()
	if err != nil {
		t.Fatal(err)
	}
	if len(all) < 2 {
		t.Skip("one device")
	}
	_, m, want := loadtest.WriteModel(t, save.Spec{Compress: true, ChunkBytes: 64 << 10}, "fp16", 2<<20)
	var loads []*load.Loading
	for i := range 6 {
		l, err := m.Start(nil, load.Options{Device: fmt.Sprint("cuda:", i%2)})
		if err != nil {
			t.Fatal(err)
		}
		loads = append(loads, l)
	}
	for i, l := range loads {
		if err := loadtest.Finish(t, l); err != nil {
			t.Fatal(err)
		}
		d, err := cuda.Open(i % 2)
		if err != nil {
			t.Fatal(err)
		}
		for k := range l.Len() {
			if !bytes.Equal(loadtest.ExportBytes(t, d, l, k), want[m.Index().Tensors[k].Name].Data) {
				t.Errorf("load %d: %s differs", i, m.Index().Tensors[k].Name)
			}
		}
		l.Close()
	}
}

// A pinned model loads without its file. Its memory is registered only once, by Pin or by the first load. Closing the
// model frees everything.
func TestPinned(t *testing.T) {
	loadtest.UseEngine(t)
	for _, spec := range []save.Spec{{Compress: true, ChunkBytes: 64 << 10}, {}} {
		for _, at := range []string{"", "cuda:0"} {
			for _, kind := range []string{"", "fp8-e4m3", "hostile"} {
				path, m, want := loadtest.WriteModel(t, spec, kind, 2<<20)
				j, err := m.Pin(load.Options{Device: at})
				if err != nil {
					t.Fatal(err)
				}
				if _, err := j.Wait(-1); err != nil {
					t.Fatal(err)
				}
				if err := os.Remove(path); err != nil {
					t.Fatal(err)
				}
				for range 2 {
					loadtest.LoadAll(t, m, want, 0)
				}
				l, err := m.Start([]load.Request{{Tensor: 0, Hi0: plan.Whole, Hi1: plan.Whole}},
					load.Options{Device: "cuda"})
				if err != nil {
					t.Fatal(err)
				}
				m.Close() // the load continues
				if err := loadtest.Finish(t, l); err != nil {
					t.Fatal(err)
				}
				l.Close()
			}
		}
	}
}

// Tensors can be saved from device memory chunk by chunk. The file is the same, byte for byte, as for tensors on the
// host, including tied tensors.
func TestSaveFromDevice(t *testing.T) {
	loadtest.UseEngine(t)
	for _, kind := range []string{"tied", "hostile"} {
		for _, spec := range []save.Spec{{Compress: true, ChunkBytes: 64 << 10, Parts: 4}, {}} {
			path, m, want := loadtest.WriteModel(t, spec, kind, 1<<20)
			d, err := cuda.Open(0)
			if err != nil {
				t.Fatal(err)
			}
			l, err := m.Start(nil, load.Options{Device: "cuda:0"})
			if err != nil {
				t.Fatal(err)
			}
			if err := loadtest.Finish(t, l); err != nil {
				t.Fatal(err)
			}
			in := make([]save.Input, l.Len())
			for i := range in {
				mem, shape, dtype, _ := l.Take(i)
				defer mem.Release()
				in[i] = save.Input{Name: m.Index().Tensors[i].Name, DType: dtype, Shape: shape}
				in[i].Device = &save.DeviceMemory{Addr: uintptr(mem.Ptr), Bytes: mem.Bytes,
					Read: func(dst []byte, off int64) error {
						return d.Read(dst, device.Memory{Ptr: unsafe.Add(mem.Ptr, off), Bytes: int64(len(dst))})
					}}
			}
			l.Close()
			spec.Path = filepath.Join(t.TempDir(), "again.safetensors")
			if _, err := save.Write(t.Context(), job.New("save"), spec, in); err != nil {
				t.Fatal(err)
			}
			one, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			two, err := os.ReadFile(spec.Path)
			if err != nil {
				t.Fatal(err)
			}
			if kind == "tied" && !spec.Compress && len(one) != len(two) || kind == "hostile" && !spec.Compress {
				// the order of tensors in a plain file may differ
				loadtest.LoadAll(t, loadtest.OpenModel(t, spec.Path), want, 0)
			} else if !bytes.Equal(one, two) {
				t.Errorf("%s, compressed %v: files of %d and %d bytes differ", kind, spec.Compress, len(one), len(two))
			}
		}
	}
}

// A cast during the load gives the same bytes as a cast after it, for whole tensors and slices, from compressed,
// partitioned and plain files. Dtypes without a kernel stay as they are.
func TestCastDuringALoad(t *testing.T) {
	loadtest.UseEngine(t)
	d, err := cuda.Open(0)
	if err != nil {
		t.Fatal(err)
	}
	for kind, targets := range map[string][]tensor.DType{
		"": {tensor.F32, tensor.F16}, "fp16": {tensor.BF16}, "fp32": {tensor.BF16, tensor.F16},
		"fp8-e4m3": {tensor.BF16},
		"fp8-e5m2": {tensor.F16}, "hostile": {tensor.F32},
	} {
		for _, spec := range []save.Spec{{Compress: true, ChunkBytes: 64 << 10},
			{Compress: true, ChunkBytes: 64 << 10, Parts: 4}, {}} {
			_, m, _ := loadtest.WriteModel(t, spec, kind, 1<<20)
			var reqs []load.Request
			for i := range m.Index().Tensors {
				q := load.Request{Tensor: int64(i), Hi0: plan.Whole, Hi1: plan.Whole}
				if x := &m.Index().Tensors[i]; len(x.Shape) > 1 && x.Shape[0] > 4 && x.Shape[1] > 8 &&
					x.DType.Bits() >= 8 {
					q.Lo0, q.Hi0 = 1, 4
					if i%2 == 0 {
						q.Lo1, q.Hi1 = 2, 7
					}
					reqs = append(reqs, q)
					q = load.Request{Tensor: int64(i), Hi0: plan.Whole, Hi1: plan.Whole}
				}
				reqs = append(reqs, q)
			}
			for _, to := range targets {
				loaded := func(opt load.Options) *load.Loading {
					opt.Device = "cuda:0"
					l, err := m.Start(reqs, opt)
					if err != nil {
						t.Fatal(err)
					}
					if err := loadtest.Finish(t, l); err != nil {
						t.Fatal(err)
					}
					return l
				}
				plainly, fused := loaded(load.Options{}), loaded(load.Options{Cast: to.String()})
				q, err := d.Queue(0, 0)
				if err != nil {
					t.Fatal(err)
				}
				casts := 0
				for i := range reqs {
					a, _, from, _ := plainly.Take(i)
					b, _, got, _ := fused.Take(i)
					want := make([]byte, a.Bytes)
					if err := d.Read(want, a); err != nil {
						t.Fatal(err)
					}
					if c := (device.Cast{From: from, To: to}); from != to && queue.CanCast(c) {
						casts++
						mem, err := d.Alloc([]int64{a.Bytes / int64(from.Bits()/8) * int64(to.Bits()/8)})
						if err != nil {
							t.Fatal(err)
						}
						if err := q.CastAndWait(t.Context(), mem[0], a, from, to); err != nil {
							t.Fatal(err)
						}
						want = make([]byte, mem[0].Bytes)
						if err := d.Read(want, mem[0]); err != nil {
							t.Fatal(err)
						}
						mem[0].Release()
						from = to
					}
					bytesOf := make([]byte, b.Bytes)
					if err := d.Read(bytesOf, b); err != nil {
						t.Fatal(err)
					}
					if got != from || !bytes.Equal(bytesOf, want) {
						t.Errorf("%s %+v to %v: %s as %v differs", kind, spec, to,
							m.Index().Tensors[reqs[i].Tensor].Name, got)
					}
					a.Release()
					b.Release()
				}
				q.Close()
				plainly.Close()
				fused.Close()
				if casts == 0 {
					t.Errorf("%s to %v: nothing was cast", kind, to)
				}
			}
		}
	}
	_, m, _ := loadtest.WriteModel(t, save.Spec{}, "", 1<<19)
	for _, opt := range []load.Options{{Cast: "F7", Device: "cuda"}, {Cast: "F32"}} {
		if _, err := m.Start(nil, opt); !errors.Is(err, errs.ErrArgument) {
			t.Errorf("%+v: %v", opt, err)
		}
	}
}

// Files load over HTTP as from a disk, with any number of connections, even if connections break. The report contains
// the time spent waiting for responses.
func TestLoadOverHTTP(t *testing.T) {
	loadtest.UseEngine(t)
	for _, spec := range []save.Spec{{Compress: true, ChunkBytes: 128 << 10}, {}} {
		path, near, want := loadtest.WriteModel(t, spec, "llama-bf16", 24<<20)
		near.Close()
		s, err := serve.New(filepath.Dir(path), serve.Options{Faults: map[string]float64{"reset": 0.05, "short": 0.05,
			"503": 0.02}, Seed: 1})
		if err != nil {
			t.Fatal(err)
		}
		// Opening retries less than reading, so it may fail.
		opened := func(connections string) (m *load.Model) {
			access := format.Access{Options: source.Options{Storage: map[string]string{"connections": connections}}}
			for range 50 {
				if m, err = load.Open(t.Context(), load.Spec{URIs: []string{s.URL() + filepath.Base(path)},
					Storage: access}); err == nil {
					return m
				}
			}
			t.Fatal(err)
			return nil
		}
		m := opened("8")
		loadtest.LoadAll(t, m, want, 0)
		l, err := m.Start(nil, load.Options{Device: "cuda"})
		if err != nil {
			t.Fatal(err)
		}
		if err := loadtest.Finish(t, l); err != nil {
			t.Fatal(err)
		}
		if st := l.Job().Value().(load.Report).Stages; st.AnswerNS <= 0 || st.ReadNS <= 0 {
			t.Errorf("%+v", st)
		}
		l.Close()
		m.Close()
		for _, connections := range []string{"1", "64"} { // each has its own slot
			m := opened(connections)
			loadtest.LoadAll(t, m, want, 0)
			m.Close()
		}
		if n := s.Faults(); len(n) == 0 {
			t.Error("nothing failed")
		}
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	}
}
