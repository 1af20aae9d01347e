// Package atomicfile writes files that appear complete or not at all. A file is written under a temporary name
// in its folder, synced to the disk, and then renamed. If writing is interrupted, readers find either the old
// file or the new one.
//
// A new file has the mode 0666 less the umask. A file that replaces another one takes over its mode (without
// set-id bits), owner, group and POSIX ACL. Until then only the writer can read it (0600), so that a private
// file never becomes readable by more users. If the process may not set the group or read the ACL, the group
// gets no more rights than all other users. If modes cannot be set, the new file remains private to its writer.
// Other extended attributes and other names (hard links) remain with the old file. Symbolic links are followed:
// their target is replaced. Blobs of a Hugging Face cache, which are the targets of links in its snapshots, are
// refused. The umask belongs to the whole process and is never changed.
package atomicfile

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/regular"
	"github.com/overwire/overwire/gosrc/internal/spawn"
)

// A Target is a file that is being written. It has a temporary name in the same folder, and is renamed once it is on
// the disk. An existing file with its final name remains until then.
type Target struct {
	Path string // path of the file, with symbolic links resolved
	New  bool   // the final name must be free when this file is renamed; see Publish
	fs   FS
	temp string      // temporary path; "" once renamed or removed
	file File        // nil once closed
	info fs.FileInfo // identifies the finished file, independent of its name
	like string      // first path of CreateTarget's likes that has a file, or ""
	lock int         // a second descriptor that holds the lock, or 0

	// Clock, if not nil, counts the nanoseconds of writing to the file and syncing it, without the time that
	// writers wait for each other.
	Clock *atomic.Int64

	gate    chan struct{} // has one element per active writer
	written atomic.Int64
}

// writers is how many goroutines may write to one file in parallel. File systems admit one at a time. A second
// one can follow immediately; more would only spin.
const writers = 2

// kickEvery is the number of bytes after which the disk is asked to start writing, which shortens the final sync.
const kickEvery = 32 << 20

// New calls Follow and CreateTarget.
func New(sys FS, path, like string, most fs.FileMode) (*Target, error) {
	place, err := Follow(path)
	if err != nil {
		return nil, Failed(path, -1, err)
	}
	return place.CreateTarget(sys, most, new(Listing), like)
}

// CreateTarget creates the temporary file for a place, and removes those of killed saves in the same folder. If no file
// exists at the place, the new one takes over mode, owner, group and ACL of the first file among likes. If none of them
// has a file, the mode is most (0666 if most is 0) less the umask. All files of a save share a Listing.
func (p *Place) CreateTarget(sys FS, most fs.FileMode, listing *Listing, likes ...string) (*Target, error) {
	if err := p.refuseUnwritable(); err != nil {
		return nil, err
	}
	like, old, err := firstFile(likes...)
	if err != nil {
		return nil, err
	}
	t := &Target{Path: p.Path, fs: sys, like: like, gate: make(chan struct{}, writers), temp: hiddenName(p.Path)}
	mode := fs.FileMode(0o666)
	if p.IsFile() || old != nil {
		mode = 0o600
	} else if most != 0 {
		mode = most & 0o666
	}
	if t.file, err = sys.Create(t.temp, mode); err != nil {
		if _, none := os.Stat(Folder(t.Path)); errors.Is(err, fs.ErrNotExist) && none != nil {
			err = errs.New(errs.ErrNotFound, "the folder %s does not exist: create it first", Folder(t.Path))
		}
		return nil, Failed(p.asked, -1, err)
	}
	if f, ok := t.file.(*os.File); ok {
		// Until Drop, the lock shows removeAll that this process is alive. It is held by a separate descriptor,
		// because the file of a shard is closed long before the last shard is written.
		if syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB) == nil {
			if fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 3); err == nil {
				t.lock = fd
			}
		}
	}
	o := orphans{path: t.Path, own: t.temp, age: time.Minute, listing: listing}
	if t.lock != 0 { // locks work here, so a file without one has no writer
		o.age, o.folder = lockTime, true
	}
	o.removeAll(sys)
	return t, nil
}

