package save

// This file converts folders of several models.

import (
	"context"
	"os"
	"path/filepath"
	"strings"

	"github.com/overwire/overwire/gosrc/format"
	"github.com/overwire/overwire/gosrc/internal/atomicfile"
	"github.com/overwire/overwire/gosrc/job"
	"github.com/overwire/overwire/gosrc/save/folders"
	"github.com/overwire/overwire/gosrc/source/open"
)

// Spread replaces each folder without weights of its own by the folders below it
// that have some.
func Spread(uris []string) []string {
	var out []string
	for _, uri := range uris {
		dir := folders.Local(uri)
		branches, err := format.Tree(dir, "")
		if n := len(branches); err != nil || n == 0 || branches[n-1].Weights {
			out = append(out, uri)
			continue
		}
		before := len(out)
		for _, b := range branches {
			if b.Weights {
				out = append(out, filepath.Join(dir, b.Path))
			}
		}
		if len(out) == before {
			out = append(out, uri) // opening it reports that there are none
		}
	}
	return out
}

// convertTree converts each model below a folder into the same path below dst, and
// copies the files beside them. If one of them fails, a dst that it made is
// removed.
func convertTree(ctx context.Context, j *job.Job, dir, dst string, branches []format.Branch, spec Spec) (rep Report, err error) {
	made, err := folders.Make(dst)
	if err != nil {
		return rep, err
	}
	defer removeAfter(&err, made)
	how := beside{root: dir, folders: true}
	for _, b := range branches {
		from, to := filepath.Join(dir, b.Path), filepath.Join(dst, b.Path)
		if err := os.MkdirAll(to, 0o777); err != nil {
			return rep, atomicfile.Failed(to, -1, err)
		}
		var one Report
		if b.Weights {
			one, err = convertFolder(ctx, j, from, to, spec, how)
		} else {
			one, err = copyBeside(ctx, j, from, to, spec, how)
		}
		if err != nil {
			return rep, err
		}
		rep.add(one)
	}
	return rep, nil
}

// removeAfter removes a folder that was made, if there is one, after an error.
func removeAfter(err *error, made string) {
	if *err != nil && made != "" {
		_ = os.RemoveAll(made)
	}
}

// convertFolder converts the models that lie in a folder itself, last the one that the folder
// stands for, with the companions of all.
func convertFolder(ctx context.Context, j *job.Job, dir, dst string, spec Spec, how beside) (rep Report, err error) {
	models, err := format.Models(ctx, dir, open.With(spec.Storage.Options))
	if err != nil {
		return rep, err
	}
	if len(models) == 1 {
		return convertOne(ctx, j, []string{dir}, dst, spec, how)
	}
	if spec.Shard > 0 {
		var names []string
		for _, m := range models {
			names = append(names, m.Names[0])
		}
		return rep, badArgument(dst, "", "%s has several models (%s), and only one can be divided into shards: name its file or index.json", dir, strings.Join(names, ", "))
	}
	made, err := folders.Make(dst)
	if err != nil {
		return rep, err
	}
	defer removeAfter(&err, made)
	how.dir, how.ours, spec.Beside = dir, map[string]bool{}, true // as in dir
	for _, m := range models {
		for _, path := range m.Paths {
			how.ours[filepath.Base(path)] = true
		}
	}
	for i, m := range models {
		how.last = i == len(models)-1
		one, err := convertOne(ctx, j, m.Names, join(dst, ""), spec, how)
		if err != nil {
			return rep, err
		}
		rep.add(one)
	}
	return rep, nil
}

// copyBeside copies a folder without weights.
func copyBeside(ctx context.Context, j *job.Job, from, to string, spec Spec, how beside) (Report, error) {
	parts, left, err := withCompanions([]string{from}, to, nil, how)
	if err != nil {
		return Report{}, err
	}
	spec.Path, spec.Shard = to, 0
	rep, err := newWriter(spec, j).save(ctx, parts)
	rep.Left = left
	return rep, err
}

func (r *Report) add(o Report) {
	r.BytesIn += o.BytesIn
	r.BytesOut += o.BytesOut
	r.Tensors += o.Tensors
	r.Compressed += o.Compressed
	r.Aliases += o.Aliases
	r.Files = append(r.Files, o.Files...)
	r.Copied = append(r.Copied, o.Copied...)
	r.Left = append(r.Left, o.Left...)
	r.Originals = append(r.Originals, o.Originals...)
	r.Anew = append(r.Anew, o.Anew...)
	r.Ratio = ratio(r.BytesOut, r.BytesIn)
}
