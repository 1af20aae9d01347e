// Package atomicfile writes files that appear whole: each is written under a
// temporary name in its folder, synced to the disk, and only then renamed.
// Whatever stops the writing, readers find the old file or the new one.
//
// A new file has the mode that the umask leaves of 0666. A file that replaces
// another keeps the old one's mode (without set-id bits), owner, group and POSIX
// ACL; until then only the writer can read it (0600), so a private file is never
// open to more readers than the old one was. If the process may not set the
// group, the group gets no more rights than everybody. Other extended attributes
// and further names (hard links) stay with the old file. A symbolic link is
// followed and kept: its target is replaced. The umask, which belongs to the
// whole process, is never changed.
package atomicfile

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"time"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"github.com/overwire/overwire/gosrc/fault"
	"github.com/overwire/overwire/gosrc/internal/regular"
)

// A Target is one file that is being written. It has a temporary name in the
// same folder, and gets its own name by a rename once it is on the disk. Until
// then an older file of that name stays.
type Target struct {
	Path string // the file's path, symbolic links followed
	fs   FS
	temp string      // the temporary path; "" once renamed or removed
	file File        // nil once closed
	old  fs.FileInfo // the file that had the name when the writing began, or nil
	like string      // see New
	lock *os.File    // a second descriptor, which holds the lock; may be nil

	written atomic.Int64
}

// kickEvery is the number of bytes after which the disk is asked to start
// writing, so that the sync at the end has less to wait for.
const kickEvery = 32 << 20

// New opens the temporary file for path, and removes those that killed saves of
// the same path left. If path does not exist, the new file gets mode, owner,
// group and ACL of the file like ("": the mode that the umask leaves).
func New(sys FS, path, like string) (*Target, error) {
	t := &Target{fs: sys, like: like}
	var err error
	if t.Path, t.old, err = look(path); err != nil {
		return nil, err
	}
	t.temp = hiddenName(t.Path, tempMark)
	if t.file, err = sys.Create(t.temp, t.mode()); err != nil {
		return nil, Failed(path, -1, err)
	}
	if f, ok := t.file.(*os.File); ok {
		// Until Drop, the lock shows removeOrphans that this process is alive. It
		// needs a descriptor of its own: a shard's file is closed long before the
		// last shard is written.
		if syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB) == nil {
			if fd, _, no := syscall.Syscall(syscall.SYS_FCNTL, f.Fd(), syscall.F_DUPFD_CLOEXEC, 0); no == 0 {
				t.lock = os.NewFile(fd, t.temp)
			}
		}
	}
	age := time.Minute
	if t.lock != nil { // locks work here: a file without one has no writer
		age = lockTime
	}
	removeOrphans(sys, t.Path, tempMark, age)
	return t, nil
}

// lockTime is more than a writer needs from creating its file to locking it.
const lockTime = 5 * time.Second

// look follows the symbolic links of a path, and returns the regular file there,
// nil if there is none.
func look(path string) (real string, old fs.FileInfo, err error) {
	if real, err = Follow(path); err != nil {
		return "", nil, Failed(path, -1, err)
	}
	switch old, err = os.Lstat(real); {
	case errors.Is(err, fs.ErrNotExist):
		return real, nil, nil
	case err != nil:
		return "", nil, Failed(path, -1, err)
	case !old.Mode().IsRegular():
		return "", nil, &fault.At{Verb: "save", Source: path, Chunk: -1, Offset: -1,
			Err: fault.New(fault.ErrArgument, "is not a regular file (%v)", old.Mode().Type())}
	}
	return real, old, nil
}

// mode returns the mode of the temporary file.
func (t *Target) mode() fs.FileMode {
	if _, now := t.pattern(); now != nil {
		return 0o600
	}
	return 0o666
}

// pattern returns the file whose mode the new one gets, nil if the umask decides.
func (t *Target) pattern() (string, fs.FileInfo) {
	for _, path := range []string{t.Path, t.like} {
		if st, err := os.Lstat(path); err == nil && st.Mode().IsRegular() {
			return path, st
		}
	}
	return "", nil
}

// adopt gives the written file the owner, ACL and mode of the old file, as that
// is now. The mode comes last: until then only the writer can read the file.
func (t *Target) adopt() error {
	path, old := t.pattern()
	if old == nil {
		return nil
	}
	mode := old.Mode().Perm()
	if own, ok := old.Sys().(*syscall.Stat_t); ok {
		// Only root may change the owner; for all others it stays the writer.
		if t.file.Chown(int(own.Uid), int(own.Gid)) != nil && t.file.Chown(-1, int(own.Gid)) != nil {
			mode &^= (^mode & 0o007) << 3
		}
	}
	if f, ok := t.file.(*os.File); ok {
		if err := copyACL(path, int(f.Fd())); err != nil {
			return Failed(t.Path, -1, err)
		}
	}
	return Failed(t.Path, -1, t.file.Chmod(mode))
}

