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
	"github.com/overwire/overwire/gosrc/tensor"
)

// plainAlign is the alignment of the data section of plain files. With the order of
// their tensors, it aligns those that follow one of round size.
const plainAlign = 64

// planFile orders the file's tensors and makes its tasks. For a container it keeps the
// layout, which knows all offsets.
func (f *fileWriter) planFile() error {
	switch {
	case f.spec.Compress:
		return f.planContainer()
	case f.part.original != nil:
		return f.planOriginal()
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
	var origin *overwire.Origin
	if f.part.original != nil {
		origin = f.part.original.Origin
	}
	l, err := overwire.NewLayout(f.part.metadata, items, origin, f.spec.Digests)
	if err != nil {
		return err
	}
	if l.Origin == nil {
		f.part.original = nil
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

func (f *fileWriter) planPlain() (err error) {
	if f.order, f.front, err = layPlain(f.part.items, f.part.metadata); err != nil {
		return err
	}
	for _, t := range f.order {
		f.cutPlain(t)
	}
	f.start = int64(len(f.front))
	return nil
}

// A Front is the header of a plain file, without its length, and the order in which
// tensors follow it, by their positions.
type Front struct {
	Header string `json:"header"`
	Order  []int  `json:"order"`
}

// FrontOf orders tensors as a plain file has them. path is for messages; nothing is written.
func FrontOf(path string, metadata map[string]string, in []Input) (Front, error) {
	items := make([]*item, len(in))
	number := make(map[*item]int, len(in))
	for i := range in {
		t := &in[i]
		items[i] = &item{name: t.Name, dtype: t.DType, shape: t.Shape, bytes: int64(len(t.Data))}
		number[items[i]] = i
	}
	if err := checkMetadata(path, metadata); err != nil {
		return Front{}, err
	}
	if err := checkItems(path, items); err != nil {
		return Front{}, err
	}
	order, header, err := layPlain(items, metadata)
	if err != nil {
		return Front{}, err
	}
	front := Front{Header: string(header[8:]), Order: make([]int, len(order))}
	for i, t := range order {
		front.Order[i] = number[t]
	}
	return front, nil
}

// layPlain orders tensors as safetensors' own writer does; with the header of the file.
func layPlain(items []*item, metadata map[string]string) (order []*item, header []byte, err error) {
	order = slices.Clone(items)
	slices.SortFunc(order, func(a, b *item) int {
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

// planOriginal uses the header and the order of the file that was compressed.
func (f *fileWriter) planOriginal() error {
	items := make(map[string]*item, len(f.part.items))
	known := make(map[string]*tensor.Tensor, len(f.part.items))
	for _, t := range f.part.items {
		items[t.name], known[t.name] = t, t.known
	}
	p, err := f.part.original.Again(known, f.part.metadata, false)
	if err != nil {
		return err
	}
	for i := range p.Tensors {
		t := items[p.Tensors[i].Name]
		f.order = append(f.order, t)
		f.cutPlain(t)
	}
	f.again, f.front, f.start = p, p.Front, int64(len(p.Front))
	return nil
}

// cutPlain makes the tasks of one tensor of a plain file.
func (f *fileWriter) cutPlain(t *item) {
	f.cut(t, tensor.Grid{Parts: 1, PartBytes: t.bytes, ChunkBytes: f.spec.ChunkBytes,
		PerPart: sizes.CeilDiv(t.bytes, f.spec.ChunkBytes)}, 0)
}

func (f *fileWriter) cut(t *item, g tensor.Grid, first int) {
	if t.form == alias || t.bytes == 0 {
		f.job.Tensors.Add(1)
		f.job.Bytes.Add(t.bytes)
		return
	}
	if t.parts = g.Parts; t.parts > 1 && (!t.hashed || f.spec.Digests) {
		f.tasks = append(f.tasks, task{t: t})
	}
	for k := range g.Chunks() {
		p, lo, hi := g.Chunk(k)
		if t.gpu != nil {
			f.packChunk(row{t: t, off: lo, n: int32(hi - lo), chunk: first + int(k), begins: k == 0,
				ends: k == g.Chunks()-1})
			continue
		}
		f.tasks = append(f.tasks, task{t: t, part: int32(p), n: int32(hi - lo), off: lo, chunk: first + int(k),
			begins: k == 0, ends: k == g.Chunks()-1})
	}
}

// sealFront returns what precedes the data, once all offsets are known, and the size of
// the file.
func (f *fileWriter) sealFront() (front []byte, size int64, err error) {
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
			return nil, 0, errs.New(errs.ErrEngine, "tensor %q was not hashed", t.name)
		}
	}
	if f.lay.Digests != "" {
		sums := make([]digest.Sum, len(f.order))
		for i, t := range f.order {
			holder := t
			if t.form == alias {
				holder = t.of
			}
			if holder.digested != nil {
				sums[i] = *holder.digested
			} else {
				sums[i] = holder.digest.Sum(t.bytes)
			}
		}
		f.lay.Digests = overwire.Digests(sums)
	}
	return f.lay.Seal(codec.Known)
}
