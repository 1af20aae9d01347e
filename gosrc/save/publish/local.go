package publish

// This file publishes local files, or the objects of a store, together.

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/atomicfile"
	"github.com/overwire/overwire/gosrc/internal/modelfiles"
	"github.com/overwire/overwire/gosrc/internal/spawn"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/source/open"
	"golang.org/x/sys/unix"
)

// localFiles is the destination of a save to local files.
type localFiles struct {
	pub     *Publication
	files   []*File
	like    string               // the file that gives new files their mode
	targets []*atomicfile.Target // indexed by file; nil if not created yet
	listing atomicfile.Listing
}

func beginLocal(p *Publication, files []*File) (*localFiles, error) {
	l := &localFiles{pub: p, files: files, targets: make([]*atomicfile.Target, len(files))}
	err := l.checkRoom()
	if err == nil {
		l.like, err = l.findLike()
	}
	return l, err
}

func (l *localFiles) Create(ctx context.Context, i int) (source.Output, error) {
	f := l.files[i]
	place, err := l.pub.followPath(f.Path)
	if err != nil {
		return nil, atomicfile.Failed(f.Path, -1, err)
	}
	t, err := place.CreateTarget(l.pub.FS, f.Mode, &l.listing, f.like, l.like)
	if err != nil {
		return nil, err
	}
	t.New, t.Clock = f.Shard, l.pub.WriteTime
	l.targets[i] = t
	return &localDraft{t, ctx}, nil
}

func (l *localFiles) Publish(ctx context.Context) error {
	old, err := l.replacedFiles(ctx)
	if err != nil {
		return err
	}
	if err := atomicfile.Publish(l.pub.FS, l.targets); err != nil {
		return err
	}
	// The new model is complete. Another save of the same path may already have removed the old files.
	var first error
	for _, p := range old {
		if err := l.pub.FS.Remove(p); err != nil && !errors.Is(err, fs.ErrNotExist) && first == nil {
			first = atomicfile.Failed(p, -1, err)
		}
	}
	return first
}

func (l *localFiles) Drop(error) {
	for _, t := range l.targets {
		if t != nil {
			t.Drop()
		}
	}
}

// A localDraft is a local file that is being written.
type localDraft struct {
	*atomicfile.Target
	ctx context.Context // context of the save
}

// URI returns the final path of the file, with symbolic links resolved.
func (f *localDraft) URI() string { return f.Path }

// WriteView is Write, which has written the bytes when it returns and so needs no copy.
func (f *localDraft) WriteView(p []byte, off int64) error { return f.Write(p, off) }

// Finish waits until the file is synced to the disk, which may take seconds. After a
// cancel it returns immediately, and the sync continues in the background.
func (f *localDraft) Finish(size int64) error {
	return f.FinishUnless(f.ctx, size)
}

