//go:build owfake

package cuda

import (
	"bytes"
	"errors"
	"testing"
	"unsafe"

	"github.com/overwire/overwire/gosrc/codec/blocksum"
	"github.com/overwire/overwire/gosrc/device/cuda/cudatest"
	"github.com/overwire/overwire/gosrc/device/cuda/stream"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/zeebo/xxh3"
)

// The kernel's sums and tails give the hash of any tensor while its bytes are encoded in chunks, even if the last chunk
// is shorter than a stripe.
func TestSumFake(t *testing.T) {
	end := Fake(64 << 20)
	d, err := Open(0)
	if err != nil {
		t.Fatal(err)
	}
	r := random(t)
	p, err := d.NewPacker(true)
	if err != nil {
		t.Fatal(err)
	}
	const chunk = 8192
	for _, n := range []int{8, 240, 241, 1000, 1024, 1025, 8191, 8192, 8200, 8192 + 63, 3 * chunk,
		50_000 + r.IntN(1000)} {
		mem, err := d.Alloc([]int64{int64(n)})
		if err != nil {
			t.Fatal(err)
		}
		data := mem[0].Slice()
		for i := range data {
			data[i] = byte(r.Uint32())
		}
		var rows []stream.PackedRange
		for off := 0; off < n; off += chunk {
			one := stream.PackedRange{Src: uint64(uintptr(unsafe.Pointer(&data[off]))), N: int64(min(chunk, n-off)),
				Transform: 1, Hash: true}
			if off+chunk >= n {
				one.Tail = blocksum.Tail(int64(n))
			}
			rows = append(rows, one)
		}
		slot := r.IntN(p.SlotCount())
		if err := p.QueueSums(slot, rows); err != nil {
			t.Fatal(err)
		}
		if err := p.Encode(slot, rows); err != nil {
			t.Fatal(err)
		}
		if err := p.Wait(slot); err != nil {
			t.Fatal(err)
		}
		s := blocksum.New(int64(n))
		var tail []byte
		for i := range rows {
			var sums []byte
			sums, tail = rows[i].SumsAndTail()
			s.Add(sums)
		}
		want := xxh3.Hash128(data)
		if high, low, ok := s.Finish(tail); !ok || high != want.Hi || low != want.Lo ||
			!bytes.Equal(tail, data[n-len(tail):]) {
			t.Errorf("%d bytes: %x %x (%v), want %x %x", n, high, low, ok, want.Hi, want.Lo)
		}
		mem[0].Release()
	}
	p.Close()
	if left := end(); left != "" {
		t.Errorf("leaked: %s", left)
	}
}

// If the driver denies access to the context several times, Wait tries again. When Wait returns, even with an error,
// the slot's work has ended.
func TestPackerOfASilentDriver(t *testing.T) {
	end := Fake(64 << 20)
	d, err := Open(0)
	if err != nil {
		t.Fatal(err)
	}
	p, err := d.NewPacker(true)
	if err != nil {
		t.Fatal(err)
	}
	mem, err := d.Alloc([]int64{1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	rows := []stream.PackedRange{{Src: uint64(uintptr(mem[0].Ptr)), N: 8192, Transform: 1, Hash: true}}
	if err := p.QueueSums(0, rows); err != nil || cudatest.ReadState().Pending == 0 {
		t.Fatalf("no work is queued, so this test is inconclusive (%v)", err)
	}
	cudatest.RefuseContext(20)
	if err := p.Wait(0); !errors.Is(err, errs.ErrDevice) || cudatest.ReadState().Pending != 0 {
		t.Errorf("%v, with %d pending operations", err, cudatest.ReadState().Pending)
	}
	mem[0].Release()
	p.Close()
	if left := end(); left != "" {
		t.Errorf("leaked: %s", left)
	}
}
