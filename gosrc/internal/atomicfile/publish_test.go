package atomicfile

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/overwire/overwire/gosrc/errs"
)

// A lossy disk returns an error for renames to some names, after renaming or instead of renaming.
type lossy struct {
	Disk
	names   string // suffix of the names
	happens bool
}

func (l lossy) answer(to string, rename func() error) error {
	if !strings.HasSuffix(to, l.names) {
		return rename()
	}
	if l.happens {
		if err := rename(); err != nil {
			return err
		}
	}
	return syscall.EIO
}

func (l lossy) Rename(from, to string) error {
	return l.answer(to, func() error { return l.Disk.Rename(from, to) })
}

func (l lossy) RenameNew(from, to string) error {
	return l.answer(to, func() error { return l.Disk.RenameNew(from, to) })
}

// finish returns finished targets: one file, or a set of two new shards and the index that lists them.
func finish(t *testing.T, sys FS, dir string, names ...string) (targets []*Target) {
	t.Helper()
	for _, name := range names {
		one, err := New(sys, filepath.Join(dir, name), "", 0)
		if err != nil {
			t.Fatal(err)
		}
		one.New = strings.HasPrefix(name, "new")
		if err := errors.Join(one.Write([]byte("new"), 0), one.Finish(3)); err != nil {
			t.Fatal(err)
		}
		targets = append(targets, one)
	}
	return targets
}

func TestRenameWithALostReply(t *testing.T) {
	// A rename that took place counts, even if it returned an error (a lost NFS reply, FUSE). If it did not take
	// place, the old set is intact. Either the old or the new set exists with all its files.
	for _, c := range []struct {
		files   []string
		sys     lossy
		failure bool
	}{
		{[]string{"new-1", "new-2", "index"}, lossy{names: "index", happens: true}, false},
		{[]string{"new-1", "new-2", "index"}, lossy{names: "new-2", happens: true}, false},
		{[]string{"new-1", "new-2", "index"}, lossy{names: "index"}, true},
		{[]string{"new-1", "new-2", "index"}, lossy{names: "new-1"}, true},
		{[]string{"index"}, lossy{names: "index", happens: true}, false},
		{[]string{"index"}, lossy{names: "index"}, true},
	} {
		dir := t.TempDir()
		for _, name := range []string{"a", "b", "index"} {
			put(t, filepath.Join(dir, name), 0o600)
		}
		targets := finish(t, c.sys, dir, c.files...)
		err := Publish(c.sys, targets)
		for _, one := range targets {
			one.Drop()
		}
		want := []string{"a", "b", "index"}
		if !c.failure {
			want = slices.Compact(append(want, c.files...))
			slices.Sort(want)
			want = slices.Compact(want)
		}
		var names []string
		entries, _ := os.ReadDir(dir)
		for _, e := range entries {
			names = append(names, e.Name())
		}
		index, _ := os.ReadFile(filepath.Join(dir, "index"))
		if (err != nil) != c.failure || !slices.Equal(names, want) || (string(index) == "new") == c.failure {
			t.Errorf("%v: %v; index %q, folder %v, want %v", c, err, index, names, want)
		}
	}
}

// A mount is a file system that does not support some calls.
type mount struct {
	Disk
	rename error
	file   lacking
}

func (m mount) Create(path string, mode fs.FileMode) (File, error) {
	f, err := m.Disk.Create(path, mode)
	m.file.File = f
	return m.file, err
}

func (m mount) Rename(from, to string) error {
	if m.rename != nil {
		return &os.LinkError{Op: "rename", Old: from, New: to, Err: m.rename}
	}
	return m.Disk.Rename(from, to)
}

type lacking struct {
	File
	truncate, sync, chmod, write error
}

func (l lacking) Truncate(n int64) error {
	return errors.Join(l.truncate, unless(l.truncate, func() error { return l.File.Truncate(n) }))
}

func (l lacking) Sync() error { return errors.Join(l.sync, unless(l.sync, l.File.Sync)) }

func (l lacking) Chmod(m fs.FileMode) error {
	return errors.Join(l.chmod, unless(l.chmod, func() error { return l.File.Chmod(m) }))
}

