package convert

// This file writes files with known bytes to the destinations of a conversion.

import (
	"context"

	"github.com/overwire/overwire/gosrc/job"
	"github.com/overwire/overwire/gosrc/save"
	"github.com/overwire/overwire/gosrc/save/publish"
)

// WritePrewritten writes files that belong together to spec.Path or, if there are several, to shards of that
// name with an index. See Convert for when it is a folder. There the files are named after stem, and the
// auxiliary files of the folder src ("" for none) are copied.
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
