package atomicfile

// This file defines the file system calls for writing.

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/regular"
)

// FS is a file system to write to. Tests use one that fails at its i-th call.
type FS interface {
	// Create creates a new file with mode less the umask. It never opens an existing file.
	Create(path string, mode fs.FileMode) (File, error)
	Rename(from, to string) error
	// RenameNew is like Rename, but fails with fs.ErrExist if to exists.
	RenameNew(from, to string) error
	Remove(path string) error
	// SyncNames makes the names in the folder of a file durable.
	SyncNames(path string) error
	// Free returns how many bytes may be written below dir. ok is false if the system does not report it.
	Free(dir string) (n int64, ok bool)
}

// A File is a new file that is being written. WriteAt may be called in parallel.
type File interface {
	WriteAt(p []byte, off int64) (int, error)
	Stat() (fs.FileInfo, error)
	Truncate(size int64) error
	Chmod(mode fs.FileMode) error
	Chown(uid, gid int) error
	Sync() error
	Close() error
}

// Disk is the real file system.
type Disk struct{}

// Create implements FS, like the other methods.
func (Disk) Create(path string, mode fs.FileMode) (File, error) {
	f, err := openPlainly(path, unix.O_RDWR|unix.O_CREAT|unix.O_EXCL, mode)
	if err != nil {
		return nil, err
	}
	return f, nil
}

// openPlainly is os.OpenFile without its five system calls that check whether the file can be polled.
func openPlainly(path string, flags int, mode fs.FileMode) (f *os.File, err error) {
	err = regular.Again(func() error {
		fd, err := unix.Open(path, flags|unix.O_CLOEXEC, uint32(mode.Perm()))
		if err == nil {
			f = os.NewFile(uintptr(fd), path)
		}
		return err
	})
	return f, err
}

// Rename calls the system's rename without a prior check.
func (Disk) Rename(from, to string) error {
	if err := regular.Again(func() error { return unix.Rename(from, to) }); err != nil {
		return &os.LinkError{Op: "rename", Old: from, New: to, Err: err}
	}
	return nil
}

// RenameNew uses a single system call if the file system supports it. Otherwise it checks whether the new name
// exists, and then renames.
func (Disk) RenameNew(from, to string) error {
	err := unix.Renameat2(unix.AT_FDCWD, from, unix.AT_FDCWD, to, unix.RENAME_NOREPLACE)
	if lacksCall(err) {
		if _, err = os.Lstat(to); err == nil {
			err = fs.ErrExist
		} else if errors.Is(err, fs.ErrNotExist) {
			return os.Rename(from, to)
		}
	}
	if err != nil {
		return &os.LinkError{Op: "rename", Old: from, New: to, Err: err}
	}
	return nil
}

// isUnknownCall reports whether an error means that a file system does not support the call.
func isUnknownCall(err error) bool {
	return errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOSYS) || errors.Is(err, unix.ENOTSUP)
}

// lacksCall is like isUnknownCall, but also accepts EPERM, which sandboxes and some mounts return. If EPERM
// means that permission is missing, the alternative call fails as well.
func lacksCall(err error) bool { return isUnknownCall(err) || errors.Is(err, unix.EPERM) }

// syncFile syncs a file to the disk. It succeeds if the file system does not support syncing.
func syncFile(f File) error {
	if err := f.Sync(); !isUnknownCall(err) {
		return err
	}
	return nil
}

// Remove is os.Remove.
func (Disk) Remove(path string) error { return os.Remove(path) }

// SyncNames syncs the folder. A folder that may be written but not listed cannot be opened; the whole file
// system is then synced through the file.
func (Disk) SyncNames(path string) error {
	sync := func(f *os.File) error { return syncFile(f) }
	d, err := openPlainly(Folder(path), unix.O_RDONLY, 0)
	if errors.Is(err, fs.ErrPermission) {
		sync = func(f *os.File) error { return unix.Syncfs(int(f.Fd())) }
		d, err = openPlainly(path, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	}
	if err != nil {
		return err
	}
	return errors.Join(sync(d), d.Close())
}

// Free returns how many bytes this user may write.
func (Disk) Free(dir string) (int64, bool) {
	var s syscall.Statfs_t
	if err := syscall.Statfs(dir, &s); err != nil || s.Bsize <= 0 || s.Blocks == 0 {
		return 0, false
	}
	return int64(s.Bavail) * int64(s.Bsize), true
}

// Failed adds the class, the path and the offset to a system error. off is -1 if there is no offset.
func Failed(path string, off int64, err error) error {
	if err == nil {
		return nil
	}
	// The At already contains the path.
	if pe, ok := errors.AsType[*fs.PathError](err); ok {
		err = pe.Err
	}
	if le, ok := errors.AsType[*os.LinkError](err); ok {
		err = le.Err
		if isUnknownCall(err) {
			err = fmt.Errorf("%w: the file system cannot rename files (%w): save to a local folder and copy the file, "+
				"or to the store itself (s3://...)", errs.ErrNotSupported, err)
		}
	}
	return errs.Place("save", path, "", off, errs.FromOS(err))
}
