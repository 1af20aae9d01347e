package format

// This file opens the models that users name, and detects files of different saves of a checkpoint.

import (
	"cmp"
	"context"
	"path/filepath"
	"strings"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/modelfiles"
	"github.com/overwire/overwire/gosrc/internal/spawn"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/tensor"
)

// OpenAll resolves names, opens every file with open, and indexes them. If an index.json applies, the model has exactly
// the tensors that it lists, each from the file that it names. If an index.json is replaced during the call, its files
// are opened again, so that they match it. If the files of one checkpoint are from several saves, all files are opened
// again. sets[i] are the files that uris[i] names. The caller must close the sources; if OpenAll fails, it closes them.
func OpenAll(ctx context.Context, uris []string, open Opener, opt Options) (ix *tensor.Index, srcs []source.Source,
	sets []Files, err error) {
	if len(uris) == 0 {
		return nil, nil, nil, errs.New(errs.ErrArgument, "no files were named: expected at least one")
	}
	for try := 0; try < 2; try++ {
		if ix, srcs, sets, err = openOnce(ctx, uris, open, opt); err != nil {
			return nil, nil, nil, err
		}
		if err = refuseMixture(ix); err == nil {
			return ix, srcs, sets, nil
		}
		closeAll(srcs)
	}
	return nil, nil, nil, err
}

// openOnce is OpenAll without the second attempt for mixed saves.
func openOnce(ctx context.Context, uris []string, open Opener, opt Options) (ix *tensor.Index, srcs []source.Source,
	sets []Files, err error) {
	var parts []*tensor.Index
	for _, uri := range uris {
		at := source.LocationOf(uri)
		var part *tensor.Index
		var opened []source.Source
		var set Files
		changed := true
		for try := 0; try < 2 && changed; try++ {
			closeAll(opened)
			part, opened, set, changed, err = openSet(ctx, at, open, opt)
		}
		if changed && err == nil {
			err = placeError(set.Index, source.Changed())
		}
		srcs = append(srcs, opened...)
		if err != nil {
			closeAll(srcs)
			return nil, nil, nil, err
		}
		parts, sets = append(parts, part), append(sets, set)
	}
	if len(parts) > 1 {
		parts = withoutStale(ctx, sets, parts, open, opt)
	}
	ix, err = Join(parts)
	if err != nil {
		closeAll(srcs)
		return nil, nil, nil, err
	}
	return ix, srcs, sets, nil
}

func closeAll(srcs []source.Source) {
	for _, s := range srcs {
		_ = s.Close()
	}
}

// openSet opens the files that one URI names. changed reports whether the index.json or listing that selected them was
// replaced in the meantime. The caller closes the sources, even after an error.
func openSet(ctx context.Context, at source.Location, open Opener, opt Options) (ix *tensor.Index, srcs []source.Source,
	set Files, changed bool, err error) {
	set, srcs, err = openFiles(ctx, at, open, opt)
	if err != nil {
		return nil, srcs, set, set.wasReplaced(ctx, open, err), err
	}
	// Check for a changed index while the headers are read.
	seen := make(chan bool, 1)
	if set.Index == "" {
		seen <- false
	} else {
		spawn.Go("open.index", func() {
			is := false
			defer func() { seen <- is }()
			is = set.wasReplaced(ctx, open, nil)
		})
	}
	ix, err = Open(ctx, srcs, opt)
	changed = <-seen
	if err == nil && set.Shards != nil {
		listed, lacking := set.Shards.Select(ix)
		switch {
		case lacking != nil:
			err = placeError(at.URI, lacking)
		case !opt.Unlisted:
			ix = listed
		}
	}
	return ix, srcs, set, changed, err
}

// Names returns the tensors that the index.json of each URI lists, without opening a shard. ok is false if a URI has
// no index.json.
func Names(ctx context.Context, uris []string, open Opener, opt Options) (names []string, ok bool, err error) {
	names = []string{}
	for _, uri := range uris {
		set, err := Resolve(ctx, source.LocationOf(uri), open, opt)
		if err != nil || set.Shards == nil {
			return nil, false, err
		}
		for _, w := range set.Shards.Weights {
			names = append(names, w.Name)
		}
	}
	return names, true, nil
}