// lockTime is longer than a writer takes from creating its file to locking it.
const lockTime = 5 * time.Second

// Check returns an error for a path that New would refuse.
func Check(path string) error {
	_, err := resolvePath(path)
	return err
}

// resolvePath follows a path, and returns an error if no file may be written there.
func resolvePath(path string) (*Place, error) {
	p, err := Follow(path)
	if err != nil {
		return nil, Failed(path, -1, err)
	}
	return p, p.refuseUnwritable()
}

// A Place is the target of a path, and the file that exists there. Each save looks it up once.
type Place struct {
	Path string // path with symbolic links in the last element resolved

	asked    string      // the path as passed to Follow
	old      fs.FileInfo // nil if nothing exists
	hasLinks bool        // a folder of the path is a symbolic link
}

// IsFile reports whether p is an existing regular file.
func (p *Place) IsFile() bool { return p.old != nil && p.old.Mode().IsRegular() }

// refuseUnwritable returns an error if p cannot be written.
func (p *Place) refuseUnwritable() error {
	if p.isBlob() {
		return errs.In("save", p.asked, errs.New(errs.ErrArgument,
			"the path leads to %s in a Hugging Face cache, whose files are named by their content and shared by "+
				"snapshots: write to another folder", p.Path))
	}
	switch {
	case p.old == nil:
		return nil
	case p.old.IsDir():
		return errs.In("save", p.asked, errs.New(errs.ErrArgument, "the path is a folder: expected a file"))
	case !p.IsFile():
		return errs.In("save", p.asked, errs.New(errs.ErrArgument, "the path is not a regular file "+
			"(%v)", p.old.Mode().Type()))
	}
	return p.RefuseStrangers()
}

// RefuseStrangers refuses another user's file in a sticky, world-writable folder.
func (p *Place) RefuseStrangers() error {
	if !p.IsFile() {
		return nil
	}
	return Failed(p.asked, -1, refuseStrangers(p.Path, p.old))
}

// isBlob reports whether p is in the blobs folder of a Hugging Face cache. The name of a blob is the hash
// of its content, so snapshots would serve changed bytes as the original.
func (p *Place) isBlob() bool {
	dir, err := Folder(p.Path), error(nil)
	if p.hasLinks {
		if dir, err = filepath.EvalSymlinks(dir); err != nil {
			return false // the save will report the error
		}
	}
	if dir, err = filepath.Abs(dir); err != nil || filepath.Base(dir) != "blobs" {
		return false
	}
	st, err := os.Stat(filepath.Join(filepath.Dir(dir), "snapshots"))
	return err == nil && st.IsDir()
}

// firstFile returns the first path that has a regular file accepted by refuseStrangers, or nil. A new file
// takes over the mode of a file that it replaces or should resemble.
func firstFile(paths ...string) (string, fs.FileInfo, error) {
	for _, path := range paths {
		if path == "" {
			continue
		}
		st, err := regular.FindEntry(path)
		if err != nil {
			return "", nil, Failed(path, -1, err)
		}
		if st == nil || !st.Mode().IsRegular() {
			continue
		}
		err = refuseStrangers(path, st)
		if err == nil {
			return path, st, nil
		}
		if !errors.Is(err, errs.ErrPermission) {
			return "", nil, Failed(path, -1, err)
		}
	}
	return "", nil, nil
}

