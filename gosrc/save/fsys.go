package save

import (
	"errors"
	"io/fs"
	"os"
	"syscall"

	"github.com/overwire/overwire/gosrc/fault"
)

// fsys is what saving needs of a file system. The tests put one in its place
// whose i-th call fails.
type fsys interface {
	// create makes a new file, never opening one that exists.
	create(path string) (file, error)
	rename(from, to string) error
	remove(path string) error
	// syncDir makes the names in a folder durable.
	syncDir(dir string) error
	// free is how many bytes may still be written below dir; ok is false
	// where the system cannot tell.
	free(dir string) (n int64, ok bool)
}

// file is a new file being written; WriteAt is safe in parallel.
type file interface {
	WriteAt(p []byte, off int64) (int, error)
	Truncate(size int64) error
	Chmod(mode fs.FileMode) error
	Chown(uid, gid int) error
	Sync() error
	Close() error
}

// disk is the real file system.
type disk struct{}

func (disk) create(path string) (file, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o666)
	if err != nil {
		return nil, err
	}
	return f, nil
}

func (disk) rename(from, to string) error { return os.Rename(from, to) }
func (disk) remove(path string) error     { return os.Remove(path) }

// syncDir ignores EINVAL and ENOTSUP: file systems that have no durable
// folders say so, and there is nothing more that could be done.
func (disk) syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	err = d.Sync()
	if errors.Is(err, syscall.EINVAL) || errors.Is(err, syscall.ENOTSUP) {
		err = nil
	}
	return errors.Join(err, d.Close())
}

func (disk) free(dir string) (int64, bool) {
	var s syscall.Statfs_t
	if err := syscall.Statfs(dir, &s); err != nil || s.Bsize <= 0 || s.Blocks == 0 {
		return 0, false
	}
	return int64(s.Bavail) * int64(s.Bsize), true
}

// ioError gives a system error its class and its place. off is -1 where there
// is none.
func ioError(path string, off int64, err error) error {
	if err == nil {
		return nil
	}
	// The path is said once, by At; the system's words are enough here.
	var pe *fs.PathError
	if errors.As(err, &pe) {
		err = pe.Err
	}
	var le *os.LinkError
	if errors.As(err, &le) {
		err = le.Err
	}
	return &fault.At{Verb: "save", Source: path, Chunk: -1, Offset: off,
		Err: fault.FromOS(err)}
}

// badArgument is the caller's mistake about one target or tensor.
func badArgument(path, name, format string, args ...any) error {
	return &fault.At{Verb: "save", Source: path, Tensor: name, Chunk: -1, Offset: -1,
		Err: fault.New(fault.ErrArgument, format, args...)}
}
