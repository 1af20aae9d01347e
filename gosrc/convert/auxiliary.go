package convert

// This file copies the auxiliary files of source folders, and writes prewritten files.

import (
	"context"
	"maps"
	"path/filepath"
	"slices"

	"github.com/overwire/overwire/gosrc/companions"
	"github.com/overwire/overwire/gosrc/internal/modelfiles"
	"github.com/overwire/overwire/gosrc/job"
	"github.com/overwire/overwire/gosrc/save"
	"github.com/overwire/overwire/gosrc/save/publish"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/source/open"
)

// addCompanions adds the auxiliary files of source folders before the files of the model, because files that refer to
// others must be last. left lists the files that are not copied. A weight file may be a link to anywhere, because
// only its tensors are copied.
func addCompanions(c *conversion, src []string, to save.Target, files []save.File, in branch) (all []save.File,
	left []string, err error) {
	taken := map[string]bool{}
	for i := range files {
		taken[filepath.Base(files[i].Path)] = true
		if l := files[i].Listing; l != nil {
			for _, name := range l.Files {
				taken[name] = true
			}
		}
	}
	maps.Copy(taken, in.ours)
	for _, s := range src {
		found, skipped, err := companions.Find(folderOf(c, s, to.Path, in), taken)
		if err != nil {
			return nil, nil, err
		}
		for _, f := range found {
			taken[f.Name] = true
			one := copyOf(f, publish.JoinName(to.Path, f.Name))
			if f.Mode != 0 {
				one.Mode = f.Mode | 0o600
			}
			all = append(all, save.File{File: one})
		}
		left = append(left, skipped...)
	}
	return append(all, files...), left, nil
}

// listAuxiliary lists the auxiliary files of source folders that are converted to a single file. None is copied.
func listAuxiliary(c *conversion, src []string, in branch) (left []string) {
	for _, s := range src {
		// ignore errors: nothing is copied here
		found, skipped, _ := companions.Find(folderOf(c, s, "", in), nil)
		for _, f := range found {
			left = append(left, f.Path)
		}
		left = append(left, slices.DeleteFunc(skipped, func(path string) bool {
			_, weights := modelfiles.ParseName(source.Name(path))
			return weights
		})...)
	}
	return left
}

// folderOf returns the folder in which to look for the auxiliary files of a source.
func folderOf(c *conversion, src, avoid string, in branch) companions.Folder {
	path := src
	if at := source.LocationOf(src); !at.Remote {
		path = at.Path
	}
	return companions.Folder{Path: path, Root: in.root, Avoid: avoid, Below: in.folders, Files: in.files,
		Open: c.stores.Open}
}

// copyOf plans the copy of an auxiliary file.
func copyOf(f companions.File, path string) publish.File {
	return publish.File{Path: path, Copied: true, Content: &publish.Prewritten{Bytes: f.Size,
		Fill: func(ctx context.Context, write func(p []byte, off int64) error) error {
			return companions.CopyFile(ctx, f, write)
		}}}
}

// WritePrewritten writes the files of one model to spec.Path or, if there are several, to shards with that name and an
// index. spec.Path may be a folder; see Convert. Then the files are named after stem, and the auxiliary files of the
// folder src are copied, unless it is "".
func WritePrewritten(ctx context.Context, j *job.Job, src, stem string, contents []publish.Prewritten, spec save.Spec) (
	rep save.Report, err error) {
	to, err := resolve(spec.Path, &spec)
	if err != nil {
		return rep, err
	}
	isDir := isFolder(to, []string{src}, 1)
	target := pathIn(isDir, to, stem)
	w := save.NewWriter(target, &spec, j)
	files := make([]save.File, len(contents))
	for k := range contents {
		files[k].Content = &contents[k]
	}
	files = save.NameFiles(target.Path, files)
	if !isDir {
		return w.Write(ctx, files)
	}
	c := newConversion(&spec, j, open.With(spec.Storage.Options))
	return writeFolder(ctx, c, w, nil, []string{src}, to, files, branch{})
}
