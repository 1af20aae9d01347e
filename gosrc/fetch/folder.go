package fetch

// This file brings whole folders.

import (
	"context"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/atomicfile"
	"github.com/overwire/overwire/gosrc/internal/modelfiles"
	"github.com/overwire/overwire/gosrc/job"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/source/open"
)

// A FolderReport says what of a folder was fetched.
type FolderReport struct {
	Bytes   int64    `json:"bytes"`
	Seconds float64  `json:"seconds"`
	Files   []string `json:"files"`
}

// Folder brings the files of a remote folder, and of those below it, into the folder dst,
// weights first; hidden ones are left out. Of the Hub they are those of one commit. Each
// appears complete; if one fails, a dst that was made is removed. Names that lead out of dst
// are refused before anything is written.
func Folder(ctx context.Context, j *job.Job, uri, dst string, opt source.Options) (rep FolderReport, err error) {
	start := time.Now()
	dir, files, err := open.Walk(ctx, uri, opt)
	if err != nil {
		return rep, err
	}
	files = slices.DeleteFunc(files, func(f source.Entry) bool {
		return filepath.IsLocal(f.Name) && (strings.HasPrefix(f.Name, ".") || strings.Contains(f.Name, "/."))
	})
	for _, f := range files {
		if !filepath.IsLocal(f.Name) || path.Clean(f.Name) != f.Name || strings.ContainsRune(f.Name, 0) {
			return rep, errs.In("fetch", uri, errs.New(errs.ErrFormat,
				"%q is not a valid name of a file in a folder", f.Name))
		}
		if j != nil {
			j.TotalBytes.Add(max(0, f.Size))
		}
	}
	slices.SortStableFunc(files, func(a, b source.Entry) int { return order(a.Name) - order(b.Name) })
	isNew, err := atomicfile.MakeFolder(dst)
	if err != nil {
		return rep, err
	}
	defer func() {
		if err != nil && isNew {
			_ = os.RemoveAll(dst)
		}
	}()
	for _, f := range files {
		to := filepath.Join(dst, filepath.FromSlash(f.Name))
		if err := atomicfile.MakeFolders(filepath.Dir(to)); err != nil {
			return rep, errs.In("fetch", to, err)
		}
		err := atomicfile.With(to, func(w *os.File) error {
			one, err := Fetch(ctx, j, Spec{URIs: []string{source.Beside(dir, f.Name)}, Storage: opt, Own: true,
				counted: true}, w)
			rep.Bytes += one.Bytes
			return err
		})
		if err != nil {
			return rep, err
		}
		rep.Files = append(rep.Files, to)
	}
	rep.Seconds = time.Since(start).Seconds()
	return rep, nil
}

// order puts weights first, then their indexes, and last the files that refer to both: a folder with only some of its
// files is not a model yet.
func order(name string) int {
	n, weights := modelfiles.ParseName(path.Base(name))
	switch {
	case weights && !n.Index:
		return 0
	case weights:
		return 1
	}
	return 2
}
