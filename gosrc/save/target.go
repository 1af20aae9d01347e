package save

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
)

// A target is one file that will appear, whole, under its name: it is written
// under a temporary name in the same folder, and takes its own name by a
// rename once it is on the disk. Until then whatever had the name keeps it.
type target struct {
	fs   fsys
	path string // where it will be, symbolic links followed
	temp string // "" once renamed or removed
	file file   // nil once closed
	old  fs.FileInfo
	lock *os.File // the file again, with its lock; may be nil

	written atomic.Int64
}

// kickEvery is how many bytes are written before the disk is asked to begin
// with them, so that not all of them wait for the sync at the end.
const kickEvery = 32 << 20

// newTarget opens the temporary file for path. A symbolic link is followed, as
// opening it for writing would: the file that it points to is replaced, and
// the link stays. The new file has the mode of the one that it replaces (and
// its owner, where we may give it), or what the umask leaves of 0666.
func newTarget(sys fsys, path string) (*target, error) {
	t := &target{fs: sys}
	var err error
	if t.path, err = follow(path); err != nil {
		return nil, ioError(path, -1, err)
	}
	switch st, err := os.Lstat(t.path); {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		return nil, ioError(path, -1, err)
	case !st.Mode().IsRegular():
		return nil, badArgument(path, "", "is not a regular file (%v)", st.Mode().Type())
	default:
		t.old = st
	}
	removeOrphans(sys, t.path, tempMark, time.Minute)
	t.temp = hiddenName(t.path, tempMark)
	if t.file, err = sys.create(t.temp); err != nil {
		return nil, ioError(path, -1, err)
	}
	if f, ok := t.file.(*os.File); ok {
		// Says that somebody lives behind this name, until drop; see
		// removeOrphans. A shard is closed long before the last one is written.
		if syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB) == nil {
			if fd, _, no := syscall.Syscall(syscall.SYS_FCNTL, f.Fd(), syscall.F_DUPFD_CLOEXEC, 0); no == 0 {
				t.lock = os.NewFile(fd, t.temp)
			}
		}
	}
	if t.old != nil {
		if own, ok := t.old.Sys().(*syscall.Stat_t); ok {
			// Only root may give files away; for anyone else the file is theirs.
			_ = t.file.Chown(int(own.Uid), int(own.Gid))
		}
		if err := t.file.Chmod(t.old.Mode().Perm()); err != nil {
			t.drop()
			return nil, ioError(path, -1, err)
		}
	}
	return t, nil
}

// write puts bytes at an offset; it is safe in parallel.
func (t *target) write(p []byte, off int64) error {
	n, err := t.file.WriteAt(p, off)
	if err != nil {
		return ioError(t.path, off+int64(max(0, n)), err)
	}
	all := t.written.Add(int64(n))
	if f, ok := t.file.(*os.File); ok && all/kickEvery != (all-int64(n))/kickEvery {
		const begin = 2 // SYNC_FILE_RANGE_WRITE
		_ = syscall.SyncFileRange(int(f.Fd()), 0, 0, begin)
	}
	return nil
}

// skip has nothing to do: what is not written of a file is zero.
func (t *target) skip(_, _ int64) error { return nil }

// finish gives the file its size and waits until it is on the disk.
func (t *target) finish(size int64) error {
	if err := t.file.Truncate(size); err != nil {
		return ioError(t.path, size, err)
	}
	if err := t.file.Sync(); err != nil {
		return ioError(t.path, -1, err)
	}
	f := t.file
	t.file = nil
	return ioError(t.path, -1, f.Close())
}

// drop ends a target: it removes what was not published.
func (t *target) drop() {
	if t.lock != nil {
		_ = t.lock.Close()
		t.lock = nil
	}
	if t.file != nil {
		_ = t.file.Close()
		t.file = nil
	}
	if t.temp != "" {
		_ = t.fs.remove(t.temp)
		t.temp = ""
	}
}

// publish gives finished targets their names: the last one is the one that
// readers look for (the only file, or the index of the shards).
//
// One file replaces another in one step. Of several, where names of the old
// set come again in the new one, no order of renames is safe for a reader who
// comes in between; so the old last file is moved away first: that reader
// finds no model, never half of each. When a step fails the steps before it
// are taken back.
func publish(sys fsys, ts []*target) (err error) {
	type step struct{ from, to string }
	var done []step
	move := func(from, to string) error {
		if err := sys.rename(from, to); err != nil {
			return ioError(to, -1, err)
		}
		done = append(done, step{from, to})
		return nil
	}
	var backups []string
	again := false // names of the old set come again
	defer func() {
		if err != nil {
			for i := len(done) - 1; i >= 0; i-- {
				_ = sys.rename(done[i].to, done[i].from)
			}
			return
		}
		for _, t := range ts {
			t.temp = ""
		}
		for _, b := range backups {
			_ = sys.remove(b)
		}
		if again {
			// A set that a kill left half replaced is needed no more.
			for _, t := range ts {
				removeOrphans(sys, t.path, oldMark, time.Minute)
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
			b := hiddenName(ts[i].path, oldMark)
			if err := move(ts[i].path, b); err != nil {
				return err
			}
			backups = append(backups, b)
			if ts[i] == last {
				if err := sys.syncDir(filepath.Dir(last.path)); err != nil {
					return ioError(last.path, -1, err)
				}
			}
		}
	}
	for _, t := range ts {
		if t == last && len(ts) > 1 {
			// The shards' names are durable before the index that lists them.
			if err := sys.syncDir(filepath.Dir(t.path)); err != nil {
				return ioError(t.path, -1, err)
			}
		}
		if t == last && !again {
			break
		}
		if err := move(t.temp, t.path); err != nil {
			return err
		}
	}
	if !again {
		// This rename cannot be taken back: it is what replaces the old file.
		if err := sys.rename(last.temp, last.path); err != nil {
			return ioError(last.path, -1, err)
		}
		last.temp = ""
		done = nil
	}
	// A folder that does not sync leaves the old name or the new one after a
	// power loss, either of them whole; but the caller must hear of it.
	if serr := sys.syncDir(filepath.Dir(last.path)); serr != nil {
		return ioError(last.path, -1, serr)
	}
	return nil
}

// follow resolves symbolic links of the last element of a path; the file that
// the last link names need not exist.
func follow(path string) (string, error) {
	for range 40 {
		to, err := os.Readlink(path)
		if err != nil {
			return path, nil // not a link, or not there: whoever opens it will say
		}
		if !filepath.IsAbs(to) {
			to = filepath.Join(filepath.Dir(path), to)
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
	return filepath.Join(dir, hiddenStem(name, mark)+hex.EncodeToString(r[:]))
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
func removeOrphans(sys fsys, path, mark string, age time.Duration) {
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
			p := filepath.Join(dir, n)
			st, err := os.Lstat(p)
			if err != nil || !st.Mode().IsRegular() {
				continue
			}
			touched := st.ModTime()
			if own, ok := st.Sys().(*syscall.Stat_t); ok && mark == oldMark {
				touched = time.Unix(own.Ctim.Unix()) // when it got this name
			}
			if time.Since(touched) >= age && !alive(p) {
				_ = sys.remove(p)
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
	f, err := os.Open(path)
	if err != nil {
		return true
	}
	defer f.Close()
	return syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB) != nil
}
