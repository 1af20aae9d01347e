package save

// This file orders the tensors of a file and divides them into tasks.

import (
	"cmp"
	"slices"
	"strings"

	"github.com/overwire/overwire/gosrc/codec"
	"github.com/overwire/overwire/gosrc/codec/digest"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/format/overwire"
	"github.com/overwire/overwire/gosrc/format/safetensors"
	"github.com/overwire/overwire/gosrc/internal/sizes"
	"github.com/overwire/overwire/gosrc/save/original"
	"github.com/overwire/overwire/gosrc/tensor"
	"github.com/zeebo/xxh3"
)

// plainAlign is the alignment of the data section of plain files. Together with the tensor
// order, it aligns most tensors.
const plainAlign = 64

// A filePlan is the layout of one file, and the tasks that write it.
type filePlan struct {
	s     *session
	file  *File
	share writerShare

	original *original.File   // the original to store in a container or to restore; may be nil
	order    []*Item          // items in the order of their data
	lay      *overwire.Layout // layout of a container; nil for a plain file
	front    []byte           // header of a plain file
	again    *original.Copy   // set if the plain file restores an original
	start    int64            // offset of the data
	tasks    []task
	packs    map[*gpu][]*pack
}

// A task writes one chunk. If n is 0, the task hashes a whole tensor before its chunks are written, because they are
// not in the order of the tensor's bytes.
type task struct {
	t            *Item
	part         int32
	n            int32
	off          int64 // offset in the part
	chunk        int   // number of the chunk record
	begins, ends bool  // whether it is the tensor's first or last chunk
	pack         *pack // if set, the task is a pack of chunks that a GPU encodes
}

// planFile orders the file's tensors and makes its tasks, and the layout of a container.
func planFile(s *session, file *File, share writerShare) (*filePlan, error) {
	p := &filePlan{s: s, file: file, share: share, original: file.Original, packs: map[*gpu][]*pack{}}
	switch {
	case s.spec.Compress:
		return p, p.planContainer()
	case p.original != nil:
		return p, p.planOriginal()
	}
	return p, p.planPlain()
}

func (p *filePlan) planContainer() error {
	number := make(map[*Item]int, len(p.file.Items))
	for i, t := range p.file.Items {
		number[t] = i
	}
	items := make([]overwire.Item, len(p.file.Items))
	for i, t := range p.file.Items {
		it := overwire.Item{Name: t.name, DType: t.dtype, Shape: t.shape, Plain: t.form == plain}
		switch {
		case t.form == alias:
			it.Alias = 1 + number[t.of]
		case t.bytes > 0:
			it.Parts, it.ChunkBytes = int(t.parts), p.s.spec.ChunkBytes
		}
		items[i] = it
	}
	var origin *overwire.Origin
	if p.original != nil {
		origin = p.original.Origin
	}
	l, err := overwire.NewLayout(p.file.Metadata, items, origin, p.s.spec.Digests)
	if err != nil {
		return err
	}
	if l.Origin == nil {
		p.original = nil
	}
	p.lay, p.start = l, l.Start()
	for i, k := range l.Items {
		t := p.file.Items[k]
		p.order = append(p.order, t)
		lt := &l.Tensors[i]
		p.cut(t, lt.Grid(), int(lt.First))
	}
	return nil
}

func (p *filePlan) planPlain() (err error) {
	if p.order, p.front, err = layPlain(p.file.Items, p.file.Metadata); err != nil {
		return err
	}
	for _, t := range p.order {
		p.cutPlain(t)
	}
	p.start = int64(len(p.front))
	return nil
}

// layPlain orders tensors as the safetensors library does, and returns the file's header.
func layPlain(items []*Item, metadata map[string]string) (order []*Item, header []byte, err error) {
	order = slices.Clone(items)
	slices.SortFunc(order, func(a, b *Item) int {
		return cmp.Or(cmp.Compare(b.dtype, a.dtype), strings.Compare(a.name, b.name))
	})
	entries := make([]safetensors.Entry, len(order))
	for i, t := range order {
		entries[i] = safetensors.Entry{Name: t.name, DType: t.dtype, Shape: t.shape}
	}
	if _, err := safetensors.Place(entries); err != nil {
		return nil, nil, err
	}
	header, err = safetensors.AppendHeader(nil, metadata, entries, plainAlign)
	return order, header, err
}

