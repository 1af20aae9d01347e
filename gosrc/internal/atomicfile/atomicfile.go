// Package atomicfile writes files that appear whole: each is written under a
// temporary name in its folder, synced to the disk, and only then renamed.
// Whatever stops the writing, readers find the old file or the new one.
//
// A new file has the mode that the umask leaves of 0666. A file that replaces
// another keeps the old one's mode (without set-id bits), owner, group and POSIX
// ACL; until then only the writer can read it (0600), so a private file is never
// open to more readers than the old one was. If the process may not set the
// group, or ask for the ACL, the group gets no more rights than all others; where
// modes cannot be set, the new file stays its writer's alone. Other extended attributes
// and further names (hard links) stay with the old file. A symbolic link is
// followed and kept: its target is replaced; but a blob of a Hugging Face cache,
// to which the links of its snapshots lead, is refused. The umask, which belongs to
// the whole process, is never changed.
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

// A Target is one file that is being written. It has a temporary name in the
// same folder, and gets its own name by a rename once it is on the disk. Until
// then an older file of that name stays.
type Target struct {
	Path string // the file's path, symbolic links followed
	New  bool   // no file may have the name when this one gets it; see Publish
	fs   FS
	temp string      // the temporary path; "" once renamed or removed
	file File        // nil once closed
	info fs.FileInfo // of the finished file: which one it is, whatever its name
	like string      // of the likes of CreateTarget the one that has a file; "": none
	lock int         // a second descriptor, which holds the lock; 0: none

	// Clock, if not nil, gets the nanoseconds that writing to the file and its disk takes, without
	// the waits of one writer for another.
	Clock *atomic.Int64

	gate    chan struct{} // has one for each writer that is in the file
	written atomic.Int64
}

// writers is how many write to one file at once. File systems let one after the other in:
// a second one is there when the first leaves, and more would only spin.
const writers = 2

// kickEvery is the number of bytes after which the disk is asked to start
// writing, so that the sync at the end has less to wait for.
const kickEvery = 32 << 20

// New is Follow and CreateTarget.
func New(sys FS, path, like string, most fs.FileMode) (*Target, error) {
	place, err := Follow(path)
	if err != nil {
		return nil, Failed(path, -1, err)
	}
	return place.CreateTarget(sys, most, new(Listing), like)
}

// CreateTarget opens the temporary file for a place, and removes those that killed saves left in
// its folder. If no file is there, the new one gets mode, owner,
// group and ACL of the first of likes that has one; if none has, the mode that the umask leaves of
// most, 0666 if that is 0. The files of a save share a Listing.
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
			err = errs.New(errs.ErrNotFound, "there is no folder %s: make it first", Folder(t.Path))
		}
		return nil, Failed(p.asked, -1, err)
	}
	if f, ok := t.file.(*os.File); ok {
		// Until Drop, the lock shows removeAll that this process is alive. It
		// needs a descriptor of its own: a shard's file is closed long before the
		// last shard is written.
		if syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB) == nil {
			if fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 3); err == nil {
				t.lock = fd
			}
		}
	}
	o := orphans{path: t.Path, own: t.temp, age: time.Minute, listing: listing}
	if t.lock != 0 { // locks work here: a file without one has no writer
		o.age, o.folder = lockTime, true
	}
	o.removeAll(sys)
	return t, nil
}

// lockTime is more than a writer needs from creating its file to locking it.
const lockTime = 5 * time.Second

// Check refuses a path that cannot be written to, as New does.
func Check(path string) error {
	_, err := resolvePath(path)
	return err
}

// resolvePath is Follow to where a file may be written.
func resolvePath(path string) (*Place, error) {
	p, err := Follow(path)
	if err != nil {
		return nil, Failed(path, -1, err)
	}
	return p, p.refuseUnwritable()
}

// A Place is where a path leads, and what is there: asked once for all that a save does there.
type Place struct {
	Path string // symbolic links of the last element followed

	asked    string      // the path that leads here
	old      fs.FileInfo // nil: nothing
	hasLinks bool        // among the folders
}

// IsFile reports whether there is a regular file.
func (p *Place) IsFile() bool { return p.old != nil && p.old.Mode().IsRegular() }

