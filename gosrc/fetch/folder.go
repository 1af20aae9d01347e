package fetch

// This file fetches whole folders.

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

// A FolderReport describes a fetched folder.
type FolderReport struct {
	Bytes   int64    `json:"bytes"`
	Seconds float64  `json:"seconds"`
	Files   []string `json:"files"`
}

// Folder fetches the files of a remote folder and its subfolders into the folder dst, weights first. It omits
// hidden files. From the Hub, all files come from one commit. A new dst becomes visible when it is complete.
// Until then it has a hidden name, and a later run resumes an interrupted fetch, as in File. Names that lead
// out of dst are refused before anything is written.
func Folder(ctx context.Context, j *job.Job, uri, dst string, opt source.Options) (rep FolderReport, err error) {
	start := time.Now()
	dir, files, err := filesOf(ctx, uri, opt)
	if err != nil {
		return rep, err
	}
	for _, f := range files {
		if j != nil {
			j.TotalBytes.Add(max(0, f.Size))
		}
	}
	work, some := dst, false
	var partial *atomicfile.PartialFolder // nil if dst exists
	if st, statErr := os.Stat(dst); statErr != nil || !st.IsDir() {
		if err := atomicfile.CheckFolder(dst); err != nil {
			return rep, err
		}
		if partial, err = atomicfile.OpenPartialFolder(dst); err != nil {
			return rep, err
		}
		work = partial.Work
		defer func() {
			if err == nil {
				err = partial.Publish()
			}
			partial.Close(err != nil && !some)
		}()
	}
	defer func() {
		if err != nil && some {
			source.Notice(dst + ": the files fetched so far are saved: run fetch again to resume")
		}
	}()
	paths := make([]string, len(files))
	for i, f := range files {
		paths[i] = filepath.Join(work, filepath.FromSlash(f.Name))
	}
	if partial != nil {
		if err := partial.KeepOnly(paths); err != nil {
			return rep, err
		}
	}
	for i, f := range files {
		if err := atomicfile.MakeFolders(filepath.Dir(paths[i])); err != nil {
			return rep, errs.In("fetch", paths[i], err)
		}
		spec := Spec{URIs: []string{source.Beside(dir, f.Name)}, Storage: opt, Own: true, counted: true}
		one, any, err := bringObject(ctx, j, spec, paths[i], true)
		rep.Bytes += one.Bytes
		if some = some || any; err != nil {
			return rep, err
		}
		rep.Files = append(rep.Files, filepath.Join(dst, filepath.FromSlash(f.Name)))
	}
	for _, path := range paths {
		atomicfile.ForgetPartial(path)
	}
	rep.Seconds = time.Since(start).Seconds()
	return rep, nil
}

// filesOf lists the files of a remote folder in the order in which they are fetched.
func filesOf(ctx context.Context, uri string, opt source.Options) (dir string, files []source.Entry, err error) {
	dir, files, err = open.With(opt).Walk(ctx, uri)
	if err != nil {
		return "", nil, err
	}
	files = slices.DeleteFunc(files, func(f source.Entry) bool {
		return filepath.IsLocal(f.Name) && (strings.HasPrefix(f.Name, ".") || strings.Contains(f.Name, "/."))
	})
	for _, f := range files {
		if !filepath.IsLocal(f.Name) || path.Clean(f.Name) != f.Name || strings.ContainsRune(f.Name, 0) {
			return "", nil, errs.In("fetch", uri, errs.New(errs.ErrFormat, "%q is not a valid file name",
				f.Name))
		}
	}
	slices.SortStableFunc(files, func(a, b source.Entry) int { return order(a.Name) - order(b.Name) })
	return dir, files, nil
}

// order returns 0 for weights, 1 for their indexes, and 2 for other files, which are fetched in this order.
// Files such as config.json, by which programs recognize a model, are fetched last.
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
