package save

// This file gives the files of a set names that no file of the set before it has: both are
// whole until the new index.json replaces the old one, in one step.

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/overwire/overwire/gosrc/format/safetensors"
	"github.com/overwire/overwire/gosrc/internal/atomicfile"
	"github.com/overwire/overwire/gosrc/internal/modelfiles"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/source/open"
)

// A listing is what an index.json that is written says.
type listing struct {
	*safetensors.Shards
	usual []string        // the names of its files before they were chosen
	there map[string]bool // the names that the folder had then, as far as the store tells
}

// indexOf is the part of an index.json that lists parts, its shards.
func indexOf(path string, shards *safetensors.Shards, parts []outputFile) outputFile {
	for k := range parts {
		parts[k].shard = true
	}
	return outputFile{path: path, laid: wholeFile(safetensors.AppendIndexJSON(nil, *shards)),
		listing: &listing{Shards: shards}}
}

// chooseNames keeps the names of shards, or marks them (modelfiles.Mark) if the folder has
// an earlier set: an index, files of these names, or weights that no index lists (but one
// file of the index's name, beside which shards without an index are no model). Names that
// come back after two saves would be those of two sets to a slow reader.
func (w *writer) chooseNames(ctx context.Context, parts []outputFile) error {
	last := &parts[len(parts)-1]
	if last.listing == nil {
		return nil
	}
	if !source.Remote(last.path) {
		if err := atomicfile.Check(last.path); err != nil {
			return err
		}
	}
	for _, p := range parts {
		if p.shard {
			last.listing.usual = append(last.listing.usual, filepath.Base(p.path))
		}
	}
	earlier, err := w.hasEarlierSet(ctx, last)
	if err != nil || !earlier {
		return err
	}
	mark := modelfiles.Mark()
	last.renameShards(parts, func(name string) string { return modelfiles.WithMark(name, mark) })
	return nil
}

// hasEarlierSet reports whether an earlier set lies beside an index. It notes the names that are
// there.
func (w *writer) hasEarlierSet(ctx context.Context, index *outputFile) (bool, error) {
	old, err := w.readIndex(ctx, index.path)
	if err != nil && (source.Remote(index.path) || !listsNothing(err)) {
		return false, err
	}
	base := filepath.Base(index.path)
	dir, single := index.path[:len(index.path)-len(base)], strings.TrimSuffix(base, modelfiles.IndexSuffix)
	var paths []string
	if source.Remote(index.path) {
		// a store that does not list the folder lists it to no reader
		paths, _ = open.List(ctx, dir, w.spec.Storage.Options)
	} else {
		folder := atomicfile.Folder(index.path)
		entries, err := os.ReadDir(folder)
		// Into a folder that does not let this user list it can be written; the save reports one that is absent.
		if err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, fs.ErrPermission) {
			return false, atomicfile.Failed(folder, -1, err)
		}
		for _, e := range entries {
			paths = append(paths, e.Name())
		}
	}
	there, weights := map[string]bool{}, old != nil
	for _, path := range paths {
		name := filepath.Base(path)
		there[name] = true
		n, ok := modelfiles.ParseName(name)
		weights = weights || name == base || slices.Contains(index.listing.usual, name) ||
			ok && !n.Index && !n.Marked && (n.Of > 0 || name != single) && !w.ours[name]
	}
	index.listing.there = there
	return weights, nil
}

func (index *outputFile) renameShards(parts []outputFile, name func(string) string) {
	for k := range parts {
		if p := &parts[k]; p.shard {
			old := filepath.Base(p.path)
			p.path, p.like = p.path[:len(p.path)-len(old)]+name(old), p.path
		}
	}
	files := make([]string, len(index.listing.Files))
	for i, old := range index.listing.Files {
		files[i] = name(old)
	}
	index.listing.Files = files
	index.laid = wholeFile(safetensors.AppendIndexJSON(nil, *index.listing.Shards))
}

// stale lists, by name, the files beside an index that the set makes stale: those of the
// old index, and of the names that its own files usually have. What belongs to other
// models stays.
func (index *outputFile) stale(old *safetensors.Shards) (names []string) {
	ours := index.familiesOf()
	for _, name := range index.listing.usual {
		if index.listing.there[name] {
			names = append(names, name)
		}
	}
	if old != nil {
		for _, name := range old.Files {
			if ours[modelfiles.Family(name)] && !slices.Contains(names, name) {
				names = append(names, name)
			}
		}
	}
	return slices.DeleteFunc(names, func(name string) bool { return slices.Contains(index.listing.Files, name) })
}

func (index *outputFile) familiesOf() map[string]bool {
	out := map[string]bool{}
	if index.listing != nil {
		for _, name := range index.listing.usual {
			out[modelfiles.Family(name)] = true
		}
	}
	return out
}

// abandonedFiles lists what killed saves of some families have left in a local folder: marked
// files and, if numbered, other shards, without those that a save still holds.
func abandonedFiles(dir string, families map[string]bool, numbered bool) (paths []string) {
	entries, _ := os.ReadDir(dir)
	for _, e := range entries {
		n, ok := modelfiles.ParseName(e.Name())
		if ok && !n.Index && (n.Marked || numbered && n.Of > 0) && families[modelfiles.Family(e.Name())] {
			if path := joinName(dir, e.Name()); !atomicfile.Alive(path) {
				paths = append(paths, path)
			}
		}
	}
	return paths
}
