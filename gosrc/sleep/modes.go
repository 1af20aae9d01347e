package sleep

// This file compresses tensors for the in-memory container, on the host's cores or on a GPU.

import (
	"sync"
	"unsafe"

	"github.com/overwire/overwire/gosrc/codec/x16"
	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/device/cuda"
	"github.com/overwire/overwire/gosrc/device/cuda/stream"
	"github.com/overwire/overwire/gosrc/load"
)

// batchRows is the maximum number of chunks in a batch.
const batchRows = 1024

// A mode compresses chunks in slots. For each slot, the calls are encode, fetch and wait, in this order.
type mode struct {
	window, workers     int   // numbers of batches in flight and of goroutines that encode them
	bytes               int64 // bytes of a batch, with each range rounded up to 16
	staging             int64 // device memory in use
	gpu                 bool
	samples             sampler
	encode, fetch, wait func(slot int, rows []stream.PackedRange) error
	close               func() // waits for the last copies
}

// A sampler reads n bytes of the tensors' memory at each address, in order.
type sampler func(at []uint64, n int64, got func(i int, b []byte)) error

// gpuOf opens a GPU by name. It returns nil for the host.
func gpuOf(name string) (*cuda.Device, error) {
	target, err := load.TargetOf(name)
	return target.GPU, err
}

// host encodes on the host's cores.
type host struct {
	encoders sync.Pool
	out      [][]byte // indexed by slot
}

func hostMode(workers int) mode {
	h := &host{encoders: sync.Pool{New: func() any { return new(x16.Encoder) }}, out: make([][]byte, 2*workers+2)}
	return mode{
		window: len(h.out), workers: workers, bytes: chunkBytes, encode: h.encode, wait: h.wait, close: func() {},
		fetch: func(int, []stream.PackedRange) error { return nil },
		samples: func(at []uint64, n int64, got func(i int, b []byte)) error {
			for i, a := range at {
				got(i, device.Bytes(a, n))
			}
			return nil
		},
	}
}

func (h *host) encode(slot int, rows []stream.PackedRange) error {
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

func (h *host) wait(slot int, rows []stream.PackedRange) error {
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

// gpuMode returns the mode that encodes on a GPU. If sums is set, the GPU also computes sums for hashes.
func gpuMode(p *stream.Packer, sums bool) mode {
	return mode{
		window: p.SlotCount(), workers: p.SlotCount(), bytes: p.SlotBytes(), staging: p.DeviceBytes(), gpu: true,
		samples: p.CopySamples,
		fetch:   p.QueueFetches,
		wait:    func(slot int, _ []stream.PackedRange) error { return p.Wait(slot) }, close: p.Close,
		encode: func(slot int, rows []stream.PackedRange) error {
			if sums {
				if err := p.QueueSums(slot, rows); err != nil {
					return err
				}
			}
			return p.Encode(slot, rows) // also waits for the sums, which only encoded tensors have
		},
	}
}
