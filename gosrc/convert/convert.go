// Package convert converts models between plain files and containers, in single files, folders and stores. It reads
// with package stored, and writes with package save. It keeps only the index of the sources and a window of chunks in
// memory.
package convert

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/overwire/overwire/gosrc/companions"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/format"
	"github.com/overwire/overwire/gosrc/internal/atomicfile"
	"github.com/overwire/overwire/gosrc/internal/modelfiles"
	"github.com/overwire/overwire/gosrc/job"
	"github.com/overwire/overwire/gosrc/save"
	"github.com/overwire/overwire/gosrc/save/publish"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/source/open"
	"github.com/overwire/overwire/gosrc/stored"
)

// Convert reads tensors from files, folders or an index.json, plain or compressed, and
// writes them according to spec. It keeps only a window of chunks in memory.
//
// If a plain file becomes one container with the same metadata, the container stores what is needed to restore that
// file byte for byte. If such a container is converted to one plain file, the original file is restored.
//
// If dst is a folder, every file keeps its tensors, its metadata and its name, which is marked (see modelfiles.Mark) if
// dst already has a set with these names. The index.json and the auxiliary files of a source folder are copied (see
// package companions). dst must not contain other weights. All models of a folder are converted, including variants. If
// dst is a file, all tensors are written to it, or to its shards, with the metadata of all sources. If these differ,
// the first source wins. dst is a folder if it already is one, if it ends in a slash, or if the source is a folder or
// has several files and dst does not end in
// .safetensors or .tensors. spec.Path is ignored. spec.Metadata overrides that of the sources.
//
// If src is one folder, local or in a store that can list files, its subfolders are converted and copied in the same
// way, so a diffusers pipeline stays complete. The files of the folder itself refer to the others and are written last.
//
// A new file is not readable by more users than its source. A replaced file keeps its mode.
//
// Converting a file onto itself is safe: the old file is read until the new one is complete.
func Convert(ctx context.Context, j *job.Job, src []string, dst string, spec save.Spec) (save.Report, error) {
	start := time.Now()
	to, err := resolve(dst, &spec)
	if err != nil {
		return save.Report{}, err
	}
	rep, err := convertAll(ctx, newConversion(&spec, j), src, to)
	if err != nil {
		return save.Report{}, errs.Place("save", to.Path, "", -1, errs.Ended(ctx, err))
	}
	rep.Seconds = time.Since(start).Seconds()
	rep.HideUsers()
	return rep, nil
}

// convertAll resolves the target and the source, and converts the models in the source.
func convertAll(ctx context.Context, c *conversion, src []string, to save.Target) (save.Report, error) {
	if ext := companions.OtherFormat(to.Path); ext != "" && !to.Named {
		return save.Report{}, errs.In("save", to.Path, errs.New(errs.ErrArgument,
			"cannot write %s files: the output must be a %s or .tensors file, or a folder", ext, publish.Extension))
	}
	if to.Remote && !to.Named {
		if dir := format.RemoteFolder(ctx, source.LocationOf(to.Path), c.stores.OpenLike,
			format.Options{List: c.stores.List}); dir != "" {
			to = to.At(dir)
		}
	}
	if len(src) != 1 {
		return convertModel(ctx, c, src, to, branch{})
	}
	folder, ok, err := stored.FolderAt(ctx, source.LocationOf(src[0]), c.stores)
	if err != nil {
		return save.Report{}, err
	}
	if ok && folder.Remote {
		src = []string{folder.Path}
	}
	in := branch{files: folder.Files}
	if ok && isFolder(to, src, 1) {
		branches, err := folder.Branches(to.Path)
		if err != nil {
			return save.Report{}, err
		}
		if len(branches) > 1 && slices.ContainsFunc(branches, func(b format.Branch) bool { return b.Weights }) {
			return convertTree(ctx, c, folder, to, branches)
		}
		if len(branches) > 0 {
			return convertFolder(ctx, c, folder.Path, to, in)
		}
	}
	return convertModel(ctx, c, src, to, in)
}

// A conversion is one call of Convert.
type conversion struct {
	spec   *save.Spec
	job    *job.Job
	stores *open.Stores // with the options of spec
	wrote  written
}

