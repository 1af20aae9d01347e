package save

// This file finds what users name in stores: folders, and the models in them.

import (
	"context"
	"errors"
	"path/filepath"
	"slices"
	"strings"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/format"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/source/open"
)

// remoteFolder is the URI of a remote folder, pinned to a commit where it is one of hf://,
// and the files in it and below it; dir is "" for all else. A store that lists no files
// has none to tell of.
func remoteFolder(ctx context.Context, uri string, opt source.Options) (dir string, files []source.Entry, err error) {
	stores := open.With(opt)
	dir = format.RemoteFolder(ctx, source.LocationOf(uri), stores.Open, format.Options{List: stores.List})
	if dir == "" {
		return "", nil, nil
	}
	at, files, err := open.Walk(ctx, dir, opt)
	if errors.Is(err, errs.ErrNotSupported) {
		source.Notice(errs.RedactURI(dir) +
			": this store lists no files, so what lies beside the weights (configuration, tokenizer) is not copied")
		return dir, nil, nil
	}
	return at, files, err
}

// branchesOf are the folders of a source folder that hold files; avoid is the one that is
// written. None: src is no folder, or a store does not list it.
func branchesOf(dir, avoid string, files []source.Entry) ([]format.Branch, error) {
	switch {
	case !source.Remote(dir):
		return format.Tree(dir, avoid)
	case files == nil:
		return nil, nil
	case source.Remote(avoid):
		return format.RemoteTree(dir, source.Directory(avoid), files)
	}
	return format.RemoteTree(dir, "", files)
}

// inFolder are the files of a folder below the one of files.
func inFolder(files []source.Entry, folder string) (in []source.Entry) {
	for _, f := range files {
		if name, ok := strings.CutPrefix(f.Name, folder+"/"); folder == "" || ok {
			if folder == "" {
				name = f.Name
			}
			in = append(in, source.Entry{Name: name, Size: f.Size})
		}
	}
	return in
}

// urisIn are the files that lie in a remote folder itself.
func urisIn(dir string, files []source.Entry) (uris []string) {
	for _, f := range files {
		if !strings.Contains(f.Name, "/") {
			uris = append(uris, source.Beside(dir, f.Name))
		}
	}
	return uris
}

// pathBelow is a folder below another, on this machine or in a store.
func pathBelow(dir, name string) string {
	if name == "" {
		return dir
	}
	if source.Remote(dir) {
		return source.Below(source.Directory(dir), name)
	}
	return filepath.Join(dir, name)
}

// Opened opens what users name: folders without weights of their own stand for those below
// them that have some.
func Opened[T any](ctx context.Context, uris []string, opt source.Options, openAll func(uris []string) (T, error)) (T,
	error) {
	uris = spreadFolders(ctx, uris, opt, false)
	m, err := openAll(uris)
	if !errors.Is(err, errs.ErrNotFound) { // a store is asked what lies below a folder when that has no model
		return m, err
	}
	below := spreadFolders(ctx, uris, opt, true)
	if slices.Equal(below, uris) {
		return m, err
	}
	return openAll(below)
}

// spreadFolders replaces each folder without weights of its own by the folders below it that have
// some: local folders, or remote ones.
func spreadFolders(ctx context.Context, uris []string, opt source.Options, remote bool) (out []string) {
	for _, uri := range uris {
		dir, files, err := source.WithoutScheme(uri), []source.Entry(nil), error(nil)
		if source.Remote(uri) && remote {
			dir, files, err = remoteFolder(ctx, uri, opt)
		}
		var below []string
		if branches, treeErr := branchesOf(dir, "", files); err == nil && treeErr == nil && len(branches) > 0 &&
			!branches[len(branches)-1].Weights {
			for _, b := range branches {
				if b.Weights {
					below = append(below, pathBelow(dir, b.Path))
				}
			}
		}
		if len(below) == 0 {
			below = []string{uri} // opening it reports what is wrong
		}
		out = append(out, below...)
	}
	return out
}
