//go:build cgo

package cuda_test

import (
	"bytes"
	"fmt"
	"testing"
	"time"

	"github.com/overwire/overwire/gosrc/codec/digest"
	"github.com/overwire/overwire/gosrc/device/cuda"
	"github.com/overwire/overwire/gosrc/load"
	"github.com/overwire/overwire/gosrc/plan"
	"github.com/overwire/overwire/gosrc/save"
	"github.com/overwire/overwire/gosrc/weights"
)

// parted asks for every tensor, whole, and for rows and columns of those that have some.
func parted(m *load.Model) (reqs []load.Request) {
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

// landed loads and gives the bytes and, by the device, the digests of what has landed.
func landed(t *testing.T, m *load.Model, reqs []load.Request, opt load.Options, index int) (all [][]byte, sums []digest.Sum) {
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
	if err := finish(t, l); err != nil {
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
	if sums, err = d.Digest(cuda.Order{Stream: 1}, views); err != nil {
		t.Fatal(err)
	}
	return all, sums
}

// same compares what two ways of loading gave, and the digests with the bytes.
func same(t *testing.T, what string, got, want [][]byte, sums []digest.Sum) {
	t.Helper()
	for i := range want {
		if !bytes.Equal(got[i], want[i]) {
			t.Errorf("%s: request %d differs", what, i)
		} else if sums[i] != digest.Of(want[i]) {
			t.Errorf("%s: request %d has another digest", what, i)
		}
	}
}

// What kernels read in place is what they read in the staging, byte for byte: of every
// kind, packed, parted and plain, whole and in part, cast, and out of pinned memory.
func TestInPlace(t *testing.T) {
	engine(t)
	for n, kind := range weights.Kinds() {
		if kind.Name == "moe-bf16" {
			continue // as many tensors as a real one: bf16 like the first
		}
		for k, spec := range []save.Spec{{Compress: true, ChunkBytes: 64 << 10}, {Compress: true, ChunkBytes: 64 << 10, Parts: 4}, {}, {Compress: true, Level: "smaller"}} {
			if testing.Short() && (n+k)%4 != 0 {
				continue
			}
			_, m, _ := written(t, spec, kind.Name, 1<<18)
			reqs := parted(m)
			cast := []string{"BF16", "F32"}[n%2]
			for _, way := range []struct {
				pinned bool
				cast   string
			}{{false, ""}, {false, cast}, {true, ""}, {true, cast}} {
				if way.pinned && way.cast == "" {
					j, err := m.Pin(load.Options{})
					if err != nil {
						t.Fatal(err)
					}
					if _, err := j.Wait(-1); err != nil {
						t.Fatal(err)
					}
				}
				want, _ := landed(t, m, reqs, load.Options{Cast: way.cast}, 0)
				got, sums := landed(t, m, reqs, load.Options{Cast: way.cast, InPlace: true}, 0)
				same(t, fmt.Sprintf("%s, %+v, %+v", kind.Name, spec, way), got, want, sums)
			}
			m.Close()
		}
	}
}

// Loads that read in place and loads that do not run at once, each on a queue of its own
// or on one that the other kind had before.
func TestInPlaceBesideOthers(t *testing.T) {
	engine(t)
	_, m, want := written(t, save.Spec{Compress: true, ChunkBytes: 64 << 10}, "fp16", 2<<20)
	for range 3 {
		var loads []*load.Loading
		for i := range 4 {
			l, err := m.Start(nil, load.Options{Device: "cuda:0", InPlace: i%2 == 0, Stream: 1})
			if err != nil {
				t.Fatal(err)
			}
			loads = append(loads, l)
		}
		for k, l := range loads {
			if err := finish(t, l); err != nil {
				t.Fatal(err)
			}
			for i, got := range take(t, l, 0) {
				if name := m.Index().Tensors[i].Name; !bytes.Equal(got, want[name].Data) {
					t.Errorf("load %d: %s differs", k, name)
				}
			}
			l.Close()
		}
	}
}

// A load in place that is closed at any moment ends, and the next one is exact.
func TestInPlaceCancel(t *testing.T) {
	engine(t)
	_, m, want := written(t, save.Spec{Compress: true, ChunkBytes: 64 << 10}, "", 2<<20)
	for i := range 12 {
		l, err := m.Start(nil, load.Options{Device: "cuda:0", InPlace: true})
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Duration(i*i*40) * time.Microsecond)
		l.Close()
		_ = finish(t, l) // cancelled, or done before
	}
	got, sums := landed(t, m, nil, load.Options{InPlace: true}, 0)
	all := make([][]byte, len(got))
	for i := range all {
		all[i] = want[m.Index().Tensors[i].Name].Data
	}
	same(t, "after others", got, all, sums)
}
