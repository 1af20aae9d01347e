package sleep

// This file has the two ways from a tensor's memory to the image: by the host's cores,
// and by a GPU.

import (
	"cmp"
	"runtime"
	"sync"
	"unsafe"

	"github.com/overwire/overwire/gosrc/codec/x16"
	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/device/cuda"
)

// batchRows is the most chunks of a batch.
const batchRows = 1024

// A way makes stored bytes in slots, whose calls come in the order encode, fetch, wait.
type way interface {
	// slots is how many batches may be under way, and how many goroutines make them.
	slots() (window, workers int)
	// batch bounds a batch: its bytes, each range rounded up to 16, and its ranges.
	batch() (bytes int64, rows int)
	// staging is the device memory that the way takes.
	staging() int64
	// sample gives n bytes at each address, in order.
	sample(at []uint64, n int64, got func(i int, b []byte)) error
	encode(slot int, rows []cuda.Packed) error
	fetch(slot int, rows []cuda.Packed) error
	wait(slot int, rows []cuda.Packed) error
	// close waits for what is under way. It may be called again.
	close()
}

// at is an address of the image.
func (s *sleeper) at(off int64) unsafe.Pointer {
	return unsafe.Pointer(unsafe.SliceData(s.mem.Bytes(off, 1)))
}

// host encodes on the host's cores.
type host struct {
	threads  int
	encoders sync.Pool
	out      [][]byte // by slot
}

func newHost(threads int) *host {
	h := &host{threads: cmp.Or(threads, runtime.GOMAXPROCS(0)), encoders: sync.Pool{New: func() any { return new(x16.Encoder) }}}
	h.out = make([][]byte, 2*h.threads+2)
	return h
}

func (h *host) slots() (window, workers int) { return len(h.out), h.threads }
func (h *host) batch() (int64, int)          { return chunkBytes, batchRows }
func (h *host) staging() int64               { return 0 }
func (h *host) close()                       {}

func (h *host) sample(at []uint64, n int64, got func(i int, b []byte)) error {
	for i, a := range at {
		got(i, device.Bytes(a, n))
	}
	return nil
}

func (h *host) encode(slot int, rows []cuda.Packed) error {
	e := h.encoders.Get().(*x16.Encoder)
	defer h.encoders.Put(e)
	out := h.out[slot][:0]
	for i := range rows {
		r := &rows[i]
		r.Stored, r.Tiles = r.N, 0
		if r.Transform == 0 {
			continue
		}
		if made, tiles, ok := e.Encode(out, device.Bytes(r.Src, r.N), r.Transform); ok && int64(len(made)-len(out)) < r.N {
			r.Stored, r.Tiles = int64(len(made)-len(out)), tiles
			out = made
		}
	}
	h.out[slot] = out
	return nil
}

func (h *host) fetch(int, []cuda.Packed) error { return nil }

func (h *host) wait(slot int, rows []cuda.Packed) error {
	out := h.out[slot]
	for i := range rows {
		r := &rows[i]
		to := unsafe.Slice((*byte)(r.To), r.Stored)
		if r.Tiles == 0 {
			copy(to, device.Bytes(r.Src, r.N))
			continue
		}
		out = out[copy(to, out):]
	}
	return nil
}

// gpu lets a GPU encode.
type gpu struct {
	*cuda.Packer
	once sync.Once
}

func newGPU(d *cuda.Device) (*gpu, error) {
	p, err := d.NewPacker()
	return &gpu{Packer: p}, err
}

func (g *gpu) slots() (window, workers int) { return g.Slots(), g.Slots() }
func (g *gpu) batch() (int64, int)          { return g.Slot(), batchRows }
func (g *gpu) staging() int64               { return g.Bytes() }
func (g *gpu) close()                       { g.once.Do(g.Close) }

func (g *gpu) sample(at []uint64, n int64, got func(i int, b []byte)) error {
	return g.Sample(at, n, got)
}

func (g *gpu) encode(slot int, rows []cuda.Packed) error { return g.Encode(slot, rows) }
func (g *gpu) fetch(slot int, rows []cuda.Packed) error  { return g.Fetch(slot, rows) }
func (g *gpu) wait(slot int, _ []cuda.Packed) error      { return g.Wait(slot) }
