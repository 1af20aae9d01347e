package save

// This file converts folders of several models.

import (
	"context"
	"errors"
	"os"
	"strings"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/format"
	"github.com/overwire/overwire/gosrc/internal/atomicfile"
	"github.com/overwire/overwire/gosrc/job"
	"github.com/overwire/overwire/gosrc/save/folders"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/source/open"
)

// convertTree converts each model below a folder into the same path below dst, and
// copies the files beside them. If one of them fails, a dst that it made is
// removed.
func convertTree(ctx context.Context, j *job.Job, dir, dst string, branches []format.Branch, spec Spec,
	how companionOptions) (rep Report, err error) {
	undo, err := makeFolder(ctx, dst, &rep, spec)
	if err != nil {
		return rep, err
	}
	defer func() { err = undo(err) }()
	all := how.files
	how.root, how.folders = dir, true
	for _, b := range branches {
		from, to := pathBelow(dir, b.Path), pathBelow(dst, b.Path)
		if b.Parts {
			rep.Left = append(rep.Left, from)
			continue
		}
		how.files = inFolder(all, b.Path)
		if !source.Remote(dst) {
			if err := atomicfile.MakeFolders(to); err != nil {
				return rep, atomicfile.Failed(to, -1, err)
			}
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
		rep.addReport(one)
	}
	return rep, nil
}

// A Partial is the error of a conversion that had written some files of several models,
// whole, before it failed, into a folder that was not empty.
type Partial struct {
	error
	Files []string
}

// Error says why it failed, and what was written.
func (p *Partial) Error() string {
	return p.error.Error() + "; written before that: " + strings.Join(p.Files, ", ")
}

// Unwrap is why it failed.
func (p *Partial) Unwrap() error { return p.error }

// makeFolder makes dst if it is missing. undo removes, after an error, what was made: the
// folder, or in a store the files of rep. If dst was not empty, they stay, and the error
// lists them.
func makeFolder(ctx context.Context, dst string, rep *Report, spec Spec) (undo func(error) error, err error) {
	made, err := folders.Make(dst)
	if source.Remote(dst) {
		if _, listErr := open.List(ctx, dst, spec.Storage.Options); errors.Is(listErr, errs.ErrNotFound) {
			made = dst
		}
	}
	return func(err error) error {
		switch {
		case err == nil:
		case made == "" && len(rep.Files) > 0:
			return &Partial{err, rep.Files}
		case made != "" && !source.Remote(dst):
			_ = os.RemoveAll(made)
		case made != "":
			for _, uri := range rep.Files {
				_ = open.Remove(context.WithoutCancel(ctx), uri, spec.Storage.Options)
			}
		}
		return err
	}, err
}

// convertFolder converts the models that lie in a folder itself, last the one that the folder
// stands for, with the companions of all.
func convertFolder(ctx context.Context, j *job.Job, dir, dst string, spec Spec, how companionOptions) (
	rep Report, err error) {
	models, err := format.Models(ctx, dir, urisIn(dir, how.files), open.With(spec.Storage.Options).Open)
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
		return rep, badArgument(dst, "",
			"%s has several models (%s), and only one can be divided into shards: name its file or index.json", dir,
			strings.Join(names, ", "))
	}
	undo, err := makeFolder(ctx, dst, &rep, spec)
	if err != nil {
		return rep, err
	}
	defer func() { err = undo(err) }()
	how.dir, how.ours, spec.Beside = dir, map[string]bool{}, true // as in dir
	for _, m := range models {
		for _, path := range m.Paths {
			how.ours[source.Name(path)] = true
		}
	}
	for i, m := range models {
		how.last = i == len(models)-1
		one, err := convertOne(ctx, j, m.Names, joinName(dst, ""), spec, how)
		if err != nil {
			return rep, err
		}
		rep.addReport(one)
	}
	return rep, nil
}

// copyBeside copies a folder without weights.
func copyBeside(ctx context.Context, j *job.Job, from, to string, spec Spec, how companionOptions) (Report, error) {
	parts, left, err := withCompanions([]string{from}, to, nil, spec, how)
	if err != nil {
		return Report{}, err
	}
	spec.Path, spec.Shard = to, 0
	rep, err := newWriter(spec, j).saveAll(ctx, parts)
	rep.Left = left
	return rep, err
}

func (r *Report) addReport(o Report) {
	r.BytesIn += o.BytesIn
	r.BytesOut += o.BytesOut
	r.BytesCopied += o.BytesCopied
	r.Stages.addStages(o.Stages)
	r.Tensors += o.Tensors
	r.Compressed += o.Compressed
	r.Aliases += o.Aliases
	r.Files = append(r.Files, o.Files...)
	r.Copied = append(r.Copied, o.Copied...)
	r.Left = append(r.Left, o.Left...)
	r.Originals = append(r.Originals, o.Originals...)
	r.Anew = append(r.Anew, o.Anew...)
	r.Ratio = ratioOf(r.BytesOut, r.BytesIn)
}
