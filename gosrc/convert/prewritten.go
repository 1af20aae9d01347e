package convert

// This file writes prewritten files to the target of a conversion.

import (
	"context"

	"github.com/overwire/overwire/gosrc/job"
	"github.com/overwire/overwire/gosrc/save"
	"github.com/overwire/overwire/gosrc/save/publish"
)

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
	return writeFolder(ctx, &conversion{spec: &spec, job: j}, w, nil, []string{src}, to, files, branch{})
}
