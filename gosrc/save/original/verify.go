package original

// This file checks that a container can restore its original, without writing the original.

import (
	"context"

	"github.com/overwire/overwire/gosrc/stored"
	"github.com/overwire/overwire/gosrc/tensor"
)

// Verify restores the original f of source k of a model without writing it, and compares its
// SHA-256 as Done does. It calls progress with the number of tensor bytes hashed, from one
// goroutine at a time. Memory use does not depend on the file's size.
func Verify(ctx context.Context, f *File, m *stored.Model, k, workers int, progress func(n int64)) (*Copy, error) {
	known, numbers := map[string]*tensor.Tensor{}, map[string]int{}
	for i := range m.Index.Tensors {
		if t := &m.Index.Tensors[i]; int(t.Source) == k {
			known[t.Name], numbers[t.Name] = t, i
		}
	}
	p, err := f.Again(known, m.Metadata(k), true)
	if err != nil {
		return nil, err
	}
	readers := m.Readers(stored.NewCache(workers))
	var spans []stored.Span
	for i := range p.Tensors {
		t := known[p.Tensors[i].Name]
		spans = stored.AppendSpans(spans, readers[numbers[t.Name]], i, t.Bytes)
	}
	err = stored.ReadInOrder(ctx, "save.sha256", workers, spans, nil, func(k int, b []byte) error {
		p.AddBytes(b)
		progress(spans[k].N)
		return nil
	})
	if err != nil {
		return nil, err
	}
	return p, p.Done()
}
