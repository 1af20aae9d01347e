//go:build owfake

package sleep

import (
	"path/filepath"
	"slices"
	"testing"
	"unsafe"

	"github.com/overwire/overwire/gosrc/codec/digest"
	"github.com/overwire/overwire/gosrc/device/cuda"
	"github.com/overwire/overwire/gosrc/device/cuda/stream"
	"github.com/overwire/overwire/gosrc/device/pinned"
	"github.com/overwire/overwire/gosrc/hoststore"
	"github.com/overwire/overwire/gosrc/job"
	"github.com/overwire/overwire/gosrc/knob"
)

// Tensors of a GPU that the host store has need no pinned memory, and wake from the store's memory after it has ended.
// Changed ones are compressed. The model loads both.
func TestSharedFake(t *testing.T) {
	smaller(t)
	defer ended(t, cuda.Fake(64<<20))()
	d, err := cuda.Open(0)
	if err != nil {
		t.Fatal(err)
	}
	socket := filepath.Join(t.TempDir(), "s")
	t.Cleanup(func() { knob.Load(nil) })
	knob.Load(map[string]string{"OVERWIRE_HOST": socket})
	store, err := hoststore.Listen(hoststore.Options{Socket: socket, Budget: 1 << 30})
	if err != nil {
		t.Fatal(err)
	}
	defer store.Close()
	host := slices.DeleteFunc(several(random(t), 90_000), func(x Tensor) bool { return x.Name == "tied" || x.Name == "e" })
	in, free := onGPU(t, d, host)
	defer free()
	spec := Spec{Device: "cuda:0"}
	sums := func() {
		t.Helper()
		var views []digest.View
		for _, x := range in {
			views = append(views, digest.Contiguous(uint64(uintptr(unsafe.Pointer(&x.Data[0]))), int64(len(x.Data))))
		}
		all, err := d.Digest(stream.Order{}, views, digest.ProcessKey())
		if err != nil {
			t.Fatal(err)
		}
		spec.Digests = nil
		for _, sum := range all {
			spec.Digests = append(spec.Digests, sum.String())
		}
	}
	sums()
	for k := range 2 {
		j := job.New("sleep")
		rep, err := KeepOnHost(t.Context(), j, spec, in)
		if err != nil || rep.Tensors != len(in) || rep.Shared == 0 || rep.Stored != 0 || j.Bytes.Load() != rep.Bytes {
			t.Fatalf("%d: %+v, %d, %v", k, rep, j.Bytes.Load(), err)
		}
		if pinned.Ready(d) != 0 {
			t.Error("memory stays pinned")
		}
	}
	m, rep, err := Sleep(t.Context(), job.New("sleep"), spec, in)
	if err != nil || rep.Stored != 0 || rep.Shared == 0 || rep.Staging != 0 {
		t.Fatalf("%+v, %v", rep, err)
	}
	for i := range in[:2] {
		in[i].Data[0] ^= 1
	}
	sums()
	both, rep, err := Sleep(t.Context(), job.New("sleep"), spec, in)
	if err != nil || rep.Stored == 0 || rep.Shared == 0 || rep.Tensors != len(in) {
		t.Fatalf("%+v, %v", rep, err)
	}
	store.Close()
	same(t, both, "cuda:0", in)
	both.Close()
	for i := range in[:2] {
		in[i].Data[0] ^= 1
	}
	same(t, m, "cuda:0", in)
	m.Close()
}