// refuseUnwritable refuses what cannot be written to.
func (p *Place) refuseUnwritable() error {
	if p.isBlob() {
		return errs.In("save", p.asked, errs.New(errs.ErrArgument,
			"leads to %s in a Hugging Face cache, where each file is named by its content and serves every snapshot: "+
				"write to another folder", p.Path))
	}
	switch {
	case p.old == nil:
		return nil
	case p.old.IsDir():
		return errs.In("save", p.asked, errs.New(errs.ErrArgument, "it is a folder: name the file to write in it"))
	case !p.IsFile():
		return errs.In("save", p.asked, errs.New(errs.ErrArgument, "is not a regular file (%v)", p.old.Mode().Type()))
	}
	return p.RefuseStrangers()
}

// RefuseStrangers refuses a file of another user in a sticky folder that everyone may write.
func (p *Place) RefuseStrangers() error {
	if !p.IsFile() {
		return nil
	}
	return Failed(p.asked, -1, refuseStrangers(p.Path, p.old))
}

// isBlob reports whether a place is in the folder of blobs of a Hugging Face cache,
// beside its snapshots. Other bytes under a blob's name would be served as those
// that the name is the hash of.
func (p *Place) isBlob() bool {
	dir, err := Folder(p.Path), error(nil)
	if p.hasLinks {
		if dir, err = filepath.EvalSymlinks(dir); err != nil {
			return false // the save reports it
		}
	}
	if dir, err = filepath.Abs(dir); err != nil || filepath.Base(dir) != "blobs" {
		return false
	}
	st, err := os.Stat(filepath.Join(filepath.Dir(dir), "snapshots"))
	return err == nil && st.IsDir()
}

// firstFile returns the first of some paths that has a regular file which refuseStrangers takes, nil if none has: the
// mode of a new file is that of the file that it replaces, or is to be like.
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

// adoptOwner gives the written file the owner, ACL and mode of the old file, as that
// is now. The mode comes last: until then only the writer can read the file.
func (t *Target) adoptOwner() error {
	path, old, err := firstFile(t.Path, t.like)
	if old == nil {
		return err
	}
	mode := old.Mode().Perm()
	if own, ok := old.Sys().(*syscall.Stat_t); ok {
		// Only root may change the owner; for all others it stays the writer.
		if t.file.Chown(int(own.Uid), int(own.Gid)) != nil && t.file.Chown(-1, int(own.Gid)) != nil {
			mode = limitGroup(mode)
		}
	}
	if f, ok := t.file.(*os.File); ok {
		if err := copyACL(path, int(f.Fd())); errors.Is(err, fs.ErrPermission) { // by a sandbox
			mode = limitGroup(mode)
		} else if err != nil {
			return Failed(t.Path, -1, err)
		}
	}
	st, err := t.file.Stat()
	if err != nil || st.Mode().Perm() == mode {
		return t.fileError(-1, err)
	}
	if err = t.file.Chmod(mode); lacksCall(err) && st.Mode().Perm()&^mode == 0 { // it stays with fewer rights
		err = nil
	}
	return t.fileError(-1, err)
}

// limitGroup takes from the group, and so from those that an ACL names, the rights that all others lack.
func limitGroup(mode fs.FileMode) fs.FileMode { return mode &^ ((^mode & 0o007) << 3) }

// copyACL gives an open file the POSIX ACL of a path, or removes the ACL that it
// has from its folder. It does nothing on file systems, and systems, without ACLs.
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

// Write writes p at an offset; it is safe in parallel.
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

// Skip does nothing: bytes of a file that are not written are zero.
func (t *Target) Skip(_, _ int64) error { return nil }

// Finish sets the file's size, owner and mode, and waits until it is on the disk.
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

// endAt gives the file a size, where it has another one: the mounts of some stores lack the call for it.
func (t *Target) endAt(size int64) error {
	now := t.info.Size()
	if now == size {
		return nil
	}
	err := t.file.Truncate(size)
	if lacksCall(err) && now < size { // all bytes between are zero
		_, err = t.file.WriteAt([]byte{0}, size-1)
	}
	return err
}