func (l lacking) WriteAt(p []byte, off int64) (int, error) {
	if l.write != nil {
		return 0, &fs.PathError{Op: "write", Path: "its file", Err: l.write}
	}
	return l.File.WriteAt(p, off)
}

func unless(err error, call func() error) error {
	if err != nil {
		return nil
	}
	return call()
}

func TestMountsThatLackCalls(t *testing.T) {
	// A mount without ftruncate, fsync or fchmod can store a file. One that cannot write or rename gives an
	// error that is not an argument error and names what is missing, and the old file remains.
	for name, c := range map[string]struct {
		sys   mount
		class error
		says  string
	}{
		"ftruncate ENOSYS":     {mount{file: lacking{truncate: syscall.ENOSYS}}, nil, ""},
		"ftruncate EOPNOTSUPP": {mount{file: lacking{truncate: syscall.EOPNOTSUPP}}, nil, ""},
		"ftruncate EPERM":      {mount{file: lacking{truncate: syscall.EPERM}}, nil, ""},
		"fsync EINVAL":         {mount{file: lacking{sync: syscall.EINVAL}}, nil, ""},
		"fsync ENOTSUP":        {mount{file: lacking{sync: syscall.ENOTSUP}}, nil, ""},
		"fsync EIO":            {mount{file: lacking{sync: syscall.EIO}}, errs.ErrIO, "input/output"},
		"fchmod EPERM":         {mount{file: lacking{chmod: syscall.EPERM}}, nil, ""},
		"fchmod EIO":           {mount{file: lacking{chmod: syscall.EIO}}, errs.ErrIO, "input/output"},
		"pwrite EINVAL":        {mount{file: lacking{write: syscall.EINVAL}}, errs.ErrIO, "invalid argument"},
		"rename ENOSYS":        {mount{rename: syscall.ENOSYS}, errs.ErrNotSupported, "cannot rename files"},
		"rename EINVAL":        {mount{rename: syscall.EINVAL}, errs.ErrNotSupported, "s3://"},
	} {
		dir := t.TempDir()
		path := put(t, dir+"/f", 0o644)
		err := func() error {
			target, err := New(c.sys, path, "", 0)
			if err != nil {
				return err
			}
			defer target.Drop()
			// The size is larger than the content, as for a file that ends with zeros.
			if err := errors.Join(target.Write([]byte("new"), 0), target.Finish(9)); err != nil {
				return err
			}
			return Publish(c.sys, []*Target{target})
		}()
		text, _ := os.ReadFile(path)
		isNew := string(text) == "new\x00\x00\x00\x00\x00\x00"
		if c.class == nil && (err != nil || !isNew) ||
			c.class != nil && (!errors.Is(err, c.class) || !strings.Contains(err.Error(), c.says) || isNew) {
			t.Errorf("%s: %v; %q", name, err, text)
		}
		none(t, dir)
	}
}

func TestRenameFolder(t *testing.T) {
	// A folder is published where nothing or an empty folder exists, or is exchanged with the existing folder.
	// Otherwise there is a typed error, and both folders are unchanged.
	for name, c := range map[string]struct {
		there    []string
		exchange bool
		class    error
	}{
		"no target":                 {nil, false, nil},
		"empty target":              {[]string{"to"}, false, nil},
		"target with a file":        {[]string{"to/old"}, false, errs.ErrIO},
		"exchange":                  {[]string{"to/old"}, true, nil},
		"exchange without a target": {nil, true, errs.ErrNotFound},
	} {
		dir := t.TempDir() + "/"
		for _, path := range append(c.there, "made/new") {
			if err := os.MkdirAll(dir+path, 0o700); err != nil {
				t.Fatal(err)
			}
		}
		err := RenameFolder(dir+"made", dir+"to", c.exchange)
		_, new1 := os.Stat(dir + "to/new")
		_, kept := os.Stat(dir + "made/new")
		if (err == nil) != (new1 == nil) || (err == nil) == (kept == nil) || !errors.Is(err, c.class) {
			t.Errorf("%s: %v", name, err)
		}
		if _, err := os.Stat(dir + "made/old"); c.exchange && c.class == nil && err != nil {
			t.Errorf("%s: the old folder is missing: %v", name, err)
		}
	}
}
