// Package atomicfile writes files that appear whole: under a temporary name in
// their own folder, brought to the disk, and only then renamed. Whatever stops the
// writing, readers find the old file or the new one.
//
// A new file has what the umask leaves of 0666. One that replaces another keeps
// that one's mode (without set-id bits), owner, group and POSIX ACL; until it has
// them its temporary file is the writer's alone (0600), so that a private file is
// at no moment open to more readers than the old one was. Where the group may not
// be given, it gets no more than everybody has. Other extended attributes and
// further names (hard links) stay with the old file. A symbolic link is followed
// and stays: what it leads to is replaced. The umask, which is the whole process's,
// is never touched.
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

// A Target is one file that will appear, whole, under its name: it is written
// under a temporary name in the same folder, and takes its own name by a
// rename once it is on the disk. Until then whatever had the name keeps it.
type Target struct {
	Path string // where it will be, symbolic links followed
	fs   FS
	temp string      // "" once renamed or removed
	file File        // nil once closed
	old  fs.FileInfo // what had the name when the writing began; nil: nothing
	like string      // see New
	lock *os.File    // the file again, with its lock; may be nil

	written atomic.Int64
}

// kickEvery is how many bytes are written before the disk is asked to begin
// with them, so that not all of them wait for the sync at the end.
const kickEvery = 32 << 20

// New opens the temporary file for path. Where nothing is there, the new file gets
// mode, owner, group and ACL of the file like ("": what the umask leaves).
func New(sys FS, path, like string) (*Target, error) {
	t := &Target{fs: sys, like: like}
	var err error
	if t.Path, t.old, err = look(path); err != nil {
		return nil, err
	}
	removeOrphans(sys, t.Path, tempMark, time.Minute)
	t.temp = hiddenName(t.Path, tempMark)
	if t.file, err = sys.Create(t.temp, t.mode()); err != nil {
		return nil, Failed(path, -1, err)
	}
	if f, ok := t.file.(*os.File); ok {
		// Says that somebody lives behind this name, until Drop; see
		// removeOrphans. A shard is closed long before the last one is written.
		if syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB) == nil {
			if fd, _, no := syscall.Syscall(syscall.SYS_FCNTL, f.Fd(), syscall.F_DUPFD_CLOEXEC, 0); no == 0 {
				t.lock = os.NewFile(fd, t.temp)
			}
		}
	}
	return t, nil
}

// look finds where a path leads, and the regular file there, nil if there is none.
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

// mode is that of the temporary file.
func (t *Target) mode() fs.FileMode {
	if _, now := t.pattern(); now != nil {
		return 0o600
	}
	return 0o666
}

// pattern is the file whose mode the new one gets, nil if the umask says it.
func (t *Target) pattern() (string, fs.FileInfo) {
	for _, path := range []string{t.Path, t.like} {
		if st, err := os.Lstat(path); err == nil && st.Mode().IsRegular() {
			return path, st
		}
	}
	return "", nil
}

// adopt gives the written file the owner, ACL and mode that it shall have, of the
// old file as it is now. The mode comes last: up to there the file is the writer's
// alone.
func (t *Target) adopt() error {
	path, old := t.pattern()
	if old == nil {
		return nil
	}
	mode := old.Mode().Perm()
	if own, ok := old.Sys().(*syscall.Stat_t); ok {
		// Only root may give files away; for anyone else the file is theirs.
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

// copyACL gives an open file the POSIX ACL of a path, or takes away what it has
// from its folder. File systems without ACLs are fine.
func copyACL(path string, fd int) error {
	const name = "system.posix_acl_access"
	acl := make([]byte, 1<<16) // the most that an extended attribute has
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

// Write puts bytes at an offset; it is safe in parallel.
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

// Skip has nothing to do: what is not written of a file is zero.
func (t *Target) Skip(_, _ int64) error { return nil }

// Finish gives the file its size, its owner and its mode, and waits until it is on
// the disk.
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

// Hand returns a target that has t's open file and can only finish it; t keeps the
// name. It is for a Finish that t's owner may not wait for.
func (t *Target) Hand() *Target {
	h := &Target{Path: t.Path, fs: t.fs, old: t.old, like: t.like, file: t.file}
	t.file = nil
	return h
}

// Drop ends a target: it removes what was not published.
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
			return path, nil // not a link, or not there: whoever opens it will say
		}
		if !filepath.IsAbs(to) {
			// As the system does it: ".." in to is the parent of where path is, which
			// is not always the name before.
			to = path[:strings.LastIndexByte(path, '/')+1] + to
		}
		path = to
	}
	return "", syscall.ELOOP
}

const (
	tempMark   = ".tmp-" // being written
	oldMark    = ".old-" // moved out of the way while a set of files is published
	hiddenRand = 16      // hex digits after the mark
)

// hiddenName returns a new name beside path: ".name.tmp-<random>".
func hiddenName(path, mark string) string {
	dir, name := filepath.Split(path)
	var r [hiddenRand / 2]byte
	_, _ = rand.Read(r[:]) // cannot fail
	return dir + hiddenStem(name, mark) + hex.EncodeToString(r[:])
}

// hiddenStem cuts names near the limit of file systems, 255 bytes.
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

// removeOrphans removes hidden files of earlier saves of this path whose process
// was killed: nobody holds their lock, and nothing was done to them for a
// while. What it cannot remove it leaves.
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
				touched = time.Unix(own.Ctim.Unix()) // when it got this name
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

// alive reports whether a process still holds the temporary file; in doubt it
// does.
func alive(path string) bool {
	fd, _, err := regular.Open(path)
	if err != nil {
		return true
	}
	defer syscall.Close(fd)
	return syscall.Flock(fd, syscall.LOCK_EX|syscall.LOCK_NB) != nil
}
