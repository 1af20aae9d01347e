package stored

// This file finds models in local folders and in stores.

import (
	"context"
	"errors"
	"path/filepath"
	"slices"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/format"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/source/open"
)

// A Folder is a folder with models, and a list of its contents if it is remote.
type Folder struct {
	Path   string // a local path or a URI
	Remote bool
	Files  []source.Entry // remote: the files in it and its subfolders; nil if the store cannot list files
}

// FolderAt returns the folder for a name. It lists a remote folder, and pins an hf:// folder to a commit. ok is false
// if the name is a remote file. Local names are not looked up.
func FolderAt(ctx context.Context, at source.Location, opt source.Options) (f Folder, ok bool, err error) {
	if !at.Remote {
		return Folder{Path: at.Path}, true, nil
	}
	stores := open.With(opt)
	dir := format.RemoteFolder(ctx, at, stores.OpenLike, format.Options{List: stores.List})
	if dir == "" {
		return Folder{Path: at.URI, Remote: true}, false, nil
	}
	pinned, files, err := open.Walk(ctx, dir, opt)
	if errors.Is(err, errs.ErrNotSupported) {
		source.Notice(errs.RedactURI(dir) +
			": this store cannot list files, so auxiliary files (configuration, tokenizer) are not copied")
		return Folder{Path: dir, Remote: true}, true, nil
	}
	return Folder{Path: pinned, Remote: true, Files: files}, true, err
}

// Branches lists f and its subfolders that contain files, except the folder avoid, which is being written. The list is
// empty if f is not a folder, or if its store cannot list it.
func (f Folder) Branches(avoid string) ([]format.Branch, error) {
	switch {
	case !f.Remote:
		return format.Tree(f.Path, avoid)
	case f.Files == nil:
		return nil, nil
	case source.Remote(avoid):
		return format.RemoteTree(f.Path, source.Directory(avoid), f.Files)
	}
	return format.RemoteTree(f.Path, "", f.Files)
}

// PathBelow returns the path or URI of the folder name below dir. If name is "", it returns dir.
func PathBelow(dir, name string) string {
	switch {
	case name == "":
		return dir
	case source.Remote(dir):
		return source.Below(source.Directory(dir), name)
	}
	return filepath.Join(dir, name)
}

// ExpandFolders resolves names from users and opens them with openAll. A folder that directly contains no weights
// stands for its subfolders with weights. For a remote folder, subfolders are listed only if the folder itself has no
// model.
func ExpandFolders[T any](ctx context.Context, uris []string, opt source.Options,
	openAll func(uris []string) (T, error)) (T, error) {
	uris = expandAll(ctx, uris, opt, false)
	m, err := openAll(uris)
	if !errors.Is(err, errs.ErrNotFound) {
		return m, err
	}
	below := expandAll(ctx, uris, opt, true)
	if slices.Equal(below, uris) {
		return m, err
	}
	return openAll(below)
}

func expandAll(ctx context.Context, uris []string, opt source.Options, remote bool) (out []string) {
	for _, uri := range uris {
		below := []string{uri} // if it does not exist, opening it reports that
		if at := source.LocationOf(uri); !at.Remote || remote {
			below = weightsBelow(ctx, at, opt, below)
		}
		out = append(out, below...)
	}
	return out
}

// weightsBelow lists the subfolders with weights of a folder that directly contains none. Otherwise it returns usual.
func weightsBelow(ctx context.Context, at source.Location, opt source.Options, usual []string) (below []string) {
	f, ok, err := FolderAt(ctx, at, opt)
	if err != nil || !ok {
		return usual
	}
	branches, err := f.Branches("")
	if err != nil || len(branches) == 0 || branches[len(branches)-1].Weights {
		return usual
	}
	for _, b := range branches {
		if b.Weights {
			below = append(below, PathBelow(f.Path, b.Path))
		}
	}
	if below == nil {
		return usual
	}
	return below
}
