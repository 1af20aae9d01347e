package save

import (
	"context"
	"os"
	"path/filepath"
	"strings"

	"github.com/overwire/overwire/gosrc/internal/atomicfile"
	"github.com/overwire/overwire/gosrc/job"
)

// maxDepth is how far below a model's folder others are looked for.
const maxDepth = 8

// A branch is a folder of a tree of models: a diffusers pipeline has one for
// each of its parts.
type branch struct {
	path    string // below the tree's own folder; "": that folder itself
	weights bool   // whether a model lies there
}

// tree returns the folders below dir that hold files, and dir itself last: what
// names the others (model_index.json) is written last. Hidden folders, links and
// avoid, the folder that is written, are left out. dir may be anything; what is
// no local folder has no branches.
func tree(dir, avoid string) ([]branch, error) {
	if st, err := os.Stat(dir); remote(dir) || err != nil || !st.IsDir() {
		return nil, nil
	}
	here, _ := os.Stat(avoid)
	var out []branch
	var walk func(rel string, depth int) error
	walk = func(rel string, depth int) error {
		entries, err := os.ReadDir(filepath.Join(dir, rel))
		if err != nil {
			return atomicfile.Failed(filepath.Join(dir, rel), -1, err)
		}
		b, files := branch{path: rel}, false
		for _, e := range entries {
			below := filepath.Join(rel, e.Name())
			switch hidden := strings.HasPrefix(e.Name(), "."); {
			case e.IsDir() && !hidden && depth < maxDepth:
				if st, err := e.Info(); err == nil && here != nil && os.SameFile(st, here) {
					continue
				}
				if err := walk(below, depth+1); err != nil {
					return err
				}
			case !e.IsDir() && !hidden:
				files = true
				b.weights = b.weights || strings.HasSuffix(e.Name(), extension) || strings.HasSuffix(e.Name(), extension+".index.json")
			}
		}
		if files || rel == "" {
			out = append(out, b)
		}
		return nil
	}
	return out, walk("", 0)
}

// spread replaces folders without weights of their own by the folders below
// them that have some.
func spread(uris []string) []string {
	var out []string
	for _, uri := range uris {
		dir := localPath(uri)
		branches, err := tree(dir, "")
		if n := len(branches); err != nil || n == 0 || branches[n-1].weights {
			out = append(out, uri)
			continue
		}
		before := len(out)
		for _, b := range branches {
			if b.weights {
				out = append(out, filepath.Join(dir, b.path))
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
func convertTree(ctx context.Context, j *job.Job, dir, dst string, branches []branch, spec Spec) (rep Report, err error) {
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
		from, to := filepath.Join(dir, b.path), filepath.Join(dst, b.path)
		if err := os.MkdirAll(to, 0o777); err != nil {
			return rep, atomicfile.Failed(to, -1, err)
		}
		var one Report
		if b.weights {
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

// isDir tells whether a source is a local folder.
func isDir(uri string) bool {
	st, err := os.Stat(localPath(uri))
	return err == nil && st.IsDir()
}
