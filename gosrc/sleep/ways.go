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
	"github.com/overwire/overwire/gosrc/load"
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
	encode(slot int, rows []cuda.Packed) error
	fetch(slot int, rows []cuda.Packed) error
	wait(slot int, rows []cuda.Packed) error
	// close waits for what is under way.
	close()
}

// A sampler gives n bytes of the tensors' memory at each address, in order.
type sampler func(at []uint64, n int64, got func(i int, b []byte)) error

// gpuOf opens a GPU by name; nil: it is the host's.
func gpuOf(name string) (*cuda.Device, error) {
	target, err := load.TargetOf(name)
	return target.GPU, err
}

// host encodes on the host's cores.
type host struct {
	threads  int
	encoders sync.Pool
	out      [][]byte // by slot
}

func newHost(threads int) *host {
	h := &host{threads: cmp.Or(threads, runtime.GOMAXPROCS(0)), encoders: sync.Pool{New: func() any {
		return new(x16.Encoder)
	}}}
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
		if chunk, tiles, ok := e.Encode(out, device.Bytes(r.Src, r.N), r.Transform); ok &&
			int64(len(chunk)-len(out)) < r.N {
			r.Stored, r.Tiles = int64(len(chunk)-len(out)), tiles
			out = chunk
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

// packer lets a GPU encode.
type packer struct {
	*cuda.Packer
	sums bool
}

func (p packer) slots() (window, workers int)             { return p.Slots(), p.Slots() }
func (p packer) batch() (int64, int)                      { return p.Slot(), batchRows }
func (p packer) staging() int64                           { return p.Bytes() }
func (p packer) close()                                   { p.Close() }
func (p packer) fetch(slot int, rows []cuda.Packed) error { return p.Fetch(slot, rows) }
func (p packer) wait(slot int, _ []cuda.Packed) error     { return p.Wait(slot) }

func (p packer) encode(slot int, rows []cuda.Packed) error {
	if p.sums {
		if err := p.Sum(slot, rows); err != nil {
			return err
		}
	}
	return p.Encode(slot, rows) // which waits, if there is something to encode, and so to hash
}