// adoptOwner sets owner, ACL and mode of the written file to the current ones of the old file. It sets the mode
// last, because only the writer can read the file until then.
func (t *Target) adoptOwner() error {
	path, old, err := firstFile(t.Path, t.like)
	if old == nil {
		return err
	}
	mode := old.Mode().Perm()
	if own, ok := old.Sys().(*syscall.Stat_t); ok {
		// Only root may change the owner. For other users, the writer remains the owner.
		if t.file.Chown(int(own.Uid), int(own.Gid)) != nil && t.file.Chown(-1, int(own.Gid)) != nil {
			mode = limitGroup(mode)
		}
	}
	if f, ok := t.file.(*os.File); ok {
		if err := copyACL(path, int(f.Fd())); errors.Is(err, fs.ErrPermission) { // a sandbox refuses it
			mode = limitGroup(mode)
		} else if err != nil {
			return Failed(t.Path, -1, err)
		}
	}
	st, err := t.file.Stat()
	if err != nil || st.Mode().Perm() == mode {
		return t.fileError(-1, err)
	}
	if err = t.file.Chmod(mode); lacksCall(err) && st.Mode().Perm()&^mode == 0 { // the file grants fewer rights
		err = nil
	}
	return t.fileError(-1, err)
}

// limitGroup removes rights from the group that other users do not have. For an ACL, this also limits its entries.
func limitGroup(mode fs.FileMode) fs.FileMode { return mode &^ ((^mode & 0o007) << 3) }

// copyACL copies the POSIX ACL of a path to an open file, or removes the ACL that the file inherited from its
// folder. It does nothing if the file system does not support ACLs.
func copyACL(path string, fd int) error {
	const name = "system.posix_acl_access"
	acl := make([]byte, 1<<10)
	n, err := unix.Getxattr(path, name, acl)
	if errors.Is(err, unix.ERANGE) {
		acl = make([]byte, 1<<16) // the largest extended attribute
		n, err = unix.Getxattr(path, name, acl)
	}
	switch {
	case err == nil:
		return unix.Fsetxattr(fd, name, acl[:n], 0)
	case errors.Is(err, unix.ENODATA):
		err = unix.Fremovexattr(fd, name)
	}
	if errors.Is(err, unix.ENODATA) || errors.Is(err, unix.ENOTSUP) || errors.Is(err, unix.ENOENT) ||
		errors.Is(err, unix.ENOSYS) {
		return nil
	}
	return err
}

// Write writes p at an offset. It is safe for concurrent use.
func (t *Target) Write(p []byte, off int64) error {
	t.gate <- struct{}{}
	start := time.Now()
	n, err := t.file.WriteAt(p, off)
	t.addTime(start)
	<-t.gate
	if err != nil {
		return t.fileError(off+int64(max(0, n)), err)
	}
	all := t.written.Add(int64(n))
	if f, ok := t.file.(*os.File); ok && all/kickEvery != (all-int64(n))/kickEvery {
		const begin = 2 // SYNC_FILE_RANGE_WRITE
		_ = syscall.SyncFileRange(int(f.Fd()), 0, 0, begin)
	}
	return nil
}

// addTime adds the time since start to the clock.
func (t *Target) addTime(start time.Time) {
	if t.Clock != nil {
		t.Clock.Add(int64(time.Since(start)))
	}
}

// Skip does nothing, because unwritten bytes of a file are zero.
func (t *Target) Skip(_, _ int64) error { return nil }

// Finish sets the file's size, owner and mode, and syncs it to the disk.
func (t *Target) Finish(size int64) error {
	defer t.addTime(time.Now())
	var err error
	if t.info, err = t.file.Stat(); err != nil {
		return t.fileError(-1, err)
	}
	if err := t.endAt(size); err != nil {
		return t.fileError(size, err)
	}
	if err := t.adoptOwner(); err != nil {
		return err
	}
	if err := syncFile(t.file); err != nil {
		return t.fileError(-1, err)
	}
	f := t.file
	t.file = nil
	return t.fileError(-1, f.Close())
}

// endAt sets a file's size. If the size is already right, it makes no call, because mounts of some stores do
// not support truncation.
func (t *Target) endAt(size int64) error {
	now := t.info.Size()
	if now == size {
		return nil
	}
	err := t.file.Truncate(size)
	if lacksCall(err) && now < size { // all bytes in between are zero
		_, err = t.file.WriteAt([]byte{0}, size-1)
	}
	return err
}

