package publish

// This file names the files of a set as no file of the earlier set is named: both sets are whole until the new
// index.json replaces the old one, in one step. It lists the files that this makes stale.

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/format/safetensors"
	"github.com/overwire/overwire/gosrc/internal/atomicfile"
	"github.com/overwire/overwire/gosrc/internal/modelfiles"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/source/open"
)

// A Listing is the content of an index.json that is written.
type Listing struct {
	*safetensors.Shards
	usual []string        // the names of its files before they were chosen
	there map[string]bool // the names that the folder had then, if the store lists them
}

// IndexOf is the index.json that lists shards.
func IndexOf(path string, shards *safetensors.Shards) File {
	return File{Path: path, Content: WholeFile(safetensors.AppendIndexJSON(nil, *shards)),
		Listing: &Listing{Shards: shards}}
}

// checkListable refuses names that no index.json can list: JSON is UTF-8.
func checkListable(files []*File) error {
	if last := files[len(files)-1]; !strings.HasSuffix(last.Path, ".index.json") {
		return nil
	}
	for _, f := range files[:len(files)-1] {
		if name := filepath.Base(f.Path); !f.Copied && !utf8.ValidString(name) {
			return errs.Locate("save", f.Path, "", -1, errs.New(errs.ErrArgument,
				"the name is not valid UTF-8, which an index.json cannot list: choose another name, or save one file"))
		}
	}
	return nil
}

// refuseNextToIndex refuses a single file next to the index of shards of the same name: the folder would still
// be loaded by that index, as the old model.
func refuseNextToIndex(ctx context.Context, p *Publication, files []*File) error {
	path := files[len(files)-1].Path
	if p.AllowIndex || p.Sharded || len(files) > 1 || !strings.HasSuffix(path, Extension) {
		return nil
	}
	if !source.Remote(path) {
		place, err := p.followPath(path)
		if err != nil {
			return nil // the write reports it
		}
		path = place.Path
	}
	index := IndexPath(path)
	shards, err := p.readIndex(ctx, index)
	if errors.Is(err, errs.ErrTimeout) || errors.Is(err, errs.ErrIO) && source.Remote(path) {
		return err // a store that does not answer would also fail the save
	}
	if shards == nil || err != nil || slices.Contains(shards.Files, filepath.Base(path)) {
		return nil // no folder is loaded by this index
	}
	return errs.Locate("save", path, "", -1, errs.New(errs.ErrArgument,
		"its folder has %s, which still names the old model: remove it and its shards first, or save "+
			"with max_shard_size (--shard), which replaces them", filepath.Base(index)))
}

// chooseNames leaves shards their names, or marks them (modelfiles.Mark) if the folder has an earlier set: an
// index, files of these names, or weights that no index lists (except one file of the index's name: without an
// index, shards next to that are not a model). Names that return after two saves would mix two sets for a slow
// reader.
func chooseNames(ctx context.Context, p *Publication, files []*File) error {
	last := files[len(files)-1]
	if last.Listing == nil {
		return nil
	}
	if !source.Remote(last.Path) {
		if err := atomicfile.Check(last.Path); err != nil {
			return err
		}
	}
	for _, f := range files {
		if f.Shard {
			last.Listing.usual = append(last.Listing.usual, filepath.Base(f.Path))
		}
	}
	earlier, err := hasEarlierSet(ctx, p, last)
	if err != nil || !earlier {
		return err
	}
	mark := modelfiles.Mark()
	renameShards(files, func(name string) string { return modelfiles.WithMark(name, mark) })
	return nil
}

// hasEarlierSet reports whether the folder of an index has an earlier set. It notes the names that are there.
func hasEarlierSet(ctx context.Context, p *Publication, index *File) (bool, error) {
	old, err := p.readIndex(ctx, index.Path)
	if err != nil && (source.Remote(index.Path) || !listsNothing(err)) {
		return false, err
	}
	base := filepath.Base(index.Path)
	single := strings.TrimSuffix(base, modelfiles.IndexSuffix)
	var paths []string
	if source.Remote(index.Path) {
		// a store that does not list the folder lists it to no reader
		paths, _ = open.List(ctx, strings.TrimSuffix(index.Path, base), p.Options)
	} else {
		folder := atomicfile.Folder(index.Path)
		entries, err := os.ReadDir(folder)
		// A folder may be writable without being readable; the save reports one that is absent.
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
		weights = weights || name == base || slices.Contains(index.Listing.usual, name) ||
			ok && !n.Index && !n.Marked && (n.Of > 0 || name != single) && !p.Others[name]
	}
	index.Listing.there = there
	return weights, nil
}

// renameShards renames the shards of a set. The index is the last file.
func renameShards(files []*File, rename func(string) string) {
	for _, f := range files {
		if f.Shard {
			old := filepath.Base(f.Path)
			f.Path, f.like = strings.TrimSuffix(f.Path, old)+rename(old), f.Path
		}
	}
	index := files[len(files)-1]
	names := make([]string, len(index.Listing.Files))
	for i, old := range index.Listing.Files {
		names[i] = rename(old)
	}
	index.Listing.Files = names
	index.Content = WholeFile(safetensors.AppendIndexJSON(nil, *index.Listing.Shards))
}

// staleFiles lists the files that a set at a path makes stale, by the index that was there: the file at the path
// itself (if there are several now), the index (if there is one file now), and the shards that it listed. With an
// error it lists what is known without an index.
func staleFiles(ctx context.Context, p *Publication, path string, last *File) (old []string, err error) {
	if p.Sharded {
		old = append(old, path)
	}
	var shards *safetensors.Shards
	switch {
	case last.Listing != nil:
		shards, err = p.readIndex(ctx, last.Path)
		for _, name := range last.Listing.stale(shards) {
			old = append(old, strings.TrimSuffix(last.Path, filepath.Base(last.Path))+name)
		}
	case p.Sharded:
		index := IndexPath(path)
		shards, err = p.readIndex(ctx, index)
		old = append(append(old, index), shardsOf(path, shards)...)
	}
	return old, err
}

// shardsOf are the files of a path's old index that are named after it.
func shardsOf(path string, old *safetensors.Shards) (paths []string) {
	dir, stem := SplitStem(path)
	if old == nil {
		return nil
	}
	for _, name := range old.Files {
		if modelfiles.Family(name) == stem {
			paths = append(paths, JoinName(dir, name))
		}
	}
	return paths
}

// stale lists, by name, the files next to an index that the set makes stale: those of the old index, and those
// with the names that its own files usually have. Files of other models stay.
func (l *Listing) stale(old *safetensors.Shards) (names []string) {
	ours := l.families()
	for _, name := range l.usual {
		if l.there[name] {
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
	return slices.DeleteFunc(names, func(name string) bool { return slices.Contains(l.Files, name) })
}

// families are those of the names that its files usually have.
func (l *Listing) families() map[string]bool {
	out := map[string]bool{}
	for _, name := range l.usual {
		out[modelfiles.Family(name)] = true
	}
	return out
}

// listsNothing reports whether the error of an index says that this process has none, and not that a disk or a
// server has failed.
func listsNothing(err error) bool {
	return errors.Is(err, errs.ErrPermission) || errors.Is(err, errs.ErrArgument) ||
		errors.Is(err, errs.ErrNotSupported)
}