func newConversion(spec *save.Spec, j *job.Job) *conversion {
	return &conversion{spec: spec, job: j, stores: open.With(spec.Storage.Options),
		wrote: written{files: map[string]fs.FileInfo{}}}
}

// A branch describes the part of a source that is converted next. The zero value is for sources that are not a single
// folder.
type branch struct {
	root    string          // see companions.Folder
	files   []source.Entry  // remote folder: the files in it and its subfolders
	folders bool            // the subfolders are converted separately
	dir     string          // the folder, if it has several models; "" for one model
	ours    map[string]bool // the files of all models in dir
	last    bool            // this is the last model in dir; auxiliary files are copied with it
}

// sourceFolders lists the folders from which models are converted.
func (b branch) sourceFolders(src []string) []string {
	if b.dir != "" {
		return []string{b.dir}
	}
	var out []string
	for _, s := range src {
		if at := source.LocationOf(s); !at.Remote && namesIndex(at.Path) {
			s = atomicfile.Folder(at.Path)
		}
		out = append(out, s)
	}
	return out
}

// namesIndex reports whether a path names an index.json.
func namesIndex(path string) bool {
	n, ok := modelfiles.ParseName(filepath.Base(path))
	return ok && n.Index
}

// convertTree converts each model below a folder to the same path below the target, and copies the auxiliary files. If
// a model fails and the target folder is new, the written files are removed.
func convertTree(ctx context.Context, c *conversion, folder stored.Folder, to save.Target, branches []format.Branch) (
	rep save.Report, err error) {
	undo, err := beginFolder(ctx, c, to, &rep)
	if err != nil {
		return rep, err
	}
	defer func() { err = undo(err) }()
	for _, b := range branches {
		from, below := stored.PathBelow(folder.Path, b.Path), to.At(stored.PathBelow(to.Path, b.Path))
		if b.Parts {
			rep.Left = append(rep.Left, from)
			continue
		}
		in := branch{root: folder.Path, folders: true, files: filesBelow(folder.Files, b.Path)}
		if !to.Remote {
			if err := atomicfile.MakeFolders(below.Path); err != nil {
				return rep, atomicfile.Failed(below.Path, -1, err)
			}
			c.wrote.folders = append(c.wrote.folders, below.Path)
		}
		var one save.Report
		if b.Weights {
			one, err = convertFolder(ctx, c, from, below, in)
		} else {
			one, err = copyFolder(ctx, c, from, below, in)
		}
		rep.Add(one) // after an error, one has the files that are left
		if err != nil {
			if part, ok := errors.AsType[*Partial](err); ok {
				err = part.error // undo lists all files, or removes them
			}
			return rep, err
		}
	}
	return rep, nil
}

// A Partial is the error of a conversion that failed after it had written some models to a folder. The files remain,
// because the folder was not empty before, or a store did not remove them.
type Partial struct {
	error
	Files []string
}

// Error returns why the conversion failed, and which files were written.
func (p *Partial) Error() string {
	return p.error.Error() + "; written before that: " + strings.Join(p.Files, ", ")
}

// Unwrap returns the cause.
func (p *Partial) Unwrap() error { return p.error }

// beginFolder creates the target's folder if it is missing. After an error, undo removes what was written to a folder
// that was created, and the folder unless other programs have put files there. In a store it removes what was written
// if the folder was empty. Files that other programs have replaced stay. If the folder had files before, or if an
// object cannot be removed, undo's error lists the files that stay, as does rep.
func beginFolder(ctx context.Context, c *conversion, to save.Target, rep *save.Report) (undo func(error) error,
	err error) {
	made, err := makeFolder(to)
	if to.Remote {
		if _, listErr := open.List(ctx, to.Path, c.spec.Storage.Options); errors.Is(listErr, errs.ErrNotFound) {
			made = to.Path
		}
	}
	return func(err error) error {
		switch {
		case err == nil:
		case made == "" && len(rep.Files) > 0:
			shown := save.Report{Files: slices.Clone(rep.Files)}
			shown.HideUsers()
			return &Partial{err, shown.Files}
		case made != "" && !to.Remote:
			c.wrote.removeBelow(filepath.Clean(made))
			rep.Files = nil
		case made != "":
			var why error
			if rep.Files, why = publish.UndoAll(c.wrote.objectsBelow(source.Directory(made))); why != nil {
				return &Partial{fmt.Errorf("%w; cannot remove all files: %v", err, errs.Message(why)), rep.Files}
			}
		}
		return err
	}, err
}