// FinishUnless is like Finish, but stops waiting when ctx ends, because a sync may take long. The sync then
// continues in the background, and Drop removes the file's name.
func (t *Target) FinishUnless(ctx context.Context, size int64) error {
	if f, ok := t.file.(*os.File); ok && regular.SyncsAtOnce(int(f.Fd())) {
		return t.Finish(size)
	}
	done := make(chan error, 1)
	rest := &Target{Path: t.Path, Clock: t.Clock, fs: t.fs, like: t.like, file: t.file}
	t.file = nil
	spawn.Go("save.sync", func() {
		err := errs.New(errs.ErrEngine, "the goroutine that syncs the file ended early")
		defer func() { done <- err }()
		err = rest.Finish(size)
		rest.Drop()
	})
	select {
	case err := <-done:
		t.info = rest.info
		return err
	case <-ctx.Done():
		return errs.In("save", t.Path, errs.Cause(ctx))
	}
}

// Drop closes the file, and removes it if it was not published.
func (t *Target) Drop() {
	if t.lock != 0 {
		_ = syscall.Flock(t.lock, syscall.LOCK_UN) // a forked child may also have the file open
		_ = syscall.Close(t.lock)
		t.lock = 0
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

// fileError is Failed for a call on the open file.
func (t *Target) fileError(off int64, err error) error {
	if pe, ok := errors.AsType[*fs.PathError](err); ok {
		err = pe.Err
	}
	return Failed(t.Path, off, errs.FromFile(err))
}

// takeName renames a finished target. The file that has the name afterwards determines the result, not the
// return value of the call: a file server's response may be lost, or may report an error although the file was
// renamed. isKnown reports whether the file could be identified.
func (t *Target) takeName(call func(from, to string) error) (isDone, isKnown bool, err error) {
	if err = call(t.temp, t.Path); err == nil {
		return true, true, nil
	}
	there, unknown := os.Lstat(t.Path)
	return unknown == nil && os.SameFile(there, t.info), unknown == nil || errors.Is(unknown, fs.ErrNotExist), err
}

// refuseStrangers refuses another user's file in a sticky, world-writable folder, as Linux does
// (fs.protected_regular). That user may have created it to become the owner of the new file.
func refuseStrangers(path string, st fs.FileInfo) error {
	folder, err := regular.FindTarget(Folder(path))
	if folder == nil || folder.Mode()&fs.ModeSticky == 0 {
		return err
	}
	return regular.RefusePlantedFile(path, st, folder)
}

// Follow resolves symbolic links in the last element of a path. The target of the last link need not exist.
// Like Linux (fs.protected_symlinks), it refuses links that another user may have planted.
func Follow(path string) (*Place, error) {
	p := &Place{Path: path, asked: path}
	for range 40 {
		var err error
		if p.hasLinks, err = regular.RefusePlantedLinks(Folder(p.Path)); err != nil {
			return nil, err
		}
		if p.old, err = regular.FindEntry(p.Path); err != nil {
			return nil, err
		}
		if p.old == nil || p.old.Mode().Type() != fs.ModeSymlink {
			return p, nil
		}
		to, err := regular.ReadLink(p.Path)
		switch {
		case errors.Is(err, syscall.EINVAL), errors.Is(err, fs.ErrNotExist):
			continue // the link is gone or has changed
		case err != nil:
			return nil, err
		}
		if !filepath.IsAbs(to) {
			// A ".." in the target refers to the parent of the real folder of path, which may differ from the
			// preceding element.
			to = p.Path[:strings.LastIndexByte(p.Path, '/')+1] + to
		}
		p.Path = to
	}
	return nil, syscall.ELOOP
}

const (
	tempMark = ".overwire-" // marks a file that is being written
	bootHex  = 8            // hex digits after the mark that identify a boot of a machine
	hidden   = 16           // hex digits after the mark; those after bootHex are random
)

// bootTag identifies a boot of this machine. Two boots have the same tag with a probability of 1 in 4,000,000,000. A
// file with a different tag becomes an orphan only after foreignAge.
var bootTag = sync.OnceValue(func() string {
	id, _ := regular.Read("/proc/sys/kernel/random/boot_id", 1<<10) // without it, all tags are the same
	sum := sha256.Sum256(id)
	return hex.EncodeToString(sum[:bootHex/2])
})

// hiddenName returns a new name in the folder of path: ".name.overwire-<digits>".
func hiddenName(path string) string {
	dir, name := filepath.Split(path)
	var r [(hidden - bootHex) / 2]byte
	_, _ = rand.Read(r[:]) // cannot fail
	return dir + hiddenStem(name) + bootTag() + hex.EncodeToString(r[:])
}

// hiddenStem returns the hidden name of a file without its digits. It shortens names that would exceed 255
// bytes, the limit of file systems.
func hiddenStem(name string) string {
	most := 255 - 1 - len(tempMark) - hidden
	if len(name) > most {
		name = name[:most]
		for !utf8.ValidString(name) && len(name) > most-4 {
			name = name[:len(name)-1]
		}
	}
	return "." + name + tempMark
}

// orphans describes the hidden files that killed saves left in the folder of a path. They are not locked by any
// process, and have not changed for age.
type orphans struct {
	path string
	own  string // the caller's own temporary file, which is not an orphan
	age  time.Duration
	// folder includes the orphans of all other files in the folder. Those from another machine or boot are
	// removed after foreignAge, because their locks may not be visible on this machine.
	folder  bool
	listing *Listing
}

// foreignAge is longer than a complete file waits for the other files of its save.
const foreignAge = 24 * time.Hour

func (o orphans) removeAll(sys FS) {
	dir, name := filepath.Split(o.path)
	if dir == "" {
		dir = "./"
	}
	stem := hiddenStem(name)
	own := filepath.Base(o.own)
	for _, n := range o.listing.hiddenNames(dir) {
		age, ok := o.minimumAge(n, stem)
		if !ok || n == own {
			continue
		}
		p := dir + n
		st, err := os.Lstat(p)
		if err != nil || !st.Mode().IsRegular() {
			continue
		}
		if time.Since(st.ModTime()) >= age && !Alive(p) {
			_ = sys.Remove(p)
		}
	}
}

// A Listing caches the names of possible orphans. Each folder is listed once, independent of the number of
// files written to it.
type Listing struct {
	mu    sync.Mutex
	names map[string][]string
}

func (l *Listing) hiddenNames(dir string) []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	hidden, ok := l.names[dir]
	if ok {
		return hidden
	}
	d, err := openPlainly(dir, unix.O_RDONLY, 0)
	if err != nil {
		return nil
	}
	defer d.Close()
	for {
		names, err := d.Readdirnames(1024)
		for _, n := range names {
			if n[0] == '.' && strings.Contains(n, tempMark) {
				hidden = append(hidden, n)
			}
		}
		if err != nil || len(names) < 1024 {
			break
		}
	}
	if l.names == nil {
		l.names = map[string][]string{}
	}
	l.names[dir] = hidden
	return hidden
}

// minimumAge returns how long a hidden file must be unchanged before it is removed. ok is false for names of other
// programs. Unless folder is set, it is also false for orphans of other files.
func (o orphans) minimumAge(name, stem string) (age time.Duration, ok bool) {
	digits := name[max(0, len(name)-hidden):]
	if bare := strings.TrimSuffix(name, digits); bare != stem &&
		!(o.folder && name[0] == '.' && strings.HasSuffix(bare, tempMark)) {
		return 0, false
	} else if strings.Trim(digits, "0123456789abcdef") != "" {
		return 0, false
	} else if bare == stem || strings.HasPrefix(digits, bootTag()) {
		return o.age, true
	}
	return foreignAge, true
}

// Alive reports whether the save that writes or has just published a file may still be running.
func Alive(path string) bool {
	fd, _, err := regular.Open(path)
	if err != nil {
		return true
	}
	defer syscall.Close(fd)
	return syscall.Flock(fd, syscall.LOCK_EX|syscall.LOCK_NB) != nil
}
