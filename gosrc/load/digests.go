package load

// This file computes digests of a model's tensors on a GPU.

import (
	"context"
	"fmt"

	"github.com/overwire/overwire/gosrc/codec/digest"
	"github.com/overwire/overwire/gosrc/device/cpu"
	"github.com/overwire/overwire/gosrc/device/cuda"
	"github.com/overwire/overwire/gosrc/device/cuda/stream"
)

// digestBytes limits how much of a model Digests loads onto the GPU at a time. A larger tensor is still loaded whole.
const digestBytes = 256 << 20

// Digests loads tensors onto a GPU in batches and computes their digests there. It frees the memory after each
// batch. It reads a tensor only once even if it has aliases. done gets each tensor's number and digest. The error is
// errs.ErrMemory if the GPU has no space for the next batch.
func (m *Model) Digests(ctx context.Context, gpu int, tensors []int, done func(i int, sum digest.Sum)) error {
	d, err := cuda.Open(gpu)
	if err != nil {
		return err
	}
	names := map[int][]int{} // keyed by the tensor that holds the bytes
	var holders []int
	for _, i := range tensors {
		holder := i
		if a := m.ix.Tensors[i].Alias; a >= 0 {
			holder = int(a)
		}
		if names[holder] == nil {
			holders = append(holders, holder)
		}
		names[holder] = append(names[holder], i)
	}
	for len(holders) > 0 {
		n, size := 0, int64(0)
		for n < len(holders) && (n == 0 || size+m.ix.Tensors[holders[n]].Bytes <= digestBytes) {
			size += m.ix.Tensors[holders[n]].Bytes
			n++
		}
		sums, err := m.digestBatch(ctx, d, gpu, holders[:n])
		if err != nil {
			return err
		}
		for k, sum := range sums {
			for _, i := range names[holders[k]] {
				done(i, sum)
			}
		}
		holders = holders[n:]
	}
	return nil
}

func (m *Model) digestBatch(ctx context.Context, d *cuda.Device, gpu int, tensors []int) ([]digest.Sum, error) {
	mem, err := m.LoadWhole(ctx, tensors, Options{Device: fmt.Sprintf("cuda:%d", gpu)})
	if err != nil {
		return nil, err
	}
	defer cpu.Release(mem)
	views := make([]digest.View, len(tensors))
	for k, i := range tensors {
		views[k] = digest.Contiguous(uint64(uintptr(mem[k].Ptr)), m.ix.Tensors[i].Bytes)
	}
	return d.Digest(stream.Order{}, views)
}