// findLike finds a file of the model that is replaced. New files get its mode, so a private model stays private even if
// the number of files changes.
func (l *localFiles) findLike() (string, error) {
	for _, path := range []string{l.files[len(l.files)-1].Path, l.pub.Path, IndexPath(l.pub.Path), l.pub.Like} {
		if path == "" {
			continue
		}
		place, err := l.pub.followPath(path)
		if err == nil {
			err = place.RefuseStrangers()
		}
		if errors.Is(err, errs.ErrPermission) || errors.Is(err, unix.ELOOP) { // another user's file, or a loop of links
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

// checkRoom refuses a save that does not fit on the disk, if the file system reports its free space. Old and new files
// exist together until the rename. Sizes of compressed tensors are estimated from samples and slightly too small, so
// the disk may still fill up later.
func (l *localFiles) checkRoom() error {
	var need float64
	for _, f := range l.files {
		need += f.Expected
	}
	dir := atomicfile.Folder(l.files[0].Path)
	if place, err := l.pub.followPath(l.files[0].Path); err == nil {
		dir = atomicfile.Folder(place.Path)
	}
	if free, ok := l.pub.FS.Free(dir); ok && float64(free) < need {
		err := fmt.Errorf("%w: about %d bytes are needed, but %d are free in %s", unix.ENOSPC, int64(need), free, dir)
		return errs.In("save", l.pub.Path, errs.FromOS(err))
	}
	return nil
}

// replacedFiles lists the files that a set of shards makes stale. Publish removes them, so that the old model cannot be
// opened by another name. They are the results of staleFiles, and files that saves of the same model left when they
// were killed. It returns an error if other models' files might be among them.
func (l *localFiles) replacedFiles(ctx context.Context) (old []string, err error) {
	last := l.files[len(l.files)-1]
	if !l.pub.Sharded && last.Listing == nil {
		return nil, nil
	}
	place, err := l.pub.followPath(l.pub.Path)
	if err != nil {
		return nil, atomicfile.Failed(l.pub.Path, -1, err)
	}
	var index string
	var families map[string]bool
	if last.Listing != nil {
		index, families = last.Path, last.Listing.families()
	} else {
		_, stem := SplitStem(place.Path)
		index, families = IndexPath(place.Path), map[string]bool{stem: true}
	}
	if old, err = staleFiles(ctx, l.pub, place.Path, last); err != nil && !listsNothing(err) {
		return nil, err
	}
	old = append(old, abandonedFiles(atomicfile.Folder(index), families, l.pub.Sharded)...)
	written := map[string]bool{}
	for _, f := range l.files {
		place, err := l.pub.followPath(f.Path)
		if err != nil {
			return nil, atomicfile.Failed(f.Path, -1, err)
		}
		written[f.Path], written[place.Path] = true, true
	}
	old = slices.DeleteFunc(old, func(p string) bool {
		st, err := os.Lstat(p)
		return written[p] || err != nil || !st.Mode().IsRegular()
	})
	if len(old) == 0 {
		return nil, nil
	}
	others, err := l.listedByOthers(ctx, index)
	return slices.DeleteFunc(old, func(p string) bool { return others[p] }), err
}

// listedByOthers returns the files that are named in the other indexes of the folder. They belong to other models,
// regardless of their names.
func (l *localFiles) listedByOthers(ctx context.Context, index string) (map[string]bool, error) {
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
		set, err := l.pub.readIndex(ctx, JoinName(dir, e.Name()))
		// ErrArgument: the entry is not a regular file, so it is not an index
		if err != nil && !errors.Is(err, errs.ErrArgument) {
			return nil, err
		}
		if set != nil {
			for _, name := range set.Files {
				paths[JoinName(dir, name)] = true
			}
		}
	}
	return paths, nil
}

// abandonedFiles lists the files that saves left in a folder when they were killed: marked files and, if numbered is
// set, other shards. It considers only the given families, and omits files that a save is still writing.
func abandonedFiles(dir string, families map[string]bool, numbered bool) (paths []string) {
	entries, _ := os.ReadDir(dir)
	for _, e := range entries {
		n, ok := modelfiles.ParseName(e.Name())
		if ok && !n.Index && (n.Marked || numbered && n.Of > 0) && families[modelfiles.Family(e.Name())] {
			if path := JoinName(dir, e.Name()); !atomicfile.Alive(path) {
				paths = append(paths, path)
			}
		}
	}
	return paths
}

// objects is the destination of a save to a store.
type objects struct {
	pub    *Publication
	files  []*File
	drafts []source.Draft // indexed by file; nil if not created yet
}

func (o *objects) Create(ctx context.Context, i int) (source.Output, error) {
	d, err := open.Create(ctx, o.files[i].Path, o.pub.Options, o.files[i].Most)
	if err != nil {
		return nil, err
	}
	o.drafts[i] = d
	return timedDraft{d, o.pub}, nil
}

func (o *objects) Drop(err error) {
	o.pub.Job.Failed(err, func() {
		for _, d := range o.drafts {
			if d != nil {
				d.StopSends()
			}
		}
	})
	var wg sync.WaitGroup
	for _, d := range o.drafts {
		if d != nil {
			spawn.GoFor(&wg, "drop an object", d.Drop) // a store may take seconds to answer
		}
	}
	wg.Wait()
}

// Publish publishes the objects in order. The last one is the object that readers look for. Then it removes stale
// objects. If publishing fails, the old model remains, and published shards are removed, except those that another
// program has replaced.
func (o *objects) Publish(ctx context.Context) error {
	stale, err := staleFiles(ctx, o.pub, o.pub.Path, o.files[len(o.files)-1])
	if err != nil {
		return err
	}
	stale = slices.DeleteFunc(stale, func(p string) bool {
		return slices.ContainsFunc(o.files, func(f *File) bool { return f.Path == p })
	})
	var shards []source.Draft
	for i, d := range o.drafts {
		if err := d.Publish(); err != nil {
			if remaining, why := UndoAll(shards); why != nil {
				err = errs.WithRule(errs.RuleRemains, fmt.Errorf("%w; cannot remove %s: %v", err,
					strings.Join(remaining, ", "), errs.Message(why)))
			}
			return err
		}
		if o.files[i].Shard {
			shards = append(shards, d)
		}
		if o.pub.OnPublish != nil {
			o.pub.OnPublish(d)
		}
	}
	// The new model is complete. Report objects that cannot be removed.
	var first error
	for _, p := range stale {
		if err := open.Remove(ctx, p, o.pub.Options); err != nil && first == nil {
			first = err
		}
	}
	return first
}

// A timedDraft adds the time of its writes to the publication's WriteTime.
type timedDraft struct {
	source.Draft
	pub *Publication
}

func (t timedDraft) Write(p []byte, off int64) error {
	defer t.pub.addTime(time.Now())
	return t.Draft.Write(p, off)
}

func (t timedDraft) WriteView(p []byte, off int64) error {
	defer t.pub.addTime(time.Now())
	return t.Draft.WriteView(p, off)
}

func (t timedDraft) Finish(size int64) error {
	defer t.pub.addTime(time.Now())
	return t.Draft.Finish(size)
}
