package convert

// This file defines the state that the steps of a conversion share.

import (
	"path/filepath"

	"github.com/overwire/overwire/gosrc/internal/atomicfile"
	"github.com/overwire/overwire/gosrc/internal/modelfiles"
	"github.com/overwire/overwire/gosrc/job"
	"github.com/overwire/overwire/gosrc/save"
	"github.com/overwire/overwire/gosrc/source"
)

// A conversion is one call of Convert.
type conversion struct {
	spec *save.Spec
	job  *job.Job
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
