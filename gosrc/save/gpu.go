package save

// This file encodes tensors where they are, on GPUs. Chunks go in batches through the
// slots of a stream.Packer, whose kernels encode them and make the sums of their hashes;
// only stored bytes come down, into pinned memory, and are written from there. The file
// is the one that the host would write.

import (
	"bytes"
	"context"
	"errors"
	"time"
	"unsafe"

	"github.com/overwire/overwire/gosrc/codec"
	"github.com/overwire/overwire/gosrc/codec/blocksum"
	"github.com/overwire/overwire/gosrc/codec/digest"
	"github.com/overwire/overwire/gosrc/codec/x16"
	"github.com/overwire/overwire/gosrc/device/cuda"
	"github.com/overwire/overwire/gosrc/device/cuda/stream"
	"github.com/overwire/overwire/gosrc/device/pinned"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/sizes"
	"github.com/overwire/overwire/gosrc/tensor"
)

const (
	batchRows = 1024 // chunks of a batch, as many as a Packer's slot takes
	// leastFileSlots is the least that one file needs: a batch is encoded, one is copied, one written.
	leastFileSlots = 3
	// sampledAhead is how many tensors are sampled together, rather than read by read.
	sampledAhead = 1024
)

// leastOnGPU: of fewer bytes, all tensors of a GPU are encoded by the host, which needs no
// memory there. Tests make it smaller.
var leastOnGPU int64 = 32 << 20

// A gpu encodes the tensors of a save that lie on one.
type gpu struct {
	*stream.Packer
	on   *cuda.Device
	ring *pinned.Memory // of a save that is not staged: the stored bytes of each slot
	room int64          // bytes of a slot there
}

// A piece is a range of a tensor's bytes.
type piece struct{ off, n int64 }

// isEncodable reports whether a GPU may encode a tensor: not in several column parts or in the
// codec of level "smaller", which need its bytes in the host.
func (w *writer) isEncodable(t *item) bool {
	a, ok := t.body.(*away)
	return ok && a.GPU != nil && t.bytes > 0 && w.spec.Parts == 1 && w.spec.Level != levelSmaller &&
		formatOf(w.spec.Path).coded && (!w.spec.Compress || a.Addr%16 == 0)
}

// openGPUs lets GPUs encode the tensors that lie on them. One without memory for that
// leaves them to the host.
func (w *writer) openGPUs(items []*item) error {
	all := map[*cuda.Device][]*item{}
	total := map[*cuda.Device]int64{}
	for _, t := range items {
		if w.isEncodable(t) {
			d := t.body.(*away).GPU
			all[d] = append(all[d], t)
			total[d] += t.bytes
		}
	}
	for d, on := range all {
		if total[d] < leastOnGPU {
			continue
		}
		p, err := d.NewPacker(w.spec.Compress)
		if errors.Is(err, errs.ErrMemory) {
			continue
		}
		if err != nil {
			return errs.In("save", w.spec.Path, err)
		}
		if w.spec.ChunkBytes > p.SlotBytes() {
			p.Close()
			continue
		}
		g := &gpu{Packer: p, on: d,
			room: sizes.RoundUp(p.SlotBytes()+batchRows*(tensor.StoredAlign+tensor.BlobAlign), 4096)}
		w.gpus = append(w.gpus, g)
		for _, t := range on {
			t.gpu = g
		}
		if w.spec.Compress {
			if err := g.readAhead(on); err != nil {
				return errs.In("save", w.spec.Path, err)
			}
		}
		if w.spec.Digests && w.spec.Compress {
			if err := digestOn(d, on); err != nil {
				return errs.In("save", w.spec.Path, err)
			}
		}
	}
	return nil
}

// digestOn computes the digests of tensors where they lie.
func digestOn(d *cuda.Device, items []*item) error {
	views := make([]digest.View, len(items))
	for i, t := range items {
		views[i] = digest.Contiguous(uint64(t.body.(*away).Addr), t.bytes)
	}
	sums, err := d.Digest(stream.Order{}, views)
	for i := range sums {
		items[i].digested = &sums[i]
	}
	return err
}

