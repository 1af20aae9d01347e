// Package convert converts models between plain files and containers, in single files, folders and stores. It reads
// with package stored, and writes with package save. It keeps only the index of the sources and a window of chunks in
// memory.
package convert

import (
	"context"
	"io/fs"
	"path/filepath"
	"slices"
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
	stores := open.With(spec.Storage.Options)
	c := newConversion(&spec, j, stores)
	rep, err := convertAll(ctx, c, src, to)
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
	wrote  *written
}

func newConversion(spec *save.Spec, j *job.Job, stores *open.Stores) *conversion {
	return &conversion{spec: spec, job: j, stores: stores, wrote: &written{files: map[string]fs.FileInfo{}}}
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