// planOriginal uses the header and the tensor order of the original file.
func (p *filePlan) planOriginal() error {
	items := make(map[string]*Item, len(p.file.Items))
	known := make(map[string]*tensor.Tensor, len(p.file.Items))
	for _, t := range p.file.Items {
		items[t.name], known[t.name] = t, t.from.known
	}
	again, err := p.original.Again(known, p.file.Metadata, false)
	if err != nil {
		return err
	}
	for i := range again.Tensors {
		t := items[again.Tensors[i].Name]
		p.order = append(p.order, t)
		p.cutPlain(t)
	}
	p.again, p.front, p.start = again, again.Front, int64(len(again.Front))
	return nil
}

// cutPlain makes the tasks of one tensor of a plain file.
func (p *filePlan) cutPlain(t *Item) {
	p.cut(t, tensor.Grid{Parts: 1, PartBytes: t.bytes, ChunkBytes: p.s.spec.ChunkBytes,
		PerPart: sizes.CeilDiv(t.bytes, p.s.spec.ChunkBytes)}, 0)
}

func (p *filePlan) cut(t *Item, g tensor.Grid, first int) {
	if t.form == alias || t.bytes == 0 {
		p.s.job.Tensors.Add(1)
		p.s.job.Bytes.Add(t.bytes)
		return
	}
	if t.parts = g.Parts; t.parts > 1 && (!t.sums.hashed || p.s.spec.Digests) {
		p.tasks = append(p.tasks, task{t: t})
	}
	on := p.s.gpus.of[t]
	for k := range g.Chunks() {
		part, lo, hi := g.Chunk(k)
		c := task{t: t, part: int32(part), n: int32(hi - lo), off: lo, chunk: first + int(k), begins: k == 0,
			ends: k == g.Chunks()-1}
		if on != nil {
			p.packChunk(on, c)
		} else {
			p.tasks = append(p.tasks, c)
		}
	}
}

// packChunk adds a chunk to the last task if that is a pack of the GPU with room for it. Otherwise it adds a task.
// Files share the GPU's slots.
func (f *filePlan) packChunk(g *gpu, r task) {
	n := sizes.RoundUp(int64(r.n), 16)
	var p *pack
	if k := len(f.tasks) - 1; k >= 0 {
		p = f.tasks[k].pack
	}
	if p == nil || p.gpu != g || p.bytes+n > g.SlotBytes() || len(p.rows) == batchRows {
		slots, earlier := g.SlotCount()/f.share.of, f.packs[g]
		p = &pack{gpu: g, slot: f.share.number*slots + len(earlier)%slots, over: make(chan struct{})}
		if len(earlier) >= slots {
			p.before = earlier[len(earlier)-slots]
		}
		f.packs[g] = append(earlier, p)
		f.tasks = append(f.tasks, task{t: r.t, pack: p})
	}
	p.rows = append(p.rows, r)
	p.bytes += n
}

// sealFront returns the bytes before the data, and the size of the file. All data has been placed; it ends at end.
func (p *filePlan) sealFront(end int64) (front []byte, size int64, err error) {
	if p.lay == nil {
		return p.front, end, nil
	}
	for i, t := range p.order {
		switch {
		case t.form == alias:
		case t.bytes == 0:
			p.lay.Tensors[i].Hash = codec.HashOf(xxh3.Hash128(nil))
		case t.sums.hashed:
			p.lay.Tensors[i].Hash = t.sums.hash
		default:
			return nil, 0, errs.New(errs.ErrEngine, "tensor %q was not hashed", t.name)
		}
	}
	if p.lay.Digests != "" {
		sums := make([]digest.Sum, len(p.order))
		for i, t := range p.order {
			holder := t
			if t.form == alias {
				holder = t.of
			}
			if holder.sums.digested != nil {
				sums[i] = *holder.sums.digested
			} else {
				sums[i] = holder.sums.digest.Sum(t.bytes)
			}
		}
		p.lay.Digests = overwire.Digests(sums)
	}
	return p.lay.Seal(codec.Known)
}

// windowSize returns how many tasks may be in progress, and how many goroutines run them. If GPUs encode, one goroutine
// is always free for the steps that run in order.
func (p *filePlan) windowSize() (window, workers int) {
	window, workers = 2*p.share.threads+4, p.share.threads
	for g := range p.packs {
		window = max(window, g.SlotCount()/p.share.of)
	}
	if len(p.packs) > 0 {
		workers = window + 1
	}
	return window, workers
}

// orderedNames returns the names of the tensors that are written in the order of their bytes.
func (p *filePlan) orderedNames() (order []string) {
	for _, t := range p.order {
		if t.form != alias && t.bytes > 0 && t.parts == 1 {
			order = append(order, t.name)
		}
	}
	return order
}
