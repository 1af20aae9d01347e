package regular

// This file distinguishes trusted files from files that another user of the machine may have planted.

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/overwire/overwire/gosrc/errs"
)

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
