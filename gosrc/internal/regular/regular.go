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
	"path/filepath"
	"strings"
	"syscall"

	"github.com/overwire/overwire/gosrc/errs"
	"golang.org/x/sys/unix"
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
		return errs.New(errs.ErrNotSupported, "the file's size is unknown, as in /proc: copy the file to a disk first")
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

// everyone is the mode bit of world-writable files and folders.
const everyone = 0o002

// IsPlanted reports whether an entry of a world-writable folder belongs to another user, other than root and
// the folder's owner. In other folders, the owner has permitted users to write. Linux has the same rule for
// links in sticky folders (fs.protected_symlinks).
func IsPlanted(entry, folder *unix.Stat_t) bool {
	return folder.Mode&everyone != 0 && entry.Dev == folder.Dev && // only root can mount
		entry.Uid != uint32(os.Geteuid()) && entry.Uid != 0 && entry.Uid != folder.Uid
}

// RefusePlantedFile is RefusePlantedEntry for file information from package os.
func RefusePlantedFile(path string, entry, folder fs.FileInfo) error {
	e, f := entry.Sys().(*syscall.Stat_t), folder.Sys().(*syscall.Stat_t)
	at := &unix.Stat_t{Dev: e.Dev, Uid: e.Uid}
	if IsPlanted(at, &unix.Stat_t{Dev: f.Dev, Uid: f.Uid, Mode: f.Mode}) {
		return refusePlanted(path, at)
	}
	return nil
}

// IsTrusted reports whether an open file is safe from other users: none of them can have planted it at its
// path, and not everyone can write to it.
func IsTrusted(path string, st *unix.Stat_t) bool {
	var folder unix.Stat_t
	return unix.Stat(filepath.Dir(path), &folder) == nil && !IsPlanted(st, &folder) && st.Mode&everyone == 0
}

// ReadTrusted is Read, but refuses files that are not trusted.
func ReadTrusted(path string, most int64) ([]byte, error) {
	fd, st, err := Open(path)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	if !IsTrusted(path, &st) {
		return nil, refusePlanted(path, &st)
	}
	return readAll(path, fd, &st, most)
}

// RefusePlanted refuses a path if another user of the machine may have planted the file, one of its folders or
// a link. Missing files are not planted.
func RefusePlanted(path string) error { return eachElement(path, RefusePlantedEntry) }

// RefusePlantedLinks is RefusePlanted for links only. A folder's owner may permit others to write there, but
// only the creator of a link decides where it leads. hasLinks reports whether the path has permitted links.
func RefusePlantedLinks(path string) (hasLinks bool, err error) {
	err = eachElement(path, func(at string) error {
		var entry unix.Stat_t
		err := Again(func() error { return unix.Lstat(at, &entry) })
		if err != nil || entry.Mode&unix.S_IFMT != unix.S_IFLNK {
			return refuseUnknown(at, err)
		}
		hasLinks = true
		return refuseUnknown(at, refuseOthers(at, &entry))
	})
	return hasLinks, err
}

// ReadLink returns the target of a link. It refuses a link that another user may have planted, a link in a
// planted folder, and a link to an unnamed open file. It reads the same link that it has checked, even if the
// path changes in the meantime.
func ReadLink(path string) (string, error) {
	fd := -1
	err := Again(func() (err error) {
		fd, err = unix.Open(path, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
		return err
	})
	if err != nil {
		return "", err
	}
	defer unix.Close(fd)
	var entry unix.Stat_t
	if err := unix.Fstat(fd, &entry); err != nil {
		return "", err
	}
	if entry.Mode&unix.S_IFMT != unix.S_IFLNK {
		return "", unix.EINVAL // as readlink does
	}
	if err := refuseOthers(path, &entry); err != nil {
		return "", err
	}
	err = eachElement(FolderOf(path), func(at string) error {
		err := checkEntry(at)
		if isAbsent(err) { // it existed a moment ago
			return err
		}
		return refuseUnknown(at, err)
	})
	if err != nil {
		return "", err
	}
	buf := make([]byte, unix.PathMax)
	n, err := unix.Readlinkat(fd, "", buf)
	if err != nil {
		return "", err
	}
	to := string(buf[:n])
	return to, refuseUnnamed(fd, path, to)
}

// refuseUnnamed refuses a link in /proc to an unnamed open file, such as a memfd or a deleted file. The link's
// text is only a description, and a save would write a file with that description as its name.
func refuseUnnamed(fd int, path, to string) error {
	var of unix.Statfs_t
	if err := unix.Fstatfs(fd, &of); err != nil || of.Type != unix.PROC_SUPER_MAGIC {
		return nil
	}
	name := to
	if !filepath.IsAbs(to) {
		name = FolderOf(path) + "/" + to
	}
	var open, named unix.Stat_t
	if unix.Stat(path, &open) == nil && unix.Lstat(name, &named) == nil && open.Dev == named.Dev &&
		open.Ino == named.Ino {
		return nil
	}
	return errs.New(errs.ErrArgument, "the link leads to an open file without a name (%s): use a file in a folder", to)
}

// eachElement calls check for the path and each of its folders, as the system resolves them.
func eachElement(path string, check func(at string) error) error {
	if !filepath.IsAbs(path) {
		wd, err := os.Getwd()
		if err != nil {
			return errs.FromOS(err)
		}
		path = wd + "/" + path
	}
	// As the system resolves it, ".." is the parent of a link's target.
	for at := strings.TrimRight(path, "/"); at != ""; {
		end := strings.LastIndexByte(at, '/')
		if name := at[end+1:]; name != "." && name != ".." {
			if err := check(at); err != nil {
				return err
			}
		}
		at = strings.TrimRight(at[:end], "/")
	}
	return nil
}

// RefusePlantedEntry is RefusePlanted for only the last element of a path.
func RefusePlantedEntry(path string) error { return refuseUnknown(path, checkEntry(path)) }

// checkEntry is RefusePlantedEntry with the system's own errors.
func checkEntry(path string) error {
	var entry unix.Stat_t
	if err := Again(func() error { return unix.Lstat(path, &entry) }); err != nil {
		return err
	}
	return refuseOthers(path, &entry)
}

// refuseOthers refuses an entry that is planted, even if it no longer exists at the path.
func refuseOthers(path string, entry *unix.Stat_t) error {
	var folder unix.Stat_t
	if err := Again(func() error { return unix.Stat(FolderOf(path), &folder) }); err != nil {
		return err
	}
	if IsPlanted(entry, &folder) {
		return refusePlanted(path, entry)
	}
	return nil
}

// refuseUnknown returns an error if the owner of a path cannot be determined. It returns nil if the path is
// missing or unreachable, because opening it will fail.
func refuseUnknown(path string, err error) error {
	if err == nil || isAbsent(err) || errors.Is(err, unix.EACCES) || errors.Is(err, unix.ELOOP) {
		return nil
	}
	if errs.Classed(err) {
		return err
	}
	return errs.FromOS(&os.PathError{Op: "lstat", Path: path, Err: err})
}

// FolderOf returns the folder of a path as the system resolves it, so ".." is not removed.
func FolderOf(path string) string {
	switch at := strings.LastIndexByte(path, '/'); at {
	case -1:
		return "."
	case 0:
		return "/"
	default:
		return path[:at]
	}
}

func refusePlanted(path string, entry *unix.Stat_t) error {
	return errs.New(errs.ErrPermission, "%s belongs to user %d, in a world-writable folder: remove it, "+
		"or use your own folder", path, entry.Uid)
}
