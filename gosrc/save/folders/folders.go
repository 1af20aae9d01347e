// Package folders makes and checks the folders that a save writes models to.
package folders

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/atomicfile"
	"github.com/overwire/overwire/gosrc/internal/modelfiles"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/source/open"
)

// Make makes dst if it is missing, and returns it if it was made. Stores need no
// folders.
func Make(dst string) (made string, err error) {
	if source.Remote(dst) {
		return "", nil
	}
	isNew, err := atomicfile.MakeFolder(dst)
	if isNew {
		made = dst
	}
	return made, err
}

// RefuseOthers refuses a folder that has other weights than ours, by name, since it would then
// be opened as two models. Files of a folder of src that is converted onto itself are
// allowed, of a local one if its files keep their names.
func RefuseOthers(ctx context.Context, dst string, src []string, renamed bool, ours map[string]bool,
	opt source.Options) error {
	others := func(name string) error {
		if _, weights := modelfiles.ParseName(name); weights && !ours[name] && !ours[modelfiles.WithMark(name, "")] {
			return errs.In("save", dst, errs.New(errs.ErrArgument,
				"the folder holds other weights (%s): choose an empty one", name))
		}
		return nil
	}
	if source.Remote(dst) {
		names, err := open.List(ctx, dst, opt)
		if errors.Is(err, errs.ErrNotFound) || errors.Is(err, errs.ErrNotSupported) ||
			err == nil && slices.Contains(src, dst) {
			return nil
		}
		for i := 0; i < len(names) && err == nil; i++ {
			err = others(filepath.Base(names[i]))
		}
		return err
	}
	here, err := os.Stat(dst)
	if err != nil {
		return atomicfile.Failed(dst, -1, err)
	}
	for _, s := range src {
		if st, err := os.Stat(source.WithoutScheme(s)); err == nil && os.SameFile(st, here) && !renamed {
			return nil
		}
	}
	names, err := os.ReadDir(dst)
	if err != nil {
		return atomicfile.Failed(dst, -1, err)
	}
	for _, n := range names {
		if err := others(n.Name()); err != nil {
			return err
		}
	}
	return nil
}
