package save

// This file saves to the objects of a store.

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/format/safetensors"
	"github.com/overwire/overwire/gosrc/internal/modelfiles"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/source/open"
	"github.com/overwire/overwire/gosrc/tensor"
)

// joinName is the path or URI of a name in a folder. It does not clean the path, since
// ".." after a symbolic link is not the element before it.
func joinName(dir, name string) string {
	switch {
	case dir == "":
		return name
	case strings.HasSuffix(dir, "/"):
		return dir + name
	default:
		return dir + "/" + name
	}
}

// refuseBeside refuses a single file beside the index of shards of the same name, since
// the folder would still be loaded by that index: the old model, or both.
func (w *writer) refuseBeside(ctx context.Context, parts []outputFile) error {
	path := parts[len(parts)-1].path
	if w.spec.Beside || w.spec.Shard != 0 || len(parts) > 1 || !strings.HasSuffix(path, extension) {
		return nil
	}
	if !source.Remote(path) {
		place, err := w.followPath(path)
		if err != nil {
			return nil // the write reports it
		}
		path = place.Path
	}
	index := indexPath(path)
	shards, err := w.readIndex(ctx, index)
	if errors.Is(err, errs.ErrTimeout) || errors.Is(err, errs.ErrIO) && source.Remote(path) {
		return err // a store that does not answer would fail the save, too
	}
	if shards == nil || err != nil || slices.Contains(shards.Files, filepath.Base(path)) {
		return nil // not an index by which a folder is loaded
	}
	return badArgument(path, "", "beside it is %s, by which its folder would still load the old model: "+
		"remove that and its shards first, or save with max_shard_size (--shard), which replaces them",
		filepath.Base(index))
}

// objects is the destination of a save to a store.
type objects struct {
	*writer
	drafts []source.Draft // by part; nil: not created
}

func (o *objects) create(ctx context.Context, i int, p *outputFile) (draft, error) {
	d, err := open.Create(ctx, p.path, o.spec.Storage.Options, p.most())
	if err != nil {
		return nil, err
	}
	o.drafts[i] = d
	return timed{d, &o.clock.write}, nil
}

func (o *objects) dropAll(err error) {
	o.job.Failed(err, func() {
		for _, d := range o.drafts {
			if d != nil {
				d.StopSends()
			}
		}
	})
	for _, d := range o.drafts {
		if d != nil {
			d.Drop()
		}
	}
}

// publishAll publishes the objects, last the one that readers look for, and removes what that
// makes stale. If it fails, the old model stays, and the shards that were published go.
func (o *objects) publishAll(ctx context.Context, parts []outputFile) error {
	stale, err := o.staleFiles(ctx, o.spec.Path, &parts[len(parts)-1])
	if err != nil {
		return err
	}
	stale = slices.DeleteFunc(stale, func(p string) bool {
		return slices.ContainsFunc(parts, func(q outputFile) bool { return q.path == p })
	})
	for i, d := range o.drafts {
		if err := d.Publish(); err != nil {
			for _, p := range parts[:i] {
				if p.shard {
					_ = open.Remove(context.WithoutCancel(ctx), p.path, o.spec.Storage.Options)
				}
			}
			return err
		}
	}
	// The model is complete; but report what cannot be removed.
	var first error
	for _, p := range stale {
		if err := open.Remove(ctx, p, o.spec.Storage.Options); err != nil && first == nil {
			first = err
		}
	}
	return first
}

// staleFiles lists what a save of a set at a path makes stale, by the index that was there: the
// file at the path itself (if there are several now), the index (if there is one file now), and the
// shards that it listed. With an error it lists what no index tells.
func (w *writer) staleFiles(ctx context.Context, path string, last *outputFile) (old []string, err error) {
	if w.spec.Shard > 0 {
		old = append(old, path)
	}
	var shards *safetensors.Shards
	switch {
	case last.listing != nil:
		shards, err = w.readIndex(ctx, last.path)
		for _, name := range last.stale(shards) {
			old = append(old, last.path[:len(last.path)-len(filepath.Base(last.path))]+name)
		}
	case w.spec.Shard > 0:
		index := indexPath(path)
		shards, err = w.readIndex(ctx, index)
		old = append(append(old, index), shardsOf(path, shards)...)
	}
	return old, err
}

// shardsOf are the files of a path's old index that are named after it.
func shardsOf(path string, old *safetensors.Shards) (paths []string) {
	dir, stem := stemOf(path)
	if old == nil {
		return nil
	}
	for _, name := range old.Files {
		if modelfiles.Family(name) == stem {
			paths = append(paths, joinName(dir, name))
		}
	}
	return paths
}

// readIndex reads an index; nil if there is none. A damaged one names nothing.
func (w *writer) readIndex(ctx context.Context, index string) (*safetensors.Shards, error) {
	if !source.Remote(index) {
		if _, err := os.Lstat(index); errors.Is(err, fs.ErrNotExist) {
			return nil, nil
		}
	}
	s, err := open.With(w.spec.Storage.Options).Open(ctx, index)
	if errors.Is(err, errs.ErrNotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer s.Close()
	b := make([]byte, min(s.Size(), tensor.MaxHeader)) // a larger one is not ours
	if err := s.ReadAt(ctx, b, 0); err != nil {
		return nil, err
	}
	shards, _ := safetensors.ReadIndexJSON(index, b)
	return &shards, nil
}