// copyACL gives an open file the POSIX ACL of a path, or removes the ACL that it
// has from its folder. It does nothing on file systems without ACLs.
func copyACL(path string, fd int) error {
	const name = "system.posix_acl_access"
	acl := make([]byte, 1<<16) // the largest extended attribute
	n, err := unix.Getxattr(path, name, acl)
	switch {
	case err == nil:
		return unix.Fsetxattr(fd, name, acl[:n], 0)
	case errors.Is(err, unix.ENODATA):
		err = unix.Fremovexattr(fd, name)
	}
	if errors.Is(err, unix.ENODATA) || errors.Is(err, unix.ENOTSUP) || errors.Is(err, unix.ENOENT) {
		return nil
	}
	return err
}

// Write writes p at an offset; it is safe in parallel.
func (t *Target) Write(p []byte, off int64) error {
	n, err := t.file.WriteAt(p, off)
	if err != nil {
		return Failed(t.Path, off+int64(max(0, n)), err)
	}
	all := t.written.Add(int64(n))
	if f, ok := t.file.(*os.File); ok && all/kickEvery != (all-int64(n))/kickEvery {
		const begin = 2 // SYNC_FILE_RANGE_WRITE
		_ = syscall.SyncFileRange(int(f.Fd()), 0, 0, begin)
	}
	return nil
}

// Skip does nothing: bytes of a file that are not written are zero.
func (t *Target) Skip(_, _ int64) error { return nil }

// Finish sets the file's size, owner and mode, and waits until it is on the disk.
func (t *Target) Finish(size int64) error {
	if err := t.file.Truncate(size); err != nil {
		return Failed(t.Path, size, err)
	}
	if err := t.adopt(); err != nil {
		return err
	}
	if err := t.file.Sync(); err != nil {
		return Failed(t.Path, -1, err)
	}
	f := t.file
	t.file = nil
	return Failed(t.Path, -1, f.Close())
}

// Hand moves t's open file to a new target, which can only Finish it; t keeps
// the name. It is for a Finish that t's owner may not wait for.
func (t *Target) Hand() *Target {
	h := &Target{Path: t.Path, fs: t.fs, old: t.old, like: t.like, file: t.file}
	t.file = nil
	return h
}

// Drop ends a target: it removes the file if it was not published.
func (t *Target) Drop() {
	if t.lock != nil {
		_ = t.lock.Close()
		t.lock = nil
	}
	if t.file != nil {
		_ = t.file.Close()
		t.file = nil
	}
	if t.temp != "" {
		_ = t.fs.Remove(t.temp)
		t.temp = ""
	}
}

// Follow resolves symbolic links of the last element of a path; the file that
// the last link names need not exist.
func Follow(path string) (string, error) {
	for range 40 {
		to, err := os.Readlink(path)
		if err != nil {
			return path, nil // not a link, or absent: opening it reports that
		}
		if !filepath.IsAbs(to) {
			// As the system does it: ".." in to is the parent of path's real folder,
			// which need not be the name before it.
			to = path[:strings.LastIndexByte(path, '/')+1] + to
		}
		path = to
	}
	return "", syscall.ELOOP
}

const (
	tempMark   = ".tmp-" // a file that is being written
	oldMark    = ".old-" // an old file, moved away while a set of files is published
	hiddenRand = 16      // hex digits after the mark
)

// hiddenName returns a new name beside path: ".name.tmp-<random>".
func hiddenName(path, mark string) string {
	dir, name := filepath.Split(path)
	var r [hiddenRand / 2]byte
	_, _ = rand.Read(r[:]) // cannot fail
	return dir + hiddenStem(name, mark) + hex.EncodeToString(r[:])
}

// hiddenStem returns the name without its random digits. It cuts names near the
// limit of file systems, 255 bytes.
func hiddenStem(name, mark string) string {
	most := 255 - 1 - len(mark) - hiddenRand
	if len(name) > most {
		name = name[:most]
		for !utf8.ValidString(name) && len(name) > most-4 {
			name = name[:len(name)-1]
		}
	}
	return "." + name + mark
}

// removeOrphans removes the hidden files that killed saves of this path left:
// those that no process has locked and that have not changed for age. It ignores
// errors.
func removeOrphans(sys FS, path, mark string, age time.Duration) {
	dir, name := filepath.Split(path)
	if dir == "" {
		dir = "."
	}
	d, err := os.Open(dir)
	if err != nil {
		return
	}
	defer d.Close()
	stem := hiddenStem(name, mark)
	for {
		names, err := d.Readdirnames(1024)
		for _, n := range names {
			if !strings.HasPrefix(n, stem) || len(n) != len(stem)+hiddenRand {
				continue
			}
			p := dir + "/" + n
			st, err := os.Lstat(p)
			if err != nil || !st.Mode().IsRegular() {
				continue
			}
			touched := st.ModTime()
			if own, ok := st.Sys().(*syscall.Stat_t); ok && mark == oldMark {
				touched = time.Unix(own.Ctim.Unix()) // the time of its renaming
			}
			if time.Since(touched) >= age && !alive(p) {
				_ = sys.Remove(p)
			}
		}
		if err != nil {
			return
		}
	}
}

// alive reports whether a process holds the lock of a temporary file, or may.
func alive(path string) bool {
	fd, _, err := regular.Open(path)
	if err != nil {
		return true
	}
	defer syscall.Close(fd)
	return syscall.Flock(fd, syscall.LOCK_EX|syscall.LOCK_NB) != nil
}
