//go:build owfake

package cuda

import (
	"testing"
	"unsafe"

	"github.com/overwire/overwire/gosrc/codec/digest"
	"github.com/overwire/overwire/gosrc/device/cuda/cudatest"
	"github.com/overwire/overwire/gosrc/device/cuda/memory"
	"github.com/overwire/overwire/gosrc/device/cuda/stream"
)

// A digest is computed after the work queued on the caller's stream and on the streams that it waits for.
func TestDigestOrder(t *testing.T) {
	d := begun(t)
	mem, err := d.Alloc([]int64{1 << 16})
	if err != nil {
		t.Fatal(err)
	}
	defer mem[0].Release()
	first, err := d.NewStream()
	if err != nil {
		t.Fatal(err)
	}
	second, err := d.NewStream()
	if err != nil {
		t.Fatal(err)
	}
	views := []digest.View{digest.Contiguous(uint64(uintptr(mem[0].Ptr)), 1<<16)}
	for v, on := range map[byte]stream.Order{1: {Stream: first}, 2: {Stream: second, After: []uintptr{first}},
		3: {Stream: 1, After: []uintptr{second, first}}} {
		cudatest.QueueFill(mem[0].Ptr, mem[0].Bytes, v, first)
		got, err := d.Digest(on, views, nil)
		if err != nil {
			t.Fatal(err)
		}
		want := make([]byte, 1<<16)
		for i := range want {
			want[i] = v
		}
		if got[0] != digest.Of(want) {
			t.Errorf("%+v: got the digest of the old bytes", on)
		}
	}
	for _, s := range []uintptr{first, second} {
		if err := d.FreeStream(s); err != nil {
			t.Error(err)
		}
	}
}

// If any driver call fails, Digest returns an error or the right digest, nothing leaks, and the next digest is right.
// The tables of a digest grow and are freed.
func TestDigestFailures(t *testing.T) {
	d := begun(t)
	mem, err := d.Alloc([]int64{1 << 12})
	if err != nil {
		t.Fatal(err)
	}
	defer mem[0].Release()
	view := digest.Contiguous(uint64(uintptr(mem[0].Ptr)), 1<<12)
	want := digest.Of(unsafe.Slice((*byte)(mem[0].Ptr), 1<<12))
	check := func(n int) bool {
		views := make([]digest.View, n)
		for i := range views {
			views[i] = view
		}
		got, err := d.Digest(stream.Order{Stream: 1}, views, nil)
		if err == nil && (got[0] != want || got[n-1] != want) {
			t.Error("a wrong digest without an error")
		}
		return err == nil
	}
	for nth, good := int64(1), false; !good; nth++ {
		cudatest.FailCall(nth, 999, false)
		good = check(1)
		cudatest.FailCall(0, 0, false)
		if !check(1) {
			t.Fatalf("the digest after failed call %d is wrong", nth)
		}
		if err := d.Trim(); err != nil {
			t.Fatal(err)
		}
		if nth > 200 {
			t.Fatal("Digest always fails")
		}
	}
	if many := memory.HugePage / 48; !check(many) || !check(1) {
		t.Error("wrong digests of many tensors")
	}
}
