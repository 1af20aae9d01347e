package atomicfile

// This file gives written files their names.

import (
	"context"
	"io/fs"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/overwire/overwire/gosrc/errs"
)

// Publish gives finished targets their names. The last target is the file that
// readers open: the only file, or the index of the shards.
//
// One file replaces another in one step. If several files replace a set that
// shares names with them, no order of renames is safe for a reader in between;
// so the old last file is moved away first: such a reader finds no model, never
// half of each. If a step fails, the steps before it are undone.
func Publish(sys FS, ts []*Target) error {
	r := &renames{sys: sys}
	if err := r.all(ts); err != nil {
		r.undo()
		return err
	}
	for _, t := range ts {
		t.temp = ""
	}
	for _, b := range r.backups {
		_ = sys.Remove(b)
	}
	if len(r.backups) > 0 {
		// A set that a killed save has half replaced is no longer needed.
		for _, t := range ts {
			orphans{path: t.Path, mark: oldMark, age: time.Minute}.remove(sys)
		}
	}
	return nil
}

// renames are the steps of one Publish.
type renames struct {
	sys     FS
	done    []struct{ from, to string } // what undo takes back
	backups []string                    // where files of the old set lie
}

// all takes every step.
func (r *renames) all(ts []*Target) error {
	last := ts[len(ts)-1]
	shared := slices.ContainsFunc(ts[:len(ts)-1], func(t *Target) bool { return t.old != nil })
	if shared {
		if err := r.moveAway(ts); err != nil {
			return err
		}
	}
	for _, t := range ts {
		if t == last && len(ts) > 1 {
			// The shards' names are durable before the index that lists them.
			if err := r.sync(t.Path); err != nil {
				return err
			}
		}
		if err := r.move(t.temp, t.Path); err != nil {
			return err
		}
	}
	if !shared {
		// The last rename cannot be undone: it has replaced the old file.
		last.temp, r.done = "", nil
	}
	// If the folder was not synced, a power loss leaves the old file or the new
	// one, each of them whole; the caller must know.
	return r.sync(last.Path)
}

// moveAway gives the files of the old set hidden names, the last file first: no
// reader opens the set from then on, even after a power loss.
func (r *renames) moveAway(ts []*Target) error {
	for i, t := range slices.Backward(ts) {
		if t.old == nil {
			continue
		}
		b := hiddenName(t.Path, oldMark)
		if err := r.move(t.Path, b); err != nil {
			return err
		}
		r.backups = append(r.backups, b)
		if i == len(ts)-1 {
			if err := r.sync(t.Path); err != nil {
				return err
			}
		}
	}
	return nil
}

func (r *renames) move(from, to string) error {
	if err := r.sys.Rename(from, to); err != nil {
		return Failed(to, -1, err)
	}
	r.done = append(r.done, struct{ from, to string }{from, to})
	return nil
}

// sync makes the names in the folder of a path durable.
func (r *renames) sync(path string) error {
	return Failed(path, -1, r.sys.SyncDir(Folder(path)))
}

func (r *renames) undo() {
	for _, step := range slices.Backward(r.done) {
		_ = r.sys.Rename(step.to, step.from)
	}
}

// Folder returns the folder of a path as the system finds it: ".." stays in it.
func Folder(path string) string {
	switch at := strings.LastIndexByte(path, '/'); at {
	case -1:
		return "."
	case 0:
		return "/"
	default:
		return path[:at]
	}
}

// Write replaces a file with data. If ctx ends first, the old file stays.
func Write(ctx context.Context, path string, data []byte) error {
	t, err := New(Disk{}, path, "", 0)
	if err != nil {
		return err
	}
	defer t.Drop()
	for off := 0; off < len(data); off += kickEvery {
		if ctx.Err() != nil {
			return errs.In("save", path, errs.Cause(ctx))
		}
		if err := t.Write(data[off:min(len(data), off+kickEvery)], int64(off)); err != nil {
			return err
		}
	}
	if err := t.FinishUnless(ctx, int64(len(data))); err != nil {
		return err
	}
	return Publish(Disk{}, []*Target{t})
}

// With replaces a file with what fill writes. If fill fails, the old file stays.
func With(path string, fill func(f *os.File) error) error {
	t, err := New(Disk{}, path, "", 0)
	if err != nil {
		return err
	}
	defer t.Drop()
	f := t.file.(*os.File) // Disk's
	if err := fill(f); err != nil {
		if errs.Classed(err) { // not an error of this file
			return err
		}
		return Failed(path, -1, err)
	}
	st, err := f.Stat()
	if err != nil {
		return Failed(path, -1, err)
	}
	if err := t.Finish(st.Size()); err != nil {
		return err
	}
	return Publish(Disk{}, []*Target{t})
}

// Rename gives a finished file of the same folder the name path, as if it had been
// written here.
func Rename(from, path string) error {
	real, old, err := look(path)
	if err != nil {
		return err
	}
	f, err := os.OpenFile(from, os.O_RDWR, 0)
	if err != nil {
		return Failed(from, -1, err)
	}
	st, err := f.Stat()
	if err == nil && !st.Mode().IsRegular() {
		err = fs.ErrInvalid
	}
	if err != nil {
		_ = f.Close()
		return Failed(from, -1, err)
	}
	t := &Target{Path: real, fs: Disk{}, temp: from, file: f, old: old}
	if err := t.Finish(st.Size()); err != nil {
		_ = f.Close()
		return err
	}
	return Publish(Disk{}, []*Target{t})
}
