package cuda

import (
	"runtime"
	"testing"
	"unsafe"

	"github.com/overwire/overwire/gosrc/codec/codectest"
	"github.com/overwire/overwire/gosrc/codec/digest"
	"github.com/overwire/overwire/gosrc/device/cuda/stream"
)

// The GPU's digests equal the CPU's, for contiguous tensors of every length and alignment and for strided tensors. One
// launch computes many digests. The first digest loads the module.
func TestDigest(t *testing.T) {
	d, l := open(t, 2, 1<<20)
	r := random(t)
	data := make([]byte, 1<<20)
	for i := range data {
		data[i] = byte(r.Uint32())
	}
	defer runtime.KeepAlive(data) // views hold only addresses
	mem := upload(t, d, l, data)
	moved := func(v digest.View) digest.View {
		if v.Address != 0 {
			v.Address += uint64(uintptr(mem.Ptr)) - uint64(uintptr(unsafe.Pointer(&data[0])))
		}
		return v
	}
	var host, views []digest.View
	add := func(v digest.View) { host, views = append(host, v), append(views, moved(v)) }
	for range 300 {
		v, _ := codectest.AnyView(r, data)
		add(v)
	}
	for n := range 40 {
		add(digest.Contiguous(uint64(uintptr(unsafe.Pointer(&data[r.IntN(64)]))), int64(n)))
		add(digest.Contiguous(uint64(uintptr(unsafe.Pointer(&data[r.IntN(64)]))), r.Int64N(30000)))
		add(digest.Contiguous(uint64(uintptr(unsafe.Pointer(&data[16*r.IntN(64)]))), r.Int64N(30000)))
	}
	add(digest.Contiguous(uint64(uintptr(unsafe.Pointer(&data[0]))), int64(len(data))))
	for _, key := range []*digest.Key{nil, digest.NewKey()} {
		want, err := digest.All(t.Context(), host, 1, key)
		if err != nil {
			t.Fatal(err)
		}
		for _, n := range []int{1, len(views)} {
			got, err := d.Digest(stream.Order{Stream: 1}, views[:n], key)
			if err != nil {
				t.Fatal(err)
			}
			for i := range got {
				if got[i] != want[i] {
					t.Errorf("%+v: %v, want %v with key %v", host[i], got[i], want[i], key)
				}
			}
		}
	}
	if got, err := d.Digest(stream.Order{Stream: 1}, []digest.View{{Item: 2, Shape: []int64{0},
		Strides: []int64{2}}}, nil); err != nil || got[0] != digest.Of(nil) {
		t.Error(got, err)
	}
	wrong := []digest.View{{Address: views[0].Address, Item: 5}}
	if _, err := d.Digest(stream.Order{Stream: 1}, wrong, nil); err == nil {
		t.Error("elements of 5 bytes were accepted")
	}
}
