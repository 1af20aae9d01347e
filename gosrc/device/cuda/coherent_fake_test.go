//go:build owfake

package cuda

import (
	"fmt"
	"testing"
	"unsafe"

	"github.com/overwire/overwire/gosrc/codec/x16"
	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/device/cuda/cudatest"
	"github.com/overwire/overwire/gosrc/device/cuda/memory"
	"github.com/overwire/overwire/gosrc/tensor"
)

// coherent makes tests open cuda:1, which is coherent, instead of cuda:0.
func coherent(t *testing.T) {
	t.Helper()
	ordinal = 1
	t.Cleanup(func() { ordinal = 0 })
}

// The queue suite passes on a coherent device. It has no staging memory, and its kernels read chunks in pinned memory.
// Kernels of the other device never read pinned memory.
func TestCoherent(t *testing.T) {
	for name, test := range map[string]func(*testing.T){
		"goldens": TestGoldens, "round trips": TestRoundTrips, "views": TestViews, "rounds": TestRounds, "corrupt": TestCorrupt,
		"refused": TestRefused, "workers": TestWorkers, "reshaped": TestQueueIsReshaped, "order": TestFollowStream,
	} {
		t.Run(name, func(t *testing.T) {
			coherent(t)
			test(t)
			if cudatest.BytesReadInPlace() == 0 {
				t.Error("no kernel has read pinned memory")
			}
		})
	}
	t.Run("casts", func(t *testing.T) { // in device memory
		coherent(t)
		TestCast(t)
	})
	t.Run("cancel", func(t *testing.T) {
		coherent(t)
		TestCancel(t)
	})
	t.Run("another device", func(t *testing.T) {
		TestRoundTrips(t)
		if n := cudatest.BytesReadInPlace(); n != 0 {
			t.Errorf("kernels have read %d bytes of pinned memory", n)
		}
	})
}

// A queue of a coherent device has no staging memory until StagingMemory is called. The memory is freed with the queue.
func TestCoherentStaging(t *testing.T) {
	coherent(t)
	d, l := open(t, 2, 1<<20)
	if n := cudatest.ReadState().Blocks; n != 0 {
		t.Errorf("a queue has %d allocations", n)
	}
	s, err := l.Get(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if s.ViewMirror() != nil {
		t.Error("a slot has a mirror without staging memory")
	}
	l.Put(s)
	if _, err := l.MeasureLink(1<<20, 3); err != nil {
		t.Error(err)
	}
	base, n, err := l.StagingMemory()
	if now := cudatest.ReadState(); err != nil || now.Blocks != 1 || now.Bytes != n || base == nil {
		t.Errorf("staging of %d bytes at %p: %v; %+v", n, base, err, now)
	}
	if s, err = l.Get(t.Context()); err != nil {
		t.Fatal(err)
	}
	if m := s.ViewMirror(); uintptr(m) < uintptr(base) || uintptr(m)+1<<20 > uintptr(base)+uintptr(n) {
		t.Errorf("the mirror at %p is outside the staging memory at %p", m, base)
	}
	l.Put(s)
	r := random(t)
	var p piece
	p.coded(weights(r, x16.BF16, 30_000), x16.BF16)
	p.run(t, d, l, 0) // kernels still read the chunks in place
	if cudatest.BytesReadInPlace() == 0 {
		t.Error("no kernel has read pinned memory")
	}
}

// Kernels read a slot that views registered memory in place, at any offset. Unaligned elements are cast from scratch
// memory.
func TestCoherentView(t *testing.T) {
	r := random(t)
	for _, index := range []int{0, 1} {
		t.Run(fmt.Sprint("cuda:", index), func(t *testing.T) {
			if index == 1 {
				coherent(t)
			}
			d, l := open(t, 2, 1<<20)
			m, err := memory.NewPages(memory.HugePage, nil)
			if err != nil {
				t.Fatal(err)
			}
			memory := unsafe.Slice((*byte)(m.P), m.N)
			if err := d.Register(memory); err != nil {
				t.Fatal(err)
			}
			for at := range 19 {
				var p piece
				if at%16 == 0 { // as in files
					p.coded(weights(r, x16.FP16, 20_000), x16.FP16)
				}
				for n := range 12 {
					p.raw(weights(r, x16.Bytes, 1+r.IntN(4000*(n%2)+9)))
				}
				// F16 elements become F32, at odd and even addresses.
				var half, single []byte
				for range 1 + r.IntN(5000) {
					half, single = append(half, 0, 0x3c), append(single, 0, 0, 0x80, 0x3f) // 1
				}
				k := len(p.jobs)
				p.add(half, tensor.Chunk{Codec: tensor.CodecRaw, Logical: uint32(len(half))}, nil, single)
				p.jobs[k].Cast = device.Cast{From: tensor.F16, To: tensor.F32}
				view := memory[4096+at:][:len(p.bytes)]
				copy(view, p.bytes)
				p.send(t, d, l, 0, func(s device.Slot) { s.View(view) })
			}
			gone := make(chan struct{})
			d.Unregister(memory, func() { close(gone) })
			<-gone
			m.Free()
		})
	}
}
