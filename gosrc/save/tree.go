package save

// This file converts folders of several models.

import (
	"context"
	"os"
	"path/filepath"

	"github.com/overwire/overwire/gosrc/format"
	"github.com/overwire/overwire/gosrc/internal/atomicfile"
	"github.com/overwire/overwire/gosrc/job"
)

// spread replaces folders without weights of their own by the folders below
// them that have some.
func spread(uris []string) []string {
	var out []string
	for _, uri := range uris {
		dir := localPath(uri)
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
			out = append(out, uri) // opening it says that there is nothing
		}
	}
	return out
}

// convertTree converts a folder's models, each into the folder of the same path
// below dst, and copies what lies beside them. A dst that it made is removed if
// one of them fails.
func convertTree(ctx context.Context, j *job.Job, dir, dst string, branches []format.Branch, spec Spec) (rep Report, err error) {
	made, err := makeFolder(dst)
	if err != nil {
		return rep, err
	}
	if made != "" {
		defer func() {
			if err != nil {
				_ = os.RemoveAll(made)
			}
		}()
	}
	for _, b := range branches {
		from, to := filepath.Join(dir, b.Path), filepath.Join(dst, b.Path)
		if err := os.MkdirAll(to, 0o777); err != nil {
			return rep, atomicfile.Failed(to, -1, err)
		}
		var one Report
		if b.Weights {
			one, err = convertOne(ctx, j, []string{from}, to, spec)
		} else {
			one, err = copyBeside(ctx, j, from, to, spec)
		}
		if err != nil {
			return rep, err
		}
		rep.add(one)
	}
	return rep, nil
}

// copyBeside copies a folder that holds no weights.
func copyBeside(ctx context.Context, j *job.Job, from, to string, spec Spec) (Report, error) {
	parts, left, err := companions([]string{from}, to, nil)
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
	r.Left = append(r.Left, o.Left...)
	r.Ratio = 1
	if r.BytesIn > 0 {
		r.Ratio = float64(r.BytesOut) / float64(r.BytesIn)
	}
}
