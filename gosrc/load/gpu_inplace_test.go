package load_test

import (
	"bytes"
	"fmt"
	"testing"
	"time"

	"github.com/overwire/overwire/gosrc/load"
	"github.com/overwire/overwire/gosrc/load/loadtest"
	"github.com/overwire/overwire/gosrc/save"
	"github.com/overwire/overwire/gosrc/weights"
)

// Kernels that read in place give the same bytes as loads through staging memory. This holds for every kind of weights,
// for compressed, partitioned and plain files, for whole and sliced tensors, for casts, and for pinned models.
func TestInPlace(t *testing.T) {
	loadtest.UseEngine(t)
	for n, kind := range weights.Kinds() {
		if kind.Name == "moe-bf16" {
			continue // slow: it has as many tensors as a real model
		}
		for k, spec := range []save.Spec{{Compress: true, ChunkBytes: 64 << 10},
			{Compress: true, ChunkBytes: 64 << 10, Parts: 4}, {}, {Compress: true, Level: "smaller"}} {
			if testing.Short() && (n+k)%4 != 0 {
				continue
			}
			_, m, _ := loadtest.WriteModel(t, spec, kind.Name, 1<<18)
			reqs := loadtest.AskForParts(m)
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
				want, _ := loadtest.LoadParts(t, m, reqs, load.Options{Cast: way.cast}, 0)
				got, sums := loadtest.LoadParts(t, m, reqs, load.Options{Cast: way.cast, InPlace: true}, 0)
				loadtest.CompareParts(t, fmt.Sprintf("%s, %+v, %+v", kind.Name, spec, way), got, want, sums)
			}
			m.Close()
		}
	}
}

// Loads that read in place and loads through staging memory can run at the same time, and can use each other's queues
// afterwards.
func TestInPlaceNextToOtherLoads(t *testing.T) {
	loadtest.UseEngine(t)
	_, m, want := loadtest.WriteModel(t, save.Spec{Compress: true, ChunkBytes: 64 << 10}, "fp16", 2<<20)
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
			if err := loadtest.Finish(t, l); err != nil {
				t.Fatal(err)
			}
			for i, got := range loadtest.TakeBytes(t, l, 0) {
				if name := m.Index().Tensors[i].Name; !bytes.Equal(got, want[name].Data) {
					t.Errorf("load %d: %s differs", k, name)
				}
			}
			l.Close()
		}
	}
}

// An in-place load ends if it is closed at any moment, and the next load is correct.
func TestInPlaceCancel(t *testing.T) {
	loadtest.UseEngine(t)
	_, m, want := loadtest.WriteModel(t, save.Spec{Compress: true, ChunkBytes: 64 << 10}, "", 2<<20)
	for i := range 12 {
		l, err := m.Start(nil, load.Options{Device: "cuda:0", InPlace: true})
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Duration(i*i*40) * time.Microsecond)
		l.Close()
		_ = loadtest.Finish(t, l) // cancelled or finished
	}
	got, sums := loadtest.LoadParts(t, m, nil, load.Options{InPlace: true}, 0)
	all := make([][]byte, len(got))
	for i := range all {
		all[i] = want[m.Index().Tensors[i].Name].Data
	}
	loadtest.CompareParts(t, "after others", got, all, sums)
}
