package convert

// This file creates and checks the folders that models are written to.

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/atomicfile"
	"github.com/overwire/overwire/gosrc/internal/modelfiles"
	"github.com/overwire/overwire/gosrc/save"
	"github.com/overwire/overwire/gosrc/save/publish"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/source/open"
)

// resolve is save.Resolve, but treats an existing folder as a folder even if its name has a file extension.
func resolve(dst string, spec *save.Spec) (save.Target, error) {
	if st, err := os.Stat(source.LocationOf(dst).Path); err == nil && st.IsDir() {
		dst = publish.JoinName(dst, "")
	}
	return save.Resolve(dst, spec)
}

// isFolder reports whether the target is a folder. A target that does not exist is a folder
// if the source is a folder or has several files, unless its name has a file extension.
func isFolder(to save.Target, src []string, files int) bool {
	if strings.HasSuffix(to.Path, string(filepath.Separator)) {
		return true
	}
	if !to.Remote {
		if st, err := os.Stat(to.Path); err == nil {
			return st.IsDir()
		}
	}
	if len(src) == 0 || to.Named {
		return false
	}
	from := source.LocationOf(src[0])
	if !from.Remote {
		st, err := os.Stat(from.Path)
		from.Folder = err == nil && st.IsDir()
	}
	return files > 1 || len(src) == 1 && (from.Folder || namesIndex(from.Path))
}

// pathIn returns the file to write, or the path from which shard names are made.
func pathIn(folder bool, to save.Target, stem string) save.Target {
	if folder {
		return to.At(publish.JoinName(to.Path, stem+publish.Extension))
	}
	return to
}

// makeFolder creates the target's folder if it is missing. It returns the path if it created the folder. Stores need no
// folders.
func makeFolder(to save.Target) (made string, err error) {
	if to.Remote {
		return "", nil
	}
	isNew, err := atomicfile.MakeFolder(to.Path)
	if isNew {
		made = to.Path
	}
	return made, err
}

// refuseOthers refuses a folder that contains weights under names that this conversion does not write, because the
// folder would then be opened as two models. A folder may be converted onto itself; a local one only if its files are
// not renamed.
func refuseOthers(ctx context.Context, to save.Target, src []string, renamed bool, ours map[string]bool,
	opt source.Options) error {
	others := func(name string) error {
		if _, weights := modelfiles.ParseName(name); weights && !ours[name] && !ours[modelfiles.WithMark(name, "")] {
			return errs.In("save", to.Path, errs.New(errs.ErrArgument,
				"the folder contains other weights (%s): choose an empty folder", name))
		}
		return nil
	}
	if to.Remote {
		names, err := open.List(ctx, to.Path, opt)
		if errors.Is(err, errs.ErrNotFound) || errors.Is(err, errs.ErrNotSupported) ||
			err == nil && slices.Contains(src, to.Path) {
			return nil
		}
		for i := 0; i < len(names) && err == nil; i++ {
			err = others(filepath.Base(names[i]))
		}
		return err
	}
	here, err := os.Stat(to.Path)
	if err != nil {
		return atomicfile.Failed(to.Path, -1, err)
	}
	for _, s := range src {
		if st, err := os.Stat(source.LocationOf(s).Path); err == nil && os.SameFile(st, here) && !renamed {
			return nil
		}
	}
	names, err := os.ReadDir(to.Path)
	if err != nil {
		return atomicfile.Failed(to.Path, -1, err)
	}
	for _, n := range names {
		if err := others(n.Name()); err != nil {
			return err
		}
	}
	return nil
}
