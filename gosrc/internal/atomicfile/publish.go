package atomicfile

// This file gives written files their names.

import (
	"io/fs"
	"os"
	"strings"
	"time"

	"github.com/overwire/overwire/gosrc/fault"
)

// Publish gives finished targets their names. The last target is the file that
// readers open: the only file, or the index of the shards.
//
// One file replaces another in one step. If several files replace a set that
// shares names with them, no order of renames is safe for a reader in between;
// so the old last file is moved away first: such a reader finds no model, never
// half of each. If a step fails, the steps before it are undone.
func Publish(sys FS, ts []*Target) (err error) {
	type step struct{ from, to string }
	var done []step
	move := func(from, to string) error {
		if err := sys.Rename(from, to); err != nil {
			return Failed(to, -1, err)
		}
		done = append(done, step{from, to})
		return nil
	}
	var backups []string
	again := false // the old set shares names with the new one
	defer func() {
		if err != nil {
			for i := len(done) - 1; i >= 0; i-- {
				_ = sys.Rename(done[i].to, done[i].from)
			}
			return
		}
		for _, t := range ts {
			t.temp = ""
		}
		for _, b := range backups {
			_ = sys.Remove(b)
		}
		if again {
			// A set that a killed save half replaced is no longer needed.
			for _, t := range ts {
				removeOrphans(sys, t.Path, oldMark, time.Minute)
			}
		}
	}()
	last := ts[len(ts)-1]
	for _, t := range ts[:len(ts)-1] {
		again = again || t.old != nil
	}
	if again {
		for i := len(ts) - 1; i >= 0; i-- {
			if ts[i].old == nil {
				continue
			}
			b := hiddenName(ts[i].Path, oldMark)
			if err := move(ts[i].Path, b); err != nil {
				return err
			}
			backups = append(backups, b)
			if ts[i] == last {
				if err := sys.SyncDir(Folder(last.Path)); err != nil {
					return Failed(last.Path, -1, err)
				}
			}
		}
	}
	for _, t := range ts {
		if t == last && len(ts) > 1 {
			// The shards' names are durable before the index that lists them.
			if err := sys.SyncDir(Folder(t.Path)); err != nil {
				return Failed(t.Path, -1, err)
			}
		}
		if t == last && !again {
			break
		}
		if err := move(t.temp, t.Path); err != nil {
			return err
		}
	}
	if !again {
		// This rename cannot be undone: it replaces the old file.
		if err := sys.Rename(last.temp, last.Path); err != nil {
			return Failed(last.Path, -1, err)
		}
		last.temp = ""
		done = nil
	}
	// If the folder was not synced, a power loss leaves the old file or the new
	// one, each of them whole; the caller must know.
	if serr := sys.SyncDir(Folder(last.Path)); serr != nil {
		return Failed(last.Path, -1, serr)
	}
	return nil
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

// Write replaces a file with data.
func Write(path string, data []byte) error {
	return With(path, func(f *os.File) error {
		_, err := f.Write(data)
		return err
	})
}

// With replaces a file with what fill writes. If fill fails, the old file stays.
func With(path string, fill func(f *os.File) error) error {
	t, err := New(Disk{}, path, "")
	if err != nil {
		return err
	}
	defer t.Drop()
	f := t.file.(*os.File) // Disk's
	if err := fill(f); err != nil {
		if fault.Classed(err) { // not an error of this file
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
