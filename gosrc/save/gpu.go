package save

// This file encodes tensors on the GPUs that hold them. Batches of chunks go through the slots of a stream.Packer. Its
// kernels encode them and compute sums for their hashes. Only stored bytes are copied to the host, into pinned memory,
// and are written from there. The resulting file is the same as if the host encoded it.

import (
	"bytes"
	"context"
	"errors"
	"time"

	"github.com/overwire/overwire/gosrc/codec"
	"github.com/overwire/overwire/gosrc/codec/blocksum"
	"github.com/overwire/overwire/gosrc/codec/digest"
	"github.com/overwire/overwire/gosrc/codec/x16"
	"github.com/overwire/overwire/gosrc/device/cuda"
	"github.com/overwire/overwire/gosrc/device/cuda/stream"
	"github.com/overwire/overwire/gosrc/device/pinned"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/format/overwire"
	"github.com/overwire/overwire/gosrc/internal/sizes"
	"github.com/overwire/overwire/gosrc/save/publish"
	"github.com/overwire/overwire/gosrc/tensor"
	"github.com/zeebo/xxh3"
)

const (
	batchRows = 1024 // maximum number of chunks in a batch and in a Packer's slot
	// leastFileSlots is the minimum number of slots for a file: one each to encode, copy and write a batch.
	leastFileSlots = 3
	// sampledAhead is the maximum number of tensors with samples that are read in advance.
	sampledAhead = 1024
)

// leastOnGPU is the minimum total size of the tensors on a GPU for the GPU to encode them. Below that size, the host
// encodes them, which needs no GPU memory. Tests make it smaller.
var leastOnGPU int64 = 32 << 20

// A gpu encodes the tensors of a save that are on one GPU.
type gpu struct {
	*stream.Packer
	on   *cuda.Device
	ring *pinned.Memory // stored bytes of each slot, unless the save is staged
	room int64          // bytes per slot in ring
}

// isEncodable reports whether a GPU may encode a tensor. Column parts and level "smaller" need the bytes on the host.
func isEncodable(spec *Spec, t *Item) bool {
	a, ok := t.body.(*deviceBody)
	return ok && a.GPU != nil && t.bytes > 0 && spec.Parts == 1 && spec.Level != levelSmaller &&
		(!spec.Compress || a.Addr%16 == 0)
}

// gpuGroup holds the GPUs of one save, and which GPU encodes which tensor.
type gpuGroup struct {
	all []*gpu
	of  map[*Item]*gpu
}

// open lets GPUs encode the tensors that are on them. If a GPU has too little memory, the host encodes its tensors. The
// caller must close the group, even after an error.
func (p *gpuGroup) open(spec *Spec, items []*Item) error {
	p.of = map[*Item]*gpu{}
	all := map[*cuda.Device][]*Item{}
	total := map[*cuda.Device]int64{}
	for _, t := range items {
		if isEncodable(spec, t) {
			d := t.body.(*deviceBody).GPU
			all[d] = append(all[d], t)
			total[d] += t.bytes
		}
	}
	for d, on := range all {
		if total[d] < leastOnGPU {
			continue
		}
		packer, err := d.NewPacker(spec.Compress)
		if errors.Is(err, errs.ErrMemory) {
			continue
		}
		if err != nil {
			return err
		}
		if spec.ChunkBytes > packer.SlotBytes() {
			packer.Close()
			continue
		}
		g := &gpu{Packer: packer, on: d,
			room: sizes.RoundUp(packer.SlotBytes()+batchRows*(tensor.StoredAlign+tensor.BlobAlign), 4096)}
		p.all = append(p.all, g)
		for _, t := range on {
			p.of[t] = g
		}
		if spec.Compress {
			if err := g.readAhead(on); err != nil {
				return err
			}
		}
		if spec.Digests && spec.Compress {
			if err := digestOn(d, on); err != nil {
				return err
			}
		}
	}
	return nil
}

// digestOn computes the digests of tensors on the GPU that holds them.
func digestOn(d *cuda.Device, items []*Item) error {
	views := make([]digest.View, len(items))
	for i, t := range items {
		views[i] = digest.Contiguous(uint64(t.body.(*deviceBody).Addr), t.bytes)
	}
	sums, err := d.Digest(stream.Order{}, views, nil)
	for i := range sums {
		items[i].sums.digested = &sums[i]
	}
	return err
}

