package tensor

// This file selects some of an index's tensors.

import (
	"slices"

	"github.com/overwire/overwire/gosrc/errs"
)

// Select returns an index of the tensors for which kept is true. It shares memory with ix and does not change it. If a
// tensor is dropped, its first remaining alias gets its bytes.
func (ix *Index) Select(kept []bool) (*Index, error) {
	out := &Index{Sources: slices.Clone(ix.Sources), Chunks: ix.Chunks}
	place := make([]int32, len(ix.Tensors)) // numbers in out; for a dropped tensor, the alias that gets its bytes
	n := int32(0)
	for i := range ix.Tensors {
		place[i] = -1
		if kept[i] {
			place[i] = n
			n++
		} else {
			s := &out.Sources[ix.Tensors[i].Source]
			s.Gaps = true
			s.Unlisted++
		}
	}
	out.Tensors = make([]Tensor, 0, n)
	for i, t := range ix.Tensors {
		if !kept[i] {
			continue
		}
		if t.Alias >= 0 {
			to := &ix.Tensors[t.Alias]
			if heir := place[t.Alias]; heir >= 0 {
				t.Alias = heir
			} else if to.Parts > 1 && !slices.Equal(to.Shape, t.Shape) {
				return nil, errs.Locate("index", ix.Sources[t.Source].URI, t.Name, -1,
					errs.New(errs.ErrNotSupported,
						"it shares the bytes of %q, which has another shape and is not listed in the "+
							"index.json", to.Name))
			} else {
				place[t.Alias] = place[i]
				t.Off, t.Stored, t.First, t.Count = to.Off, to.Stored, to.First, to.Count
				t.ChunkBytes, t.Parts, t.Plain, t.Block, t.Alias = to.ChunkBytes, to.Parts, to.Plain, to.Block, -1
			}
		}
		out.Tensors = append(out.Tensors, t)
	}
	return out, nil
}
