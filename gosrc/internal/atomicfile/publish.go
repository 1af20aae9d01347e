package atomicfile

// Gives written files their names.

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"strings"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/regular"
	"github.com/overwire/overwire/gosrc/internal/spawn"
)

// Publish gives finished targets their names. The last target is the file that
// readers open: the only file, or the index of shards, which are New.
//
// New files come first: no reader looks for them before the index that lists them, whose
// rename replaces the old set by the new one in one step. Each other file replaces its own
// predecessor in one step. If a step fails, the old last file stays, and the new files go.
func Publish(sys FS, ts []*Target) error {
	last := ts[len(ts)-1]
	var done []*Target
	err := func() error {
		for _, t := range ts {
			if t.New {
				if err := sys.RenameNew(t.temp, t.Path); err != nil {
					return nameTaken(t.Path, err)
				}
				done = append(done, t)
			}
		}
		if len(ts) > 1 && len(done) > 0 {
			// The shards' names are durable before the index that lists them.
			if err := sys.SyncNames(done[0].Path); err != nil {
				return Failed(last.Path, -1, err)
			}
		}
		for _, t := range ts {
			if t.New {
				continue
			}
			if err := sys.Rename(t.temp, t.Path); err != nil {
				return Failed(t.Path, -1, err)
			}
			t.temp = ""
		}
		return nil
	}()
	for _, t := range done {
		if err == nil {
			t.temp = ""
		} else {
			_ = sys.Rename(t.Path, t.temp)
		}
	}
	if err != nil {
		return err
	}
	// If the folder was not synced, a power loss leaves the old file or the new
	// one, each of them whole; the caller must know.
	return Failed(last.Path, -1, sys.SyncNames(last.Path))
}

// nameTaken is the error of a new file that has the name of one that another save has written meanwhile.
func nameTaken(path string, err error) error {
	if errors.Is(err, fs.ErrExist) {
		return errs.In("save", path, errs.New(errs.ErrIO, "another save has written this file meanwhile: save again"))
	}
	return Failed(path, -1, err)
}

// Folder returns the folder of a path as the system finds it: ".." stays in it.
func Folder(path string) string { return regular.FolderOf(path) }

// MakeFolders makes a folder and those above it that are missing, through no other user's link.
func MakeFolders(path string) error {
	if _, err := regular.RefusePlantedLinks(path); err != nil {
		return err
	}
	return errs.FromOS(os.MkdirAll(path, 0o777))
}

// MakeFolder makes a folder to write to, if there is none; isNew: it has. It refuses, as Follow does, another user's
// link in its place.
func MakeFolder(path string) (isNew bool, err error) {
	if _, err := Follow(strings.TrimRight(path, "/")); err != nil {
		return false, Failed(path, -1, err)
	}
	err = os.Mkdir(path, 0o777)
	if st, serr := os.Stat(path); err != nil && serr == nil && st.IsDir() {
		return false, nil
	} else if os.IsExist(err) {
		err = &fs.PathError{Op: "mkdir", Path: path, Err: fs.ErrExist}
	}
	return err == nil, Failed(path, -1, err)
}

// Write replaces a file with data. If ctx ends first, the old file stays.
func Write(ctx context.Context, path string, data []byte) error {
	t, err := New(Disk{}, path, "", 0)
	if err != nil {
		return err
	}
	defer t.Drop()
	const step = 8 << 20
	err = spawn.Each(ctx, "save.write", writers, (len(data)+step-1)/step, func(i int) error {
		off := i * step
		return t.Write(data[off:min(len(data), off+step)], int64(off))
	})
	if err != nil {
		return errs.In("save", path, err)
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
	place, err := resolvePath(path)
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
	t := &Target{Path: place.Path, fs: Disk{}, temp: from, file: f}
	if err := t.Finish(st.Size()); err != nil {
		_ = f.Close()
		return err
	}
	return Publish(Disk{}, []*Target{t})
}
