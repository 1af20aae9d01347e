package load

// This file holds the stored bytes of a pinned model in host memory.

import (
	"cmp"
	"context"
	"sync"
	"unsafe"

	"github.com/overwire/overwire/gosrc/device/cpu"
	"github.com/overwire/overwire/gosrc/device/cuda"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/crc32c"
	"github.com/overwire/overwire/gosrc/internal/spawn"
	"github.com/overwire/overwire/gosrc/job"
	"github.com/overwire/overwire/gosrc/plan"
)

// pinned is the memory of a pinned model, by source.
type pinned struct {
	bytes [][]byte

	mu         sync.Mutex
	gpu        *cuda.Device // the GPU through which the memory is registered; nil before registration
	registered int          // how many elements of bytes are registered
}

// A PinReport is the memory and time that pinning took.
type PinReport struct {
	Bytes   int64   `json:"bytes"` // size of the host memory
	Seconds float64 `json:"seconds"`
}

// readAll reads every source into memory and compares the checksums of all chunks.
func (p *pinned) readAll(ctx context.Context, j *job.Job, m *Model, threads int) error {
	type part struct {
		source int
		off, n int64
	}
	var parts []part
	const step = 4 << 20
	for i, s := range m.srcs {
		size := s.Size()
		base, length, err := cpu.Map(size)
		if err != nil {
			return m.LocateError("stage", err)
		}
		p.bytes = append(p.bytes, unsafe.Slice((*byte)(base), length)[:size]) // the capacity is the mapping's length
		for off := int64(0); off < size; off += step {
			parts = append(parts, part{i, off, min(step, size-off)})
		}
		j.TotalBytes.Add(size)
	}
	j.TotalTensors.Store(int64(len(m.ix.Tensors)))
	mc := m.Machine(false, threads, false)
	cores := cmp.Or(mc.Threads, mc.Cores)
	reading, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	err := spawn.Each(reading, "pin", cmp.Or(mc.Threads, max(cores, plan.Feeders)), len(parts), func(i int) error {
		x := parts[i]
		if err := m.srcs[x.source].ReadAt(reading, p.bytes[x.source][x.off:x.off+x.n], x.off); err != nil {
			cancel(err) // only the first error counts
			return err
		}
		j.Bytes.Add(x.n)
		return nil
	})
	if err == nil {
		err = m.Uncut()
	}
	if err != nil {
		return err
	}
	return spawn.Each(ctx, "pin", cores, len(m.ix.Tensors), func(i int) error {
		j.Tensors.Add(1)
		return p.compareSums(m, i)
	})
}

// compareSums compares the checksums of a tensor's chunks.
func (p *pinned) compareSums(m *Model, i int) error {
	t := &m.held.Tensors[i]
	for k, c := range m.held.Chunks[t.First : t.First+t.Count] {
		if sum := crc32c.Sum(p.bytes[t.Source][c.Off : c.Off+int64(c.Stored)]); sum != c.Sum {
			return &errs.At{Verb: "check", Source: m.ix.Sources[t.Source].URI, Tensor: t.Name, Chunk: int64(k),
				Offset: c.Off, Err: errs.NewMismatch(c.Sum, sum)}
		}
	}
	return nil
}

// register registers the memory for all GPUs, through the first GPU that needs it. After an error, the memory
// registered so far stays registered, and the next call continues from there.
func (p *pinned) register(m *Model, gpu *cuda.Device) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.gpu = cmp.Or(p.gpu, gpu)
	for ; p.registered < len(p.bytes); p.registered++ {
		if err := p.gpu.Register(p.bytes[p.registered]); err != nil {
			return m.LocateError("stage", err)
		}
	}
	return nil
}

// freeSource unregisters and frees the memory of a source. No copy from it may be in flight.
func (p *pinned) freeSource(i int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if b := p.bytes[i]; i < p.registered {
		p.gpu.Unregister(b, func() { unmapBytes(b) })
	} else {
		unmapBytes(b)
	}
}

func unmapBytes(b []byte) { cpu.Unmap(unsafe.Pointer(unsafe.SliceData(b)), int64(cap(b))) }