// withoutStale removes stale copies of tensors that several files of a folder contain. The folder's index.json decides
// which file provides such a tensor, even if the caller named the files one by one, as inference engines do. Each part
// must be one local file of the same folder. A copy is removed if the index.json assigns the tensor to a different
// named file. Other duplicates stay.
func withoutStale(ctx context.Context, sets []Files, parts []*tensor.Index, open Opener, opt Options) []*tensor.Index {
	folder := ""
	for i, set := range sets {
		if set.Index != "" || len(set.URIs) != 1 || source.Remote(set.URIs[0]) ||
			i > 0 && filepath.Dir(set.URIs[0]) != folder {
			return parts
		}
		folder = filepath.Dir(set.URIs[0])
	}
	twins := findTwins(parts)
	if len(twins) == 0 {
		return parts
	}
	model, err := Resolve(ctx, source.LocationOf(folder), open, opt)
	if err != nil || model.Shards == nil {
		return parts
	}
	// owners maps the name of a duplicate to the part that must provide it, if the index.json names one.
	owners := make(map[string]int, len(twins))
	for _, w := range model.Shards.Weights {
		for _, i := range twins[w.Name] {
			if model.Shards.Files[w.File] == filepath.Base(sets[i].URIs[0]) {
				owners[w.Name] = i
			}
		}
	}
	out := make([]*tensor.Index, len(parts))
	for i, part := range parts {
		keeps, all := make([]bool, len(part.Tensors)), true
		for k := range part.Tensors {
			owner, isDecided := owners[part.Tensors[k].Name]
			keeps[k] = !isDecided || sets[owner].URIs[0] == sets[i].URIs[0]
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

// findTwins returns the names of tensors in more than one part, with the numbers of those parts.
func findTwins(parts []*tensor.Index) map[string][]int {
	first, twins := map[string]int{}, map[string][]int{}
	for i, part := range parts {
		for k := range part.Tensors {
			name := part.Tensors[k].Name
			at, isKnown := first[name]
			switch {
			case !isKnown:
				first[name] = i
			case twins[name] == nil:
				twins[name] = []int{at, i}
			default:
				twins[name] = append(twins[name], i)
			}
		}
	}
	return twins
}

// SaveKey is the metadata entry with the id of a save. All files of one save of a checkpoint have the same id; other
// files have none. Python writes it (checkpoints/manifest.py).
const SaveKey = "overwire.checkpoint"

// checkpointParts are the folders in a checkpoint that contain files of one save. "/" is the checkpoint's own folder.
var checkpointParts = []string{"/training/", "/"}

// refuseMixture refuses files that belong to one checkpoint, according to their folder and names, but are from several
// saves. A folder that is being replaced therefore never yields a mixture.
func refuseMixture(ix *tensor.Index) error {
	saves := map[string]*tensor.Source{}
	for i := range ix.Sources {
		s := &ix.Sources[i]
		at := source.LocationOf(s.URI)
		folder, name := at.Directory, at.Name
		if !at.Remote {
			end := strings.LastIndexByte(at.Path, '/') + 1
			folder, name = at.Path[:end], at.Path[end:]
		}
		if n, ok := modelfiles.ParseName(name); !ok || n.Stem != "model" || n.Variant != "" {
			continue
		}
		for _, part := range checkpointParts {
			if root, ok := strings.CutSuffix(folder, part); ok {
				folder = root
				break
			}
		}
		first := cmp.Or(saves[folder], s)
		if saves[folder] = first; first.Metadata[SaveKey] != s.Metadata[SaveKey] {
			return placeError(s.URI, errs.New(errs.ErrCorrupt, "%s is from another save of this checkpoint: "+
				"the checkpoint was replaced during the load, or files of two saves were mixed",
				errs.RedactURI(first.URI)))
		}
	}
	return nil
}