// written has what a conversion has written.
type written struct {
	files   map[string]fs.FileInfo // local files
	folders []string               // local folders
	objects []source.Draft         // objects of a store
}

// noteObject notes an object of a store.
func (w *written) noteObject(d source.Draft) { w.objects = append(w.objects, d) }

// objectsBelow returns the objects in a folder and its subfolders.
func (w *written) objectsBelow(folder string) []source.Draft {
	return slices.DeleteFunc(slices.Clone(w.objects), func(d source.Draft) bool {
		return !strings.HasPrefix(d.URI(), folder)
	})
}

// note notes files that were just written.
func (w *written) note(paths []string) {
	for _, path := range paths {
		if st, err := os.Lstat(path); err == nil {
			w.files[path] = st
		}
	}
}

// removeBelow removes the files, except those that other programs have replaced. Then it removes the folders that are
// empty, up to the folder top.
func (w *written) removeBelow(top string) {
	for path, was := range w.files {
		now, err := os.Lstat(path)
		if err == nil && os.SameFile(was, now) && was.Size() == now.Size() && was.ModTime().Equal(now.ModTime()) {
			_ = os.Remove(path)
		}
	}
	for _, path := range append(slices.Clone(w.folders), top) {
		for len(path) >= len(top) && os.Remove(path) == nil {
			path = filepath.Dir(path)
		}
	}
}

// convertFolder converts the models of a folder, but not those in its subfolders. The folder's default model is
// last, together with the auxiliary files.
func convertFolder(ctx context.Context, c *conversion, dir string, to save.Target, in branch) (rep save.Report,
	err error) {
	models, err := format.Models(ctx, dir, urisIn(dir, in.files), c.stores.OpenLike)
	if err != nil {
		return rep, err
	}
	if len(models) == 1 {
		return convertModel(ctx, c, []string{dir}, to, in)
	}
	if c.spec.Shard > 0 {
		var names []string
		for _, m := range models {
			names = append(names, m.Names[0])
		}
		return rep, errs.In("save", to.Path, errs.New(errs.ErrArgument,
			"%s has several models (%s), but only one can be divided into shards: name its file or index.json", dir,
			strings.Join(names, ", ")))
	}
	undo, err := beginFolder(ctx, c, to, &rep)
	if err != nil {
		return rep, err
	}
	defer func() { err = undo(err) }()
	in.dir, in.ours = dir, map[string]bool{}
	for _, m := range models {
		for _, path := range m.Paths {
			in.ours[source.Name(path)] = true
		}
	}
	for i, m := range models {
		in.last = i == len(models)-1
		one, err := convertModel(ctx, c, m.Names, to.At(publish.JoinName(to.Path, "")), in)
		if err != nil {
			return rep, err
		}
		rep.Add(one)
	}
	return rep, nil
}

// copyFolder copies a folder without weights.
func copyFolder(ctx context.Context, c *conversion, from string, to save.Target, in branch) (save.Report, error) {
	files, left, err := addCompanions(c, []string{from}, to, nil, in)
	if err != nil {
		return save.Report{}, err
	}
	spec := *c.spec
	spec.Shard = 0
	w := save.NewWriter(to, &spec, c.job)
	w.OnPublish = c.wrote.noteObject
	rep, err := w.Write(ctx, files)
	c.wrote.note(rep.Files)
	rep.Left = left
	return rep, err
}

// filesBelow lists the files that are below a folder, with names relative to it.
func filesBelow(files []source.Entry, folder string) (in []source.Entry) {
	if folder == "" {
		return files
	}
	for _, f := range files {
		if name, ok := strings.CutPrefix(f.Name, folder+"/"); ok {
			in = append(in, source.Entry{Name: name, Size: f.Size})
		}
	}
	return in
}

// urisIn lists the files directly in a remote folder.
func urisIn(dir string, files []source.Entry) (uris []string) {
	for _, f := range files {
		if !strings.Contains(f.Name, "/") {
			uris = append(uris, source.Beside(dir, f.Name))
		}
	}
	return uris
}
