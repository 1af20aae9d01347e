package convert

// This file creates and checks the folders that models are written to, and copies auxiliary files to them.

import (
	"context"
	"errors"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/overwire/overwire/gosrc/companions"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/atomicfile"
	"github.com/overwire/overwire/gosrc/internal/modelfiles"
	"github.com/overwire/overwire/gosrc/job"
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
	return writeFolder(ctx, newConversion(&spec, j), w, nil, []string{src}, to, files, branch{})
}
