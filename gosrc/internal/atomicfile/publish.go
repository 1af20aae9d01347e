package atomicfile

// This file renames finished files to their final names.

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/regular"
	"github.com/overwire/overwire/gosrc/internal/spawn"
)

// Publish renames finished targets. The last target is the file that readers open: the only file, or the index
// of shards. New is set in shards.
//
// New files are renamed first, because no reader looks for them before the index is renamed, which atomically
// replaces the old set by the new one. Each other file atomically replaces its predecessor. If a step fails,
// the old last file remains, and the new files are removed.
func Publish(sys FS, ts []*Target) error {
	last := ts[len(ts)-1]
	var done []*Target
	isKnown := true // the file at the last target's path could be identified
	err := func() error {
		for _, t := range ts {
			if t.New {
				if isDone, _, err := t.takeName(sys.RenameNew); !isDone {
					return nameTaken(t.Path, err)
				}
				done = append(done, t)
			}
		}
		if len(ts) > 1 && len(done) > 0 {
			// The names of the shards must be durable before the index that lists them.
			if err := sys.SyncNames(done[0].Path); err != nil {
				return Failed(last.Path, -1, err)
			}
		}
		for _, t := range ts {
			if t.New {
				continue
			}
			var isDone bool
			var err error
			if isDone, isKnown, err = t.takeName(sys.Rename); !isDone {
				return Failed(t.Path, -1, err)
			}
			t.temp = ""
		}
		return nil
	}()
	for _, t := range done {
		if err == nil || !isKnown { // the index that lists them may exist
			t.temp = ""
		} else {
			_ = sys.Rename(t.Path, t.temp)
		}
	}
	if err != nil {
		return err
	}
	// If the folder was not synced, a power failure leaves either the complete old file or the complete new
	// one. The caller must receive the error.
	return Failed(last.Path, -1, sys.SyncNames(last.Path))
}

// RenameFolder renames a folder to path, where nothing or an empty folder exists, or atomically exchanges it
// with the folder at path. As for files, the folder that has the name afterwards determines the result.
func RenameFolder(made, path string, exchange bool) error {
	which, err := os.Lstat(made)
	if err != nil {
		return Failed(made, -1, err)
	}
	err = regular.Again(func() error {
		if exchange {
			return unix.Renameat2(unix.AT_FDCWD, made, unix.AT_FDCWD, path, unix.RENAME_EXCHANGE)
		}
		return unix.Rename(made, path)
	})
	if err == nil {
		return nil
	}
	if there, unknown := os.Lstat(path); unknown == nil && os.SameFile(there, which) {
		return nil
	}
	if exchange && isUnknownCall(err) {
		return Failed(path, -1, fmt.Errorf("%w: the file system cannot exchange two folders atomically (%w): "+
			"save to another name", errs.ErrNotSupported, err))
	}
	return Failed(path, -1, &os.LinkError{Op: "rename", Old: made, New: path, Err: err})
}

// nameTaken returns the error for a new file after another save has used its name.
func nameTaken(path string, err error) error {
	if errors.Is(err, fs.ErrExist) {
		return errs.In("save", path, errs.New(errs.ErrIO, "another save wrote this file in the meantime: save again"))
	}
	return Failed(path, -1, err)
}

// Folder returns the folder of a path as the system resolves it, so ".." is not removed.
func Folder(path string) string { return regular.FolderOf(path) }

// MakeFolders creates a folder and its missing parents. It does not follow links of other users.
func MakeFolders(path string) error {
	if _, err := regular.RefusePlantedLinks(path); err != nil {
		return err
	}
	return errs.FromOS(os.MkdirAll(path, 0o777))
}

// MakeFolder creates a folder if it is missing; isNew reports whether it did. Like Follow, it refuses another
// user's link at that path.
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

// CheckFolder refuses a path at which MakeFolder cannot create a folder.
func CheckFolder(path string) error {
	place, err := Follow(strings.TrimRight(path, "/"))
	if err == nil && place.old != nil && !place.old.IsDir() {
		err = &fs.PathError{Op: "mkdir", Path: path, Err: fs.ErrExist}
	}
	return Failed(path, -1, err)
}

// Write replaces a file with data. If ctx ends first, the old file remains.
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

// RefuseOtherKind returns an error if a file exists at a path and does not begin with head. Programs that write a page
// or a log call it, so that a wrong path does not replace a model.
func RefuseOtherKind(path, head string) error {
	fd, st, err := regular.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	b := make([]byte, len(head))
	if err == nil {
		defer unix.Close(fd)
		err = regular.Again(func() error {
			n, err := unix.Pread(fd, b, 0)
			b = b[:max(n, 0)]
			return err
		})
	}
	if err == nil && st.Size > 0 && string(b) != head {
		err = errs.New(errs.ErrArgument, "a file of another kind is there: remove it, or choose another path")
	}
	return Failed(path, -1, err)
}

// With replaces a file with what fill writes. If fill fails, the old file remains.
func With(path string, fill func(f *os.File) error) error {
	t, err := New(Disk{}, path, "", 0)
	if err != nil {
		return err
	}
	defer t.Drop()
	f := t.file.(*os.File) // Disk returns this type
	if err := fill(f); err != nil {
		if errs.Classed(err) { // not an error of this file
			return err
		}
		return t.fileError(-1, err)
	}
	st, err := f.Stat()
	if err != nil {
		return t.fileError(-1, err)
	}
	if err := t.Finish(st.Size()); err != nil {
		return err
	}
	return Publish(Disk{}, []*Target{t})
}

// Rename publishes a finished file of the same folder under path, as if this package had written it.
func Rename(from, path string) error {
	place, err := resolvePath(path)
	if err != nil {
		return err
	}
	f, err := openPlainly(from, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
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
