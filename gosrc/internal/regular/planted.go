package regular

// Tells what another user of the machine may have planted from what is to be trusted.

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

// everyone is the mode's bit of what every user may write.
const everyone = 0o002

// IsPlanted reports whether an entry of a folder that everyone may write belongs to another user: neither
// to this one, nor to root, nor to the folder's owner. Who may write another folder was let in by its owner.
// The rule is that of Linux for links in sticky folders (fs.protected_symlinks).
func IsPlanted(entry, folder *unix.Stat_t) bool {
	return folder.Mode&everyone != 0 && entry.Dev == folder.Dev && // only root mounts
		entry.Uid != uint32(os.Geteuid()) && entry.Uid != 0 && entry.Uid != folder.Uid
}

// RefusePlantedFile is RefusePlantedEntry for what package os says of a path and its folder.
func RefusePlantedFile(path string, entry, folder fs.FileInfo) error {
	e, f := entry.Sys().(*syscall.Stat_t), folder.Sys().(*syscall.Stat_t)
	at := &unix.Stat_t{Dev: e.Dev, Uid: e.Uid}
	if IsPlanted(at, &unix.Stat_t{Dev: f.Dev, Uid: f.Uid, Mode: f.Mode}) {
		return refusePlanted(path, at)
	}
	return nil
}

// IsTrusted reports whether no other user may have put an open file under its name, or may change it.
func IsTrusted(path string, st *unix.Stat_t) bool {
	var folder unix.Stat_t
	return unix.Stat(filepath.Dir(path), &folder) == nil && !IsPlanted(st, &folder) && st.Mode&everyone == 0
}

// ReadTrusted is Read of a file that IsTrusted.
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

// RefusePlanted refuses a path if another user of the machine may have planted a folder of it, a link or
// the file itself. What is not there is not planted.
func RefusePlanted(path string) error { return eachElement(path, RefusePlantedEntry) }

// RefusePlantedLinks is RefusePlanted only for links: a user who writes into another user's own folder was let in
// by it, but only its maker says where a link leads. hasLinks: the path has others.
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

// ReadLink returns where a link leads. It refuses one that another user may have planted, one in a folder that
// another user may have planted, and one to an open file without a name. What is read is what was checked, whatever has
// the path a moment later.
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
		return "", unix.EINVAL // as readlink says it
	}
	if err := refuseOthers(path, &entry); err != nil {
		return "", err
	}
	err = eachElement(FolderOf(path), func(at string) error {
		err := checkEntry(at)
		if isAbsent(err) { // it has just been there
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

// refuseUnnamed refuses an open link of /proc to an open file that has no name, as a memfd or a deleted file has none:
// the link's text only describes that, and a save would write another file called by the description.
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
	return errs.New(errs.ErrArgument, "it leads to an open file that no folder has (%s): name a file", to)
}

// eachElement calls check for the path and each of its folders, as the system finds them.
func eachElement(path string, check func(at string) error) error {
	if !filepath.IsAbs(path) {
		wd, err := os.Getwd()
		if err != nil {
			return errs.FromOS(err)
		}
		path = wd + "/" + path
	}
	// As the system reads it: ".." is the parent of where a link leads.
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

// refuseOthers refuses an entry that has a path, or had it just now, if it IsPlanted.
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

// refuseUnknown returns the error of a path if the system does not tell its owner; nil for what is not there, or not to
// be reached: opening it fails.
func refuseUnknown(path string, err error) error {
	if err == nil || isAbsent(err) || errors.Is(err, unix.EACCES) || errors.Is(err, unix.ELOOP) {
		return nil
	}
	if errs.Classed(err) {
		return err
	}
	return errs.FromOS(&os.PathError{Op: "lstat", Path: path, Err: err})
}

// FolderOf returns the folder of a path as the system finds it: ".." stays in it.
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
	return errs.New(errs.ErrPermission, "%s belongs to user %d, in a folder that everyone may write: remove it, "+
		"or choose a folder of your own", path, entry.Uid)
}