// readAhead reads what classify will ask tensors for, all at once.
func (g *gpu) readAhead(items []*item) error {
	for _, n := range []int64{glanceBytes, sampleBytes} {
		var at []uint64
		var to []func(b []byte)
		for _, t := range items[:min(len(items), sampledAhead)] {
			a := t.body.(*away)
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

// closeGPUs waits for what is under way on GPUs, and gives their memory back.
func (w *writer) closeGPUs() {
	for _, g := range w.gpus {
		g.Close()
		if g.ring != nil {
			g.ring.Keep()
		}
	}
	w.gpus = nil
}

// takeRings takes the pinned memory that stored bytes come down to.
func (w *writer) takeRings() error {
	for _, g := range w.gpus {
		n := int64(g.SlotCount()) * g.room
		var err error
		if g.ring, err = pinned.Take(n, max(n, pinned.Ready(g.on)), g.on); err != nil {
			return errs.In("save", w.spec.Path, err)
		}
		g.ring.Want(n)
	}
	return nil
}

// A row is a chunk that a GPU encodes.
type row struct {
	t            *item
	off          int64
	n            int32
	chunk        int // its record
	begins, ends bool
}

// A pack is a batch of rows: a task of the file.
type pack struct {
	gpu    *gpu
	rows   []row
	bytes  int64 // of the rows, each rounded up to 16
	slot   int
	before *pack // the one that has the slot before it; nil: none
	packed []stream.PackedRange
	at     []int64       // places of the rows in the file
	out    []byte        // stored bytes, with the gaps between chunks
	over   chan struct{} // closed when the slot is free again
}

// packChunk adds a chunk to the last task, if that is a batch with room for it, or makes one.
func (f *fileWriter) packChunk(r row) {
	n := sizes.RoundUp(int64(r.n), 16)
	var p *pack
	if k := len(f.tasks) - 1; k >= 0 {
		p = f.tasks[k].pack
	}
	if p == nil || p.gpu != r.t.gpu || p.bytes+n > p.gpu.SlotBytes() || len(p.rows) == batchRows {
		slots := r.t.gpu.SlotCount() / f.share.of
		p = &pack{gpu: r.t.gpu, slot: f.share.number*slots + len(f.packs[r.t.gpu])%slots, over: make(chan struct{})}
		if all := f.packs[p.gpu]; len(all) >= slots {
			p.before = all[len(all)-slots]
		}
		f.packs[p.gpu] = append(f.packs[p.gpu], p)
		f.tasks = append(f.tasks, task{t: r.t, pack: p})
	}
	p.rows = append(p.rows, r)
	p.bytes += n
}

// encodePack makes the stored bytes of a batch, once its slot is free.
func (f *fileWriter) encodePack(ctx context.Context, p *pack) error {
	if p.before != nil {
		select {
		case <-p.before.over:
		case <-ctx.Done():
			return errs.Cause(ctx)
		}
		p.before = nil
	}
	defer addLap(&f.clock.encode, time.Now())
	p.packed = make([]stream.PackedRange, len(p.rows))
	for i := range p.rows {
		r, to := &p.rows[i], &p.packed[i]
		to.Src, to.N = uint64(r.t.body.(*away).Addr)+uint64(r.off), int64(r.n)
		if r.t.form == compressed && f.lay != nil {
			to.Transform = r.t.ways.X16
		}
		if to.Hash = f.lay != nil; r.ends && to.Hash {
			to.Tail = blocksum.Tail(r.t.bytes)
		}
	}
	if f.lay != nil {
		if err := p.gpu.QueueSums(p.slot, p.packed); err != nil {
			return err
		}
	}
	if err := p.gpu.Encode(p.slot, p.packed); err != nil {
		return err
	}
	if f.lay == nil {
		return nil
	}
	if err := p.gpu.Wait(p.slot); err != nil { // Encode waits only for what it encodes
		return err
	}
	for i := range p.rows {
		ch, from := &f.lay.Chunks[p.rows[i].chunk], &p.packed[i]
		ch.Codec, ch.Transform, ch.SegTiles = tensor.CodecRaw, 0, 0
		if from.Tiles > 0 {
			ch.Codec, ch.Transform, ch.SegTiles = tensor.CodecX16, from.Transform, from.Tiles
		}
	}
	return nil
}

// placePack gives a batch its place in the file and in host memory, and adds its sums to
// the hashes.
func (f *fileWriter) placePack(ctx context.Context, p *pack) error {
	at := make([]int64, len(p.rows))
	end, gap := f.pos, f.pos
	for i := range p.rows {
		r, from := &p.rows[i], &p.packed[i]
		at[i] = end
		if f.lay != nil {
			var err error
			if at[i], err = f.lay.Place(r.chunk, uint32(from.Stored)); err != nil {
				return err
			}
			if err := r.addSums(from); err != nil {
				return err
			}
		}
		end = at[i] + from.Stored
	}
	f.pos, p.at = end, at
	var err error
	if p.out, err = f.batchSpace(ctx, p, end-at[0]); err != nil {
		return err
	}
	behind := at[0]
	for i := range p.packed {
		from := &p.packed[i]
		clear(p.out[behind-at[0] : at[i]-at[0]]) // memory that was used before
		behind = at[i] + from.Stored
		from.To = unsafe.Pointer(&p.out[at[i]-at[0]])
	}
	if gap < at[0] {
		return f.draft.Skip(gap, at[0])
	}
	return nil
}

// addSums adds a chunk to the hash of its tensor.
func (r *row) addSums(from *stream.PackedRange) error {
	t := r.t
	if r.begins {
		t.sums = blocksum.New(t.bytes)
	}
	sums, tail := from.SumsAndTail()
	t.sums.Add(sums)
	if !r.ends {
		return nil
	}
	high, low, ok := t.sums.Finish(tail)
	if !ok {
		return errs.New(errs.ErrEngine, "tensor %q: sums of its hash are missing", t.name)
	}
	t.hash, t.hashed = hashOf(high, low), true
	return nil
}

// batchSpace is host memory for a batch's stored bytes.
func (f *fileWriter) batchSpace(ctx context.Context, p *pack, n int64) ([]byte, error) {
	if f.stage != nil {
		return f.stage.takeMemory(ctx, n)
	}
	off := int64(p.slot) * p.gpu.room
	if n > p.gpu.room {
		return nil, errs.New(errs.ErrEngine, "a batch of %d bytes in %d", n, p.gpu.room)
	}
	if err := p.gpu.ring.Await(ctx, off+p.gpu.room); err != nil {
		return nil, err
	}
	return p.gpu.ring.Bytes(off, n), nil
}

// flushPack copies a batch down, sums its chunks and writes it.
func (f *fileWriter) flushPack(p *pack) error {
	start := time.Now()
	if err := p.gpu.QueueFetches(p.slot, p.packed); err != nil {
		return err
	}
	if err := p.gpu.Wait(p.slot); err != nil {
		return err
	}
	start = addLap(&f.clock.read, start)
	first := p.at[0]
	var done, tensors int64
	for i := range p.rows {
		r := &p.rows[i]
		if f.lay != nil {
			lo := p.at[i] - first
			f.lay.Chunks[r.chunk].Sum = codec.Sum(p.out[lo : lo+p.packed[i].Stored])
		}
		if done += int64(r.n); r.ends {
			tensors++
		}
	}
	addLap(&f.clock.hash, start)
	var err error
	if s, ok := f.draft.(*staged); ok {
		s.holdBytes(p.out, first)
	} else {
		err = f.draft.Write(p.out, first)
	}
	if err != nil {
		return err
	}
	f.onGPU.Add(done)
	f.job.Bytes.Add(done)
	f.job.Tensors.Add(tensors)
	p.packed, p.rows, p.at, p.out = nil, nil, nil, nil
	close(p.over)
	return nil
}