// readAhead reads the samples that a classifier needs, in one batch per sample size.
func (g *gpu) readAhead(items []*Item) error {
	for _, n := range []int64{glanceBytes, sampleBytes} {
		var at []uint64
		var to []func(b []byte)
		for _, t := range items[:min(len(items), sampledAhead)] {
			a := t.body.(*deviceBody)
			var offs []int64
			switch {
			case n == glanceBytes && t.bytes >= minAlias:
				offs = glanceOffsets(t.bytes)
			case n == sampleBytes && t.bytes > wholeSample && x16.TransformsFor(t.dtype) != nil:
				offs = sampleOffsets(t.bytes)
			}
			if a.ahead == nil {
				a.ahead = map[piece][]byte{}
			}
			for _, off := range offs {
				at = append(at, uint64(a.Addr)+uint64(off))
				to = append(to, func(b []byte) { a.ahead[piece{off, n}] = bytes.Clone(b) })
			}
		}
		if err := g.CopySamples(at, n, func(i int, b []byte) { to[i](b) }); err != nil {
			return err
		}
	}
	return nil
}

// close waits for the GPUs' work, and releases their memory.
func (p *gpuGroup) close() {
	for _, g := range p.all {
		g.Close()
		if g.ring != nil {
			g.ring.Keep()
		}
	}
	p.all = nil
}

// takeRings takes the pinned memory that stored bytes are copied to.
func (p *gpuGroup) takeRings() error {
	for _, g := range p.all {
		n := int64(g.SlotCount()) * g.room
		var err error
		if g.ring, err = pinned.Take(n, max(n, pinned.Ready(g.on)), g.on); err != nil {
			return err
		}
		g.ring.Want(n)
	}
	return nil
}

// A pack is a batch of chunks that a GPU encodes. It is one task of the file.
type pack struct {
	gpu    *gpu
	rows   []task
	bytes  int64 // total of the rows, each rounded up to 16
	slot   int
	before *pack // the previous pack in the slot, or nil
	packed []stream.PackedRange
	at     []int64       // offsets of the rows in the file
	out    []byte        // stored bytes, with the gaps between chunks
	over   chan struct{} // closed when the slot is free again
}

// encode waits until the pack's slot is free, and encodes the pack. lay is the container's layout, or nil.
func (p *pack) encode(ctx context.Context, lay *overwire.Layout, clock *clock) error {
	if p.before != nil {
		select {
		case <-p.before.over:
		case <-ctx.Done():
			return errs.Cause(ctx)
		}
		p.before = nil
	}
	defer addLap(&clock.encode, time.Now())
	p.packed = make([]stream.PackedRange, len(p.rows))
	for i := range p.rows {
		r, to := &p.rows[i], &p.packed[i]
		to.Src, to.N = uint64(r.t.body.(*deviceBody).Addr)+uint64(r.off), int64(r.n)
		if r.t.form == compressed && lay != nil {
			to.Transform = r.t.ways.X16
		}
		if to.Hash = lay != nil; r.ends && to.Hash {
			to.Tail = blocksum.Tail(r.t.bytes)
		}
	}
	if lay != nil {
		if err := p.gpu.QueueSums(p.slot, p.packed); err != nil {
			return err
		}
	}
	if err := p.gpu.Encode(p.slot, p.packed); err != nil {
		return err
	}
	if lay == nil {
		return nil
	}
	if err := p.gpu.Wait(p.slot); err != nil { // Encode may not have waited for the sums
		return err
	}
	for i := range p.rows {
		ch, from := &lay.Chunks[p.rows[i].chunk], &p.packed[i]
		ch.Codec, ch.Transform, ch.SegTiles = tensor.CodecRaw, 0, 0
		if from.Tiles > 0 {
			ch.Codec, ch.Transform, ch.SegTiles = tensor.CodecX16, from.Transform, from.Tiles
		}
	}
	return nil
}

// addSums adds a chunk's sums to the hash of its tensor.
func (r *task) addSums(from *stream.PackedRange) error {
	t := r.t
	if r.begins {
		t.sums.blocks = blocksum.New(t.bytes)
	}
	sums, tail := from.SumsAndTail()
	t.sums.blocks.Add(sums)
	if !r.ends {
		return nil
	}
	high, low, ok := t.sums.blocks.Finish(tail)
	if !ok {
		return errs.New(errs.ErrEngine, "tensor %q: the GPU computed too few sums for its hash", t.name)
	}
	t.sums.hash, t.sums.hashed = codec.HashOf(xxh3.Uint128{Hi: high, Lo: low}), true
	return nil
}

// takeSpace takes host memory for n stored bytes.
func (p *pack) takeSpace(ctx context.Context, stage *publish.StagedMemory, n int64) ([]byte, error) {
	if stage != nil {
		return stage.Take(ctx, n)
	}
	off := int64(p.slot) * p.gpu.room
	if n > p.gpu.room {
		return nil, errs.New(errs.ErrEngine, "a batch has %d stored bytes, but its slot only %d", n, p.gpu.room)
	}
	if err := p.gpu.ring.Await(ctx, off+p.gpu.room); err != nil {
		return nil, err
	}
	return p.gpu.ring.Bytes(off, n), nil
}