// FinishUnless is Finish, which may take long, but does not wait for it after the end of
// ctx: the sync then continues by itself, on a file whose name Drop removes.
func (t *Target) FinishUnless(ctx context.Context, size int64) error {
	if f, ok := t.file.(*os.File); ok && regular.SyncsAtOnce(int(f.Fd())) {
		return t.Finish(size)
	}
	done := make(chan error, 1)
	rest := &Target{Path: t.Path, Clock: t.Clock, fs: t.fs, like: t.like, file: t.file}
	t.file = nil
	spawn.Go("save.sync", func() {
		err := errs.New(errs.ErrEngine, "sync did not end")
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

// Drop ends a target: it removes the file if it was not published.
func (t *Target) Drop() {
	if t.lock != 0 {
		_ = syscall.Flock(t.lock, syscall.LOCK_UN) // a child of fork may have the file open, too
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

// refuseStrangers refuses the file that has a path if it is another user's, in a sticky folder that everyone may write,
// as Linux does (fs.protected_regular): it waits there for a file that gets its owner or its mode.
func refuseStrangers(path string, st fs.FileInfo) error {
	folder, err := regular.FindTarget(Folder(path))
	if folder == nil || folder.Mode()&fs.ModeSticky == 0 {
		return err
	}
	return regular.RefusePlantedFile(path, st, folder)
}

// Follow resolves symbolic links of the last element of a path; the file that
// the last link names need not exist. Like Linux (fs.protected_symlinks) it refuses
// those that another user may have planted, also on the way to it.
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
			return p, nil // opening it reports what is wrong
		}
		to, err := regular.ReadLink(p.Path)
		switch {
		case errors.Is(err, syscall.EINVAL), errors.Is(err, fs.ErrNotExist):
			continue // it has gone, or changed
		case err != nil:
			return nil, err
		}
		if !filepath.IsAbs(to) {
			// As the system does it: ".." in to is the parent of path's real folder,
			// which need not be the name before it.
			to = p.Path[:strings.LastIndexByte(p.Path, '/')+1] + to
		}
		p.Path = to
	}
	return nil, syscall.ELOOP
}

const (
	tempMark = ".overwire-" // a file that is being written
	bootHex  = 8            // hex digits after the mark: which start of which machine
	hidden   = 16           // hex digits after the mark, the others random
)

// bootTag differs between machines, and between their starts: of a pair, but for one in
// 4,000,000,000. A file of another machine may be taken for an orphan only after foreignAge.
var bootTag = sync.OnceValue(func() string {
	id, _ := regular.Read("/proc/sys/kernel/random/boot_id", 1<<10) // without it, all are the same
	sum := sha256.Sum256(id)
	return hex.EncodeToString(sum[:bootHex/2])
})

// hiddenName returns a new name beside path: ".name.overwire-<digits>".
func hiddenName(path string) string {
	dir, name := filepath.Split(path)
	var r [(hidden - bootHex) / 2]byte
	_, _ = rand.Read(r[:]) // cannot fail
	return dir + hiddenStem(name) + bootTag() + hex.EncodeToString(r[:])
}

// hiddenStem returns the name without its digits. It cuts names near the limit of file
// systems, 255 bytes.
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

// orphans are the hidden files that killed saves left in the folder of a path: those
// that no process has locked and that have not changed for age.
type orphans struct {
	path string
	own  string // no orphan
	age  time.Duration
	// folder means those of every path in the folder. Of another machine, or from
	// before its last start, they go after foreignAge: its locks may not be seen here.
	folder  bool
	listing *Listing
}

// foreignAge is longer than a file waits, complete, for the other files of its save.
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

// A Listing has names that may be of orphans, by folder: each folder is listed once, however many files are written
// to it.
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

// minimumAge tells how long a hidden name must not have changed before it goes; ok is
// false for names that are none of ours, or of another path that is not asked for.
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

// Alive reports whether the save that writes or has just published a file still runs, or
// may.
func Alive(path string) bool {
	fd, _, err := regular.Open(path)
	if err != nil {
		return true
	}
	defer syscall.Close(fd)
	return syscall.Flock(fd, syscall.LOCK_EX|syscall.LOCK_NB) != nil
}
