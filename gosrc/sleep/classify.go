package sleep

// This file decides from samples how each tensor is stored, estimates its size, and compresses it on the host's cores
// or on a GPU.

import (
	"cmp"
	"slices"
	"sync"
	"unsafe"

	"github.com/overwire/overwire/gosrc/codec/blocksum"
	"github.com/overwire/overwire/gosrc/codec/x16"
	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/device/cuda"
	"github.com/overwire/overwire/gosrc/device/cuda/stream"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/load"
	"github.com/overwire/overwire/gosrc/tensor"
)

// chunkBytes is the chunk size of files; tests use a smaller one.
var chunkBytes int64 = 1 << 20

const (
	// minCoded is the minimum size of tensors to compress. The tables of smaller tensors
	// cost as much as compression saves.
	minCoded = 8 << 10
	// minGain is the ratio of a sample above which a tensor is stored uncompressed.
	minGain = 0.99

	sampleRuns  = 4
	sampleBytes = 16 << 10
	// sampled is how many of the largest tensors are sampled to estimate the memory.
	// Tensors with several possible transforms are always sampled.
	sampled = 96
)

type item struct {
	Tensor
	transform uint8
	alias     int     // 1 + the number of the item with the same memory; 0 means none
	expect    float64 // expected stored / logical bytes
	known     bool    // expect comes from a sample
	sums      blocksum.State
}

func (t *item) addressOf() uint64 { return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(t.Data)))) }

// classifyTensors finds aliases, chooses transforms and counts the tensors in the report.
func classifyTensors(in []Tensor, samples sampler, rep *Report) ([]item, error) {
	type memory struct {
		at, n uint64
		dtype tensor.DType
	}
	first := map[memory]int{}
	items := make([]item, len(in))
	for i := range in {
		t := &items[i]
		*t = item{Tensor: in[i], expect: 1}
		n, err := tensor.Size(t.DType, t.Shape)
		if err == nil && n != int64(len(t.Data)) {
			err = errs.New(errs.ErrArgument, "shape %v of %v takes %d bytes, but got %d", t.Shape, t.DType, n,
				len(t.Data))
		}
		if err != nil {
			return nil, errs.Locate("sleep", "", t.Name, -1, err)
		}
		rep.Tensors++
		if n == 0 {
			continue
		}
		key := memory{t.addressOf(), uint64(n), t.DType}
		if k, ok := first[key]; ok {
			t.alias = 1 + k
			rep.Aliases++
			continue
		}
		first[key] = i
		rep.Bytes += n
		if tr := transformsOf(t.DType); len(tr) > 0 && n >= minCoded && t.addressOf()%16 == 0 {
			t.transform = tr[0]
		}
	}
	if err := estimateSizes(items, samples); err != nil {
		return nil, err
	}
	for i := range items {
		if items[i].transform != 0 {
			rep.Compressed++
		}
	}
	return items, nil
}

// transformsOf returns the transforms that may shrink a dtype.
func transformsOf(d tensor.DType) []uint8 {
	all := x16.TransformsFor(d)
	if i := slices.Index(all, 0); i >= 0 {
		all = slices.Delete(slices.Clone(all), i, i+1)
	}
	return all
}

// estimateSizes chooses transforms and estimates the stored size of tensors. For a tensor without a sample, it uses the
// samples of other tensors with the same dtype.
func estimateSizes(items []item, samples sampler) error {
	var sample, rest []*item
	for i := range items {
		t := &items[i]
		choice := len(transformsOf(t.DType)) > 1
		switch {
		case t.transform == 0:
		case len(t.Data) < sampleRuns*sampleBytes:
			if choice {
				t.transform = 0 // not worth it
			}
		case choice:
			sample = append(sample, t)
		default:
			rest = append(rest, t)
		}
	}
	slices.SortStableFunc(rest, func(a, b *item) int { return cmp.Compare(len(b.Data), len(a.Data)) })
	sample = append(sample, rest[:min(len(rest), sampled)]...)
	var at []uint64
	for _, t := range sample {
		for r := range int64(sampleRuns) {
			off := (int64(len(t.Data)) - sampleBytes) / (sampleRuns - 1) * r
			at = append(at, t.addressOf()+uint64(off&^255)) // whole elements of any size
		}
	}
	buf := make([]byte, 0, sampleRuns*sampleBytes)
	err := samples(at, sampleBytes, func(i int, b []byte) {
		if buf = append(buf, b...); i%sampleRuns == sampleRuns-1 {
			sample[i/sampleRuns].takeSample(buf)
			buf = buf[:0]
		}
	})
	if err != nil {
		return err
	}
	type sum struct{ stored, bytes float64 }
	sums := map[tensor.DType]sum{}
	for _, t := range sample {
		n := sums[t.DType]
		sums[t.DType] = sum{n.stored + t.expect*float64(len(t.Data)), n.bytes + float64(len(t.Data))}
	}
	for i := range items {
		t := &items[i]
		if n := sums[t.DType]; t.transform != 0 && !t.known && n.bytes > 0 {
			t.expect = n.stored / n.bytes
		}
	}
	return nil
}

// takeSample chooses the transform that shrinks a sample the most.
func (t *item) takeSample(sample []byte) {
	t.transform, t.expect, t.known = 0, 1, true
	for _, tr := range transformsOf(t.DType) {
		if e := x16.Estimate(sample, tr); e < minGain && e < t.expect {
			t.transform, t.expect = tr, e
		}
	}
}

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
