package publish

// This file gives the files of a set new names, which differ from those of the earlier set. Both sets are therefore
// complete until the new index.json replaces the old one in one step. It also lists the files that become stale.

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

// A Listing is the content of an index.json to write.
type Listing struct {
	*safetensors.Shards
	usual []string        // the names of its files before chooseNames marks them
	there map[string]bool // the names in the folder at that time, if the store lists them
}

// IndexOf returns the index.json that lists shards.
func IndexOf(path string, shards *safetensors.Shards) File {
	return File{Path: path, Content: WholeFile(safetensors.AppendIndexJSON(nil, *shards)),
		Listing: &Listing{Shards: shards}}
}

// checkListable refuses names that an index.json cannot list because they are not UTF-8.
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

// refuseNextToIndex refuses to write a single file next to a shard index of the same name, because readers of the
// folder would follow the index and still load the old model.
func refuseNextToIndex(ctx context.Context, p *Publication, files []*File) error {
	path := files[len(files)-1].Path
	if p.AllowIndex || p.Sharded || len(files) > 1 || !strings.HasSuffix(path, Extension) {
		return nil
	}
	if !source.Remote(path) {
		place, err := p.followPath(path)
		if err != nil {
			return nil // the write will report the error
		}
		path = place.Path
	}
	index := IndexPath(path)
	shards, err := p.readIndex(ctx, index)
	if errors.Is(err, errs.ErrTimeout) || errors.Is(err, errs.ErrIO) && source.Remote(path) {
		return err // if the store does not answer, the save would fail anyway
	}
	if shards == nil || err != nil || slices.Contains(shards.Files, filepath.Base(path)) {
		return nil // no readable index, or it lists this file
	}
	return errs.Locate("save", path, "", -1, errs.New(errs.ErrArgument,
		"its folder has %s, which still lists the old model: remove it and its shards first, or save "+
			"with max_shard_size (--shard), which replaces them", filepath.Base(index)))
}

// chooseNames marks the names of shards (modelfiles.Mark) if the folder has an earlier set: an index, files with these
// names, or weights that no index lists. A single file with the index's stem does not count, because shards next to it
// are not a model without an index. A mark is used only once; otherwise a slow reader could mix two sets.
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

// hasEarlierSet reports whether the folder of an index has an earlier set. It records the names in the folder.
func hasEarlierSet(ctx context.Context, p *Publication, index *File) (bool, error) {
	old, err := p.readIndex(ctx, index.Path)
	if err != nil && (source.Remote(index.Path) || !listsNothing(err)) {
		return false, err
	}
	base := filepath.Base(index.Path)
	single := strings.TrimSuffix(base, modelfiles.IndexSuffix)
	var paths []string
	if source.Remote(index.Path) {
		// if the store does not list the folder, readers cannot list it either
		paths, _ = open.List(ctx, strings.TrimSuffix(index.Path, base), p.Options)
	} else {
		folder := atomicfile.Folder(index.Path)
		entries, err := os.ReadDir(folder)
		// A folder may be writable without being readable. If it does not exist, the save reports that later.
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

// renameShards renames the shards of a set and updates the index, which is the last file.
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

// staleFiles lists the files that a set at a path makes stale, according to the old index: the file at the path
// itself (if there are several files now), the index (if there is one file now), and the shards that it listed. If it
// returns an error, old lists only the files that are known without the index.
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

// shardsOf returns the files in a path's old index that are named after the path.
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

// stale lists the names of files next to an index that the set makes stale: files of the old index, and files with the
// usual names of the set's files. Files of other models are not listed.
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

// families returns the families of the usual names of the set's files.
func (l *Listing) families() map[string]bool {
	out := map[string]bool{}
	for _, name := range l.usual {
		out[modelfiles.Family(name)] = true
	}
	return out
}

// listsNothing reports whether an error from reading an index means that there is no index that this process can
// read, and not that a disk or a server has failed.
func listsNothing(err error) bool {
	return errors.Is(err, errs.ErrPermission) || errors.Is(err, errs.ErrArgument) ||
		errors.Is(err, errs.ErrNotSupported)
}
