package save

// This file saves to local files, which appear together.

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/atomicfile"
	"github.com/overwire/overwire/gosrc/internal/modelfiles"
)

// files is the destination of a save to local files.
type files struct {
	*writer
	like    string               // the file whose mode new ones get
	targets []*atomicfile.Target // by part; nil: not created
	listing atomicfile.Listing
}

func (f *files) create(ctx context.Context, i int, p *outputFile) (draft, error) {
	place, err := f.followPath(p.path)
	if err != nil {
		return nil, atomicfile.Failed(p.path, -1, err)
	}
	t, err := place.CreateTarget(f.spec.fs, p.mode, &f.listing, p.like, f.like)
	if err != nil {
		return nil, err
	}
	t.New, t.Clock = p.shard, &f.clock.write
	f.targets[i] = t
	return &file{t, ctx}, nil
}

func (f *files) publishAll(ctx context.Context, parts []outputFile) error {
	old, err := f.replacedFiles(ctx, parts)
	if err != nil {
		return err
	}
	if err := atomicfile.Publish(f.spec.fs, f.targets); err != nil {
		return err
	}
	// The new model is complete. Another save of the same path may have removed them already.
	var first error
	for _, p := range old {
		if err := f.spec.fs.Remove(p); err != nil && !errors.Is(err, fs.ErrNotExist) && first == nil {
			first = atomicfile.Failed(p, -1, err)
		}
	}
	return first
}

func (f *files) dropAll(error) {
	for _, t := range f.targets {
		if t != nil {
			t.Drop()
		}
	}
}

// file is a local file that is being written.
type file struct {
	*atomicfile.Target
	ctx context.Context // of the save
}

// URI is where the file will be, symbolic links followed.
func (f *file) URI() string { return f.Path }

// WriteView is Write.
func (f *file) WriteView(p []byte, off int64) error { return f.Write(p, off) }

// Finish waits for the disk, which may take seconds, but not after a cancel: the
// sync then continues by itself, on a file whose name is gone.
func (f *file) Finish(size int64) error {
	return f.FinishUnless(f.ctx, size)
}

// like is the file whose mode new files get: one of the model that is replaced. A
// private model stays private, even with another number of files.
func (w *writer) like(parts []outputFile) (string, error) {
	for _, path := range []string{parts[len(parts)-1].path, w.spec.Path, indexPath(w.spec.Path), w.spec.Like} {
		if path == "" {
			continue
		}
		place, err := w.followPath(path)
		if err == nil {
			err = place.RefuseStrangers()
		}
		if errors.Is(err, errs.ErrPermission) || errors.Is(err, unix.ELOOP) { // another user's, or a link to nothing
			continue
		}
		if err != nil {
			return "", atomicfile.Failed(path, -1, err)
		}
		if place.IsFile() {
			return place.Path, nil
		}
	}
	return "", nil
}

// followPath says where a path leads and what was there when the save first asked.
func (w *writer) followPath(path string) (*atomicfile.Place, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if place := w.places[path]; place != nil {
		return place, nil
	}
	place, err := atomicfile.Follow(path)
	if err == nil {
		w.places[path] = place
	}
	return place, err
}

// checkRoom refuses a save that cannot fit, if the file system reports its space: old
// and new files exist together until the rename. Sizes of compressed tensors are
// estimated from their samples, slightly too small; a disk that fills up later is
// still an error.
func (w *writer) checkRoom(parts []outputFile) error {
	var need float64
	for _, p := range parts {
		need += float64(p.bytes())
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
	if place, err := w.followPath(parts[0].path); err == nil {
		dir = atomicfile.Folder(place.Path)
	}
	if free, ok := w.spec.fs.Free(dir); ok && float64(free) < need {
		err := fmt.Errorf("%w: about %d bytes are needed and %d are free in %s", unix.ENOSPC, int64(need), free, dir)
		return errs.In("save", w.spec.Path, errs.FromOS(err))
	}
	return nil
}

// replacedFiles lists the files that a save of a set makes stale, so that the old model cannot
// be opened by another name: the file at the path itself (if there are several now), the
// index (if there is one file now), the shards of the old index, and what killed saves of
// the same files have left. An error says that another model's files could be among them.
func (w *writer) replacedFiles(ctx context.Context, parts []outputFile) (old []string, err error) {
	last := &parts[len(parts)-1]
	if w.spec.Shard == 0 && last.listing == nil {
		return nil, nil
	}
	place, err := w.followPath(w.spec.Path)
	if err != nil {
		return nil, atomicfile.Failed(w.spec.Path, -1, err)
	}
	path := place.Path
	index, families := last.path, last.familiesOf()
	if last.listing == nil {
		_, stem := stemOf(path)
		index, families = indexPath(path), map[string]bool{stem: true}
	}
	if old, err = w.staleFiles(ctx, path, last); err != nil && !listsNothing(err) {
		return nil, err
	}
	old = append(old, abandonedFiles(atomicfile.Folder(index), families, w.spec.Shard > 0)...)
	kept := map[string]bool{}
	for _, p := range parts {
		kept[p.path] = true
		place, err := w.followPath(p.path)
		if err != nil {
			return nil, atomicfile.Failed(p.path, -1, err)
		}
		kept[place.Path] = true
	}
	old = slices.DeleteFunc(old, func(p string) bool {
		st, err := os.Lstat(p)
		return kept[p] || err != nil || !st.Mode().IsRegular()
	})
	if len(old) == 0 {
		return nil, nil
	}
	others, err := w.listedByOthers(ctx, index)
	return slices.DeleteFunc(old, func(p string) bool { return others[p] }), err
}

// listsNothing reports whether the error of an index says that there is none for this process, and not that a disk
// or a server has failed.
func listsNothing(err error) bool {
	return errors.Is(err, errs.ErrPermission) || errors.Is(err, errs.ErrArgument) ||
		errors.Is(err, errs.ErrNotSupported)
}

// listedByOthers are the files that the other indexes beside an index list: they belong to
// other models, whatever their names are.
func (w *writer) listedByOthers(ctx context.Context, index string) (map[string]bool, error) {
	dir, paths := atomicfile.Folder(index), map[string]bool{}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, atomicfile.Failed(dir, -1, err)
	}
	for _, e := range entries {
		n, ok := modelfiles.ParseName(e.Name())
		if !ok || !n.Index || e.Name() == filepath.Base(index) {
			continue
		}
		set, err := w.readIndex(ctx, joinName(dir, e.Name()))
		if err != nil && !errors.Is(err, errs.ErrArgument) { // a folder
			return nil, err
		}
		if set != nil {
			for _, name := range set.Files {
				paths[joinName(dir, name)] = true
			}
		}
	}
	return paths, nil
}
