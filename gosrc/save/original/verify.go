package original

// This file compares what a container keeps of its original with its tensors, without
// writing the original.

import (
	"context"
	"slices"

	"github.com/overwire/overwire/gosrc/internal/ordered"
	"github.com/overwire/overwire/gosrc/save/stored"
	"github.com/overwire/overwire/gosrc/tensor"
)

// Verify makes the original of source k of ix again, written nowhere, and compares its
// SHA-256, as Done does. progress is called with the bytes of tensors as they are
// hashed, by one goroutine at a time. Memory is bounded, whatever the file's size.
func (f *File) Verify(ctx context.Context, ix *tensor.Index, k, workers int, metadata map[string]string,
	progress func(n int64)) (*Copy, error) {
	known, bodies := map[string]*tensor.Tensor{}, map[string]*stored.Tensor{}
	cache := stored.NewCache(workers)
	for i := range ix.Tensors {
		t := &ix.Tensors[i]
		if int(t.Source) != k {
			continue
		}
		holder := t
		if t.Alias >= 0 {
			holder = &ix.Tensors[t.Alias]
		}
		known[t.Name], bodies[t.Name] = t, stored.New(f.src, ix, holder, cache)
	}
	p, err := f.Again(known, metadata, true)
	if err != nil {
		return nil, err
	}
	type run struct {
		body   *stored.Tensor
		off, n int64
	}
	var runs []run
	for i := range p.Tensors {
		t := known[p.Tensors[i].Name]
		step := bodies[t.Name].Step()
		for off := int64(0); off < t.Bytes; off += step {
			runs = append(runs, run{bodies[t.Name], off, min(step, t.Bytes-off)})
		}
	}
	bufs := make([][]byte, 3*workers+2)
	o := ordered.Tasks{N: len(runs), Window: len(bufs), Workers: workers,
		Work: func(_, k int) error {
			r, b := &runs[k], &bufs[k%len(bufs)]
			*b = slices.Grow((*b)[:0], int(r.n))[:r.n]
			return r.body.Fill(ctx, *b, r.off)
		},
		Turn: func(k int) error {
			p.AddBytes(bufs[k%len(bufs)])
			progress(runs[k].n)
			return nil
		},
	}
	if err := o.Run(ctx, "save.sha256"); err != nil {
		return nil, err
	}
	return p, p.Done()
}
