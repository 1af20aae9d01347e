package save

// This file orders the tensors of a file and cuts them into tasks.

import (
	"cmp"
	"slices"
	"strings"

	"github.com/overwire/overwire/gosrc/codec"
	"github.com/overwire/overwire/gosrc/fault"
	"github.com/overwire/overwire/gosrc/format/overwire"
	"github.com/overwire/overwire/gosrc/format/safetensors"
	"github.com/overwire/overwire/gosrc/internal/sizes"
	"github.com/overwire/overwire/gosrc/tensor"
)

// plainAlign is where the data section of plain files begins: with the order of
// their tensors, it aligns those that have a neighbour of round size in front.
const plainAlign = 64

// plan orders the file's tensors and makes its tasks. Of a container the
// layout is kept, which knows where everything goes.
func (f *fileWriter) plan() error {
	if f.spec.Compress {
		return f.planContainer()
	}
	return f.planPlain()
}

func (f *fileWriter) planContainer() error {
	number := make(map[*item]int, len(f.part.items))
	for i, t := range f.part.items {
		number[t] = i
	}
	items := make([]overwire.Item, len(f.part.items))
	for i, t := range f.part.items {
		it := overwire.Item{Name: t.name, DType: t.dtype, Shape: t.shape, Plain: t.form == plain}
		switch {
		case t.form == alias:
			it.Alias = 1 + number[t.of]
		case t.bytes > 0:
			it.Parts, it.ChunkBytes = int(t.parts), f.spec.ChunkBytes
		}
		items[i] = it
	}
	l, err := overwire.NewLayout(f.part.metadata, items)
	if err != nil {
		return err
	}
	f.lay, f.start = l, l.Start()
	for i, k := range l.Items {
		t := f.part.items[k]
		f.order = append(f.order, t)
		lt := &l.Tensors[i]
		f.cut(t, lt.Grid(), int(lt.First))
	}
	return nil
}

// planPlain has the order of safetensors' own writer.
func (f *fileWriter) planPlain() error {
	f.order = slices.Clone(f.part.items)
	slices.SortFunc(f.order, func(a, b *item) int {
		return cmp.Or(cmp.Compare(b.dtype, a.dtype), strings.Compare(a.name, b.name))
	})
	entries := make([]safetensors.Entry, len(f.order))
	for i, t := range f.order {
		entries[i] = safetensors.Entry{Name: t.name, DType: t.dtype, Shape: t.shape}
		f.cut(t, tensor.Grid{Parts: 1, PartBytes: t.bytes, ChunkBytes: f.spec.ChunkBytes,
			PerPart: sizes.CeilDiv(t.bytes, f.spec.ChunkBytes)}, 0)
	}
	if _, err := safetensors.Place(entries); err != nil {
		return err
	}
	front, err := safetensors.AppendHeader(nil, f.part.metadata, entries, plainAlign)
	f.front, f.start = front, int64(len(front))
	return err
}

// cut makes the tasks of one tensor.
func (f *fileWriter) cut(t *item, g tensor.Grid, first int) {
	if t.form == alias || t.bytes == 0 {
		f.job.Tensors.Add(1)
		f.job.Bytes.Add(t.bytes)
		return
	}
	if t.parts = g.Parts; t.parts > 1 && !t.hashed {
		f.tasks = append(f.tasks, task{t: t})
	}
	for k := range g.Chunks() {
		p, lo, hi := g.Chunk(k)
		f.tasks = append(f.tasks, task{t: t, part: int32(p), n: int32(hi - lo), off: lo, chunk: first + int(k),
			begins: k == 0, ends: k == g.Chunks()-1})
	}
}

// seal returns what stands before the data, now that everything has its place,
// and the size of the file.
func (f *fileWriter) seal() (front []byte, size int64, err error) {
	if f.lay == nil {
		return f.front, f.pos, nil
	}
	for i, t := range f.order {
		switch {
		case t.form == alias:
		case t.bytes == 0:
			f.lay.Tensors[i].Hash = hashOfNothing()
		case t.hashed:
			f.lay.Tensors[i].Hash = t.hash
		default:
			return nil, 0, fault.New(fault.ErrEngine, "tensor %q was not hashed", t.name)
		}
	}
	return f.lay.Seal(codec.Known)
}
