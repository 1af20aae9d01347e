package format

// This file decides which of several files of a folder has a tensor that more than one of
// them has: the folder's index.json says so, also where the files were named one by one, as
// engines name them.

import (
	"context"
	"path/filepath"

	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/tensor"
)

// withoutStale leaves out of the parts, each of one local file of the same folder, what the
// index.json of that folder gives to another of the files. Without a tensor in two of them,
// or without such an index, the parts stay as they are: their reader refuses twins.
func withoutStale(ctx context.Context, sets []Files, parts []*tensor.Index, open Opener, opt Options) []*tensor.Index {
	folder := ""
	for i, set := range sets {
		if set.Index != "" || len(set.URIs) != 1 || source.Remote(set.URIs[0]) ||
			i > 0 && filepath.Dir(set.URIs[0]) != folder {
			return parts
		}
		folder = filepath.Dir(set.URIs[0])
	}
	if !haveTwins(parts) {
		return parts
	}
	model, err := Resolve(ctx, source.LocationOf(folder), open, opt)
	if err != nil || model.Shards == nil {
		return parts
	}
	owners := make(map[string]string, len(model.Shards.Weights))
	for _, w := range model.Shards.Weights {
		owners[w.Name] = model.Shards.Files[w.File]
	}
	out := make([]*tensor.Index, len(parts))
	for i, part := range parts {
		keeps, all := make([]bool, len(part.Tensors)), true
		for k := range part.Tensors {
			owner, isListed := owners[part.Tensors[k].Name]
			keeps[k] = !isListed || owner == filepath.Base(sets[i].URIs[0])
			all = all && keeps[k]
		}
		if out[i] = part; !all {
			if out[i], err = part.Select(keeps); err != nil {
				return parts
			}
		}
	}
	return out
}

// haveTwins reports whether two parts have a tensor of the same name.
func haveTwins(parts []*tensor.Index) bool {
	owner := map[string]int{}
	for i, part := range parts {
		for k := range part.Tensors {
			if first, isKnown := owner[part.Tensors[k].Name]; isKnown && first != i {
				return true
			}
			owner[part.Tensors[k].Name] = i
		}
	}
	return false
}
