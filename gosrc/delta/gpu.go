package delta

// This file applies and creates deltas on a GPU.

import (
	"context"

	"github.com/overwire/overwire/gosrc/codec/digest"
	"github.com/overwire/overwire/gosrc/device/cuda"
	"github.com/overwire/overwire/gosrc/device/cuda/stream"
)

// gpu applies deltas to tensors on a GPU. It queues all work on the stream of the first tensor.
type gpu struct {
	d      *cuda.Device
	on     stream.Order
	steps  []step
	chunks [][]stream.DeltaChunk // for each file of the chain
}

func (g *gpu) digestSteps(context.Context) ([]digest.Sum, error) {
	return g.d.Digest(g.on, viewsOf(g.steps), nil)
}

func (g *gpu) prepareSteps(context.Context) error {
	at := map[*File]int{}
	for i := range g.steps {
		for _, l := range g.steps[i].links {
			k, ok := at[l.file]
			if !ok {
				k = len(g.chunks)
				at[l.file] = k
				most := 0
				for i := range l.file.Tensors {
					most += len(l.file.Tensors[i].Chunks)
				}
				g.chunks = append(g.chunks, make([]stream.DeltaChunk, 0, most))
			}
			for n, c := range l.tensor.Chunks {
				if len(c) > 0 {
					g.chunks[k] = append(g.chunks[k], stream.DeltaChunk{Now: g.steps[i].At +
						uint64(n)*uint64(l.file.ChunkLen),
						Bytes: l.file.chunkLength(l.tensor, n), Width: widthOf(l.tensor.DType), Stored: c})
				}
			}
		}
	}
	for _, chunks := range g.chunks {
		if err := g.d.ReserveApply(chunks); err != nil {
			return err
		}
	}
	return nil
}

// apply applies the files in sequence. Their order does not matter, because XOR is commutative.
func (g *gpu) apply() error {
	for i, chunks := range g.chunks {
		if err := g.d.ApplyDelta(g.on, chunks); err != nil {
			for _, chunk := range g.chunks[:i] {
				if g.d.ApplyDelta(g.on, chunk) != nil {
					break
				}
			}
			return err
		}
	}
	return nil
}

// encodeGPU encodes the tensors in list, which are on one GPU.
func encodeGPU(ctx context.Context, f *File, number int, list []int, pair func(i int) *Pair,
	progress func(n int64)) error {
	d, err := cuda.Open(number)
	if err != nil {
		return err
	}
	on := stream.Order{Stream: pair(list[0]).Stream}
	var chunks []stream.DeltaChunk
	views := make([]digest.View, 0, 2*len(list))
	for _, i := range list {
		t, p := &f.Tensors[i], pair(i)
		for k := range t.Chunks {
			at := uint64(k) * uint64(f.ChunkLen)
			chunks = append(chunks, stream.DeltaChunk{Now: p.New + at, Base: p.Base + at, Bytes: f.chunkLength(t, k),
				Width: widthOf(t.DType)})
		}
		views = append(views, digest.Contiguous(p.New, t.Bytes), digest.Contiguous(p.Base, t.Bytes))
	}
	sums, err := d.Digest(on, views, nil)
	if err != nil {
		return err
	}
	if err := d.EncodeDelta(ctx, on, chunks, progress); err != nil {
		return err
	}
	for n, i := range list {
		t := &f.Tensors[i]
		t.New, t.Base = sums[2*n], sums[2*n+1]
		for k := range t.Chunks {
			t.Chunks[k] = chunks[k].Stored
		}
		chunks = chunks[len(t.Chunks):]
	}
	return nil
}
