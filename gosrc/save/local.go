package save

// This file saves to local files, which appear together.

import (
	"context"
	"os"
	"slices"

	"github.com/overwire/overwire/gosrc/fault"
	"github.com/overwire/overwire/gosrc/internal/atomicfile"
	"github.com/overwire/overwire/gosrc/internal/spawn"
)

// files is the destination of a save to local files.
type files struct {
	*writer
	like    string // the file whose mode new ones get
	targets []*atomicfile.Target
}

func (f *files) create(ctx context.Context, path string, _ int64) (draft, error) {
	t, err := atomicfile.New(f.spec.fs, path, f.like)
	if err != nil {
		return nil, err
	}
	f.targets = append(f.targets, t)
	return &file{t, ctx}, nil
}

func (f *files) publish(_ context.Context, _ []part) error {
	old := f.replaced(f.targets)
	if err := atomicfile.Publish(f.spec.fs, f.targets); err != nil {
		return err
	}
	return f.retire(old)
}

func (f *files) drop(error) {
	for _, t := range f.targets {
		t.Drop()
	}
}

// file is a local file that is being written.
type file struct {
	*atomicfile.Target
	ctx context.Context // of the save
}

// URI is where the file will be, symbolic links followed.
func (f *file) URI() string { return f.Path }

// Finish waits for the disk, which may take seconds, but not longer than for
// a cancel: the sync then ends alone, on a file that has no name any more.
func (f *file) Finish(size int64) error {
	done := make(chan error, 1)
	t := f.Hand() // closes the file; f has only the name now
	spawn.Go("save.sync", func() {
		err := fault.New(fault.ErrEngine, "sync did not end")
		defer func() { done <- err }()
		err = t.Finish(size)
		t.Drop()
	})
	select {
	case err := <-done:
		return err
	case <-f.ctx.Done():
		return fault.Locate("save", f.Path, "", -1, cancelled(f.ctx))
	}
}

// like is the file whose mode new files get: one of the model that is replaced. A
// private model stays private, in however many files.
func (w *writer) like(parts []part) string {
	for _, path := range []string{parts[len(parts)-1].path, w.spec.Path, indexPath(w.spec.Path), w.spec.Like} {
		if real, err := atomicfile.Follow(path); err == nil {
			if st, err := os.Lstat(real); err == nil && st.Mode().IsRegular() {
				return real
			}
		}
	}
	return ""
}

// room refuses a save that cannot fit, where the file system can tell: old and
// new file are there together until the rename. For compressed tensors it goes
// by their samples, a little in the writer's favour: a disk that fills up
// later is an error all the same.
func (w *writer) room(parts []part) error {
	var need float64
	for _, p := range parts {
		need += float64(len(p.blob))
		for _, t := range p.items {
			switch t.form {
			case plain:
				need += float64(t.bytes)
			case compressed:
				need += float64(t.bytes) * t.expect * 0.97
			}
		}
	}
	dir := atomicfile.Folder(parts[0].path)
	if real, err := atomicfile.Follow(parts[0].path); err == nil {
		dir = atomicfile.Folder(real)
	}
	if free, ok := w.spec.fs.Free(dir); ok && float64(free) < need {
		return &fault.At{Verb: "save", Source: w.spec.Path, Chunk: -1, Offset: -1,
			Err: fault.New(fault.ErrIO, "no space left: about %d bytes are needed and %d are free in %s", int64(need), free, dir)}
	}
	return nil
}

// replaced lists the files that a save in shards makes stale beside those that it
// replaces, so that the old model cannot be opened by another name: the file at the
// path itself (when there are several now), the index (when there is one
// file now), and shards of the old index that bear our names.
func (w *writer) replaced(targets []*atomicfile.Target) []string {
	path, err := atomicfile.Follow(w.spec.Path)
	if err != nil || w.spec.Shard == 0 {
		return nil
	}
	kept := map[string]bool{}
	for _, t := range targets {
		kept[t.Path] = true
	}
	shards, _ := w.oldShards(context.Background(), indexPath(path)) // one that cannot be read names nothing
	old := append([]string{path, indexPath(path)}, shards...)
	return slices.DeleteFunc(old, func(p string) bool {
		st, err := os.Lstat(p)
		return kept[p] || err != nil || !st.Mode().IsRegular()
	})
}

// retire removes what replaced has listed, now that the new model stands.
func (w *writer) retire(old []string) error {
	var first error
	for _, p := range old {
		if err := w.spec.fs.Remove(p); err != nil && first == nil {
			first = atomicfile.Failed(p, -1, err)
		}
	}
	return first
}
