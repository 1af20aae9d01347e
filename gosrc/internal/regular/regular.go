// Package regular opens and reads regular files. It immediately refuses files that could block or never end:
// pipes, sockets and devices.
//
// It opens the file before it examines it, so that the file cannot be replaced in between. Errors have a class
// but no path, which the caller adds.
package regular

import (
	"errors"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"

	"github.com/overwire/overwire/gosrc/errs"
)

// Open opens a regular file for reading and returns its state. The caller closes the descriptor, which has
// O_NONBLOCK; regular files ignore that flag.
func Open(path string) (fd int, st unix.Stat_t, err error) {
	err = Again(func() (err error) {
		fd, err = unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC|unix.O_NONBLOCK|unix.O_NOCTTY, 0)
		return err
	})
	if errors.Is(err, unix.ENXIO) { // a socket
		return -1, st, errSpecial
	}
	if err != nil {
		return -1, st, errs.FromOS(&os.PathError{Op: "open", Path: path, Err: err})
	}
	if err := Again(func() error { return unix.Fstat(fd, &st) }); err != nil {
		_ = unix.Close(fd)
		return -1, st, errs.FromOS(&os.PathError{Op: "stat", Path: path, Err: err})
	}
	if err := Check(&st); err != nil {
		_ = unix.Close(fd)
		return -1, st, err
	}
	return fd, st, nil
}

var errSpecial = errs.New(errs.ErrArgument, "not a regular file")

// Check refuses every file that is not a regular file.
func Check(st *unix.Stat_t) error {
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		return errSpecial
	}
	return nil
}

// MaxSetting limits the size of settings files, such as certificates and tokens.
const MaxSetting = 16 << 20

// Sized refuses a file that reports size 0 although it has bytes, as files in /proc do.
func Sized(fd int, st *unix.Stat_t) error {
	if st.Size > 0 {
		return nil
	}
	var b [1]byte
	n := 0
	err := Again(func() (err error) {
		n, err = unix.Pread(fd, b[:], 0)
		return err
	})
	switch {
	case err != nil:
		return errs.FromFile(&os.PathError{Op: "read", Path: "the first byte", Err: err})
	case n > 0:
		var now unix.Stat_t
		if unix.Fstat(fd, &now) == nil && now.Size > 0 { // a writer has truncated it and continues
			return errs.New(errs.ErrCorrupt, "the file is being written: load it again afterwards")
		}
		return errs.New(errs.ErrNotSupported,
			"the file's size is unknown, as in /proc: copy the file to a disk first")
	}
	return nil
}

// step is how much is read beyond the reported size, because files in /proc report 0.
const step = 32 << 10

// Read returns the content of a small file. A file with a reported or actual size above most gives errs.ErrFormat.
func Read(path string, most int64) ([]byte, error) {
	fd, st, err := Open(path)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	return readAll(path, fd, &st, most)
}

func readAll(path string, fd int, st *unix.Stat_t, most int64) ([]byte, error) {
	large := func(n int64) error {
		return errs.New(errs.ErrFormat, "the file has at least %d bytes: expected at most %d", n, most)
	}
	if st.Size > most {
		return nil, large(st.Size)
	}
	b := make([]byte, 0, min(max(st.Size, 0), most)+1)
	for {
		if len(b) == cap(b) {
			b = append(b, make([]byte, step)...)[:len(b)]
		}
		var n int
		err := Again(func() (err error) {
			n, err = unix.Read(fd, b[len(b):cap(b)])
			return err
		})
		if err != nil { // includes EAGAIN: waiting for bytes could take forever
			return nil, errs.FromFile(&os.PathError{Op: "read", Path: path, Err: err})
		}
		if n == 0 {
			return b, nil
		}
		if b = b[:len(b)+n]; int64(len(b)) > most {
			return nil, large(int64(len(b)))
		}
	}
}

// FindEntry is os.Lstat, but returns nil if the path does not exist. Other errors are returned: a caller that
// treated them as absence could replace or expose an existing file.
func FindEntry(path string) (fs.FileInfo, error) { return orAbsent(os.Lstat(path)) }

// FindTarget is FindEntry for the target of the path.
func FindTarget(path string) (fs.FileInfo, error) { return orAbsent(os.Stat(path)) }

func orAbsent(st fs.FileInfo, err error) (fs.FileInfo, error) {
	if err == nil {
		return st, nil
	}
	if isAbsent(err) {
		return nil, nil
	}
	return nil, errs.FromOS(err)
}

// isAbsent reports whether an error means that a path does not or cannot exist.
func isAbsent(err error) bool {
	return errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ENAMETOOLONG)
}

// Again repeats fn while signals interrupt it.
func Again(fn func() error) error {
	for {
		if err := fn(); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}
