package atomicfile

// This file writes files over several runs.

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/zeebo/xxh3"
	"golang.org/x/sys/unix"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/regular"
)

// A Partial is a file that an earlier run may have begun. Its bytes are in the hidden file .NAME.partial in its
// folder. A note next to it contains the object's identity, the number of bytes and their hash. After a killed
// process, a full disk or a power failure, the bytes are verified against the note. A lock ensures that only
// one process at a time uses the file.
type Partial struct {
	Done int64 // bytes already written

	path  string // path of the file, with links resolved
	temp  string
	of    string
	file  *os.File
	hash  *xxh3.Hasher
	noted int64
}

// A partialNote describes the first bytes of a Partial, or a complete file.
type partialNote struct {
	Of   string `json:"of"`
	Done int64  `json:"done"`
	Sum  string `json:"sum"` // XXH3-128 of Of and the bytes
}

const (
	partialEnd = ".partial"
	noteEnd    = ".json"
	noteEvery  = 16 << 20 // bytes after which the note is rewritten
	maxNote    = 4 << 10
)

// partialName returns the hidden name for a path, or "" if it would be too long.
func partialName(path string) string {
	dir, name := filepath.Split(path)
	if len(name)+len(partialEnd)+len(noteEnd)+20 > 255 {
		return ""
	}
	return dir + "." + name + partialEnd
}

// OpenPartial opens the partial file for a path, with the bytes that earlier runs wrote for the same object,
// which `of` identifies. It returns nil if another process is writing the file or the folder does not permit
// such files. The caller closes the result.
func OpenPartial(ctx context.Context, path, of string) (*Partial, error) {
	place, err := resolvePath(path)
	if err != nil {
		return nil, err
	}
	p := &Partial{path: place.Path, temp: partialName(place.Path), of: of}
	if p.temp == "" {
		return nil, nil
	}
	mode := fs.FileMode(0o666)
	if place.IsFile() {
		mode = 0o600
	}
	for range 10 {
		p.file, err = openPlainly(p.temp, unix.O_RDWR|unix.O_CREAT|unix.O_NOFOLLOW|unix.O_NONBLOCK, mode)
		if err != nil || syscall.Flock(int(p.file.Fd()), syscall.LOCK_EX|syscall.LOCK_NB) != nil {
			break
		}
		var here, named unix.Stat_t
		if unix.Fstat(int(p.file.Fd()), &here) != nil || !regular.IsTrusted(p.temp, &here) || here.Nlink > 1 ||
			here.Mode&unix.S_IFMT != unix.S_IFREG {
			break
		}
		if unix.Lstat(p.temp, &named) == nil && named.Ino == here.Ino && named.Dev == here.Dev {
			return p, p.takeUp(ctx)
		}
		_ = p.file.Close() // another process has renamed it in the meantime
	}
	if p.file != nil {
		_ = p.file.Close()
	}
	return nil, nil
}

// takeUp preserves the bytes that the note describes, and truncates the file after them.
func (p *Partial) takeUp(ctx context.Context) error {
	n, ok := readNote(p.temp, p.of)
	var err error
	if ok {
		if p.hash, err = hashFile(ctx, p.file, p.of, n.Done); err != nil && ctx.Err() != nil {
			_ = p.file.Close()
			return err
		}
		ok = err == nil && sumOf(p.hash) == n.Sum
	}
	if ok {
		p.Done, p.noted = n.Done, n.Done
	} else {
		p.hash = newHash(p.of)
	}
	if err = p.file.Truncate(p.Done); err == nil {
		_, err = p.file.Seek(p.Done, io.SeekStart)
	}
	if err != nil {
		_ = p.file.Close()
	}
	return Failed(p.path, p.Done, err)
}

// Write appends bytes.
func (p *Partial) Write(b []byte) (int, error) {
	n, err := p.file.Write(b)
	_, _ = p.hash.Write(b[:n])
	p.Done += int64(n)
	if err == nil && p.Done-p.noted >= noteEvery {
		p.writeNote()
	}
	return n, err
}

// writeNote replaces the note. Without a note, the next run starts over.
func (p *Partial) writeNote() {
	text, err := json.Marshal(partialNote{p.of, p.Done, sumOf(p.hash)})
	if err != nil {
		return
	}
	temp := p.temp + noteEnd + ".new" // the lock of the Partial also protects the note
	_ = os.Remove(temp)
	f, err := openPlainly(temp, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL, 0o600)
	if err != nil {
		return
	}
	_, err = f.Write(text)
	if err = errors.Join(err, f.Close()); err == nil {
		err = os.Rename(temp, p.temp+noteEnd)
	}
	if err != nil {
		_ = os.Remove(temp)
	} else {
		p.noted = p.Done
	}
}

// Publish renames the finished file. With keepNote, the note remains for IsComplete.
func (p *Partial) Publish(keepNote bool) error {
	if keepNote {
		p.writeNote()
	}
	if err := Rename(p.temp, p.path); err != nil {
		return err
	}
	if !keepNote {
		_ = os.Remove(p.temp + noteEnd)
	}
	p.temp = ""
	return nil
}

// Close ends the writing. If the file was not published, its bytes remain for a later run.
func (p *Partial) Close() {
	switch {
	case p.temp == "":
	case p.Done == 0:
		_, _ = os.Remove(p.temp), os.Remove(p.temp+noteEnd)
	case p.Done > p.noted:
		p.writeNote()
	}
	_ = syscall.Flock(int(p.file.Fd()), syscall.LOCK_UN) // a forked child may also have the file open
	_ = p.file.Close()
}

// IsComplete reports whether the file at a path is the whole object, according to the note that Publish left
// with keepNote.
func IsComplete(ctx context.Context, path, of string, size int64) bool {
	n, ok := readNote(partialName(path), of)
	if !ok || n.Done != size {
		return false
	}
	fd, st, err := regular.Open(path)
	if err != nil {
		return false
	}
	f := os.NewFile(uintptr(fd), path)
	defer f.Close()
	h, err := hashFile(ctx, f, of, size)
	return err == nil && st.Size == size && regular.IsTrusted(path, &st) && sumOf(h) == n.Sum
}

// ForgetPartial removes the note that Publish left with keepNote.
func ForgetPartial(path string) {
	if temp := partialName(path); temp != "" {
		_ = os.Remove(temp + noteEnd)
	}
}

func readNote(temp, of string) (n partialNote, ok bool) {
	text, err := regular.ReadTrusted(temp+noteEnd, maxNote)
	ok = err == nil && json.Unmarshal(text, &n) == nil && n.Of == of && n.Done >= 0
	return n, ok
}

func newHash(of string) *xxh3.Hasher {
	h := xxh3.New()
	_, _ = h.WriteString(of)
	return h
}

// hashFile hashes the first size bytes of a file.
func hashFile(ctx context.Context, f *os.File, of string, size int64) (*xxh3.Hasher, error) {
	h, block := newHash(of), make([]byte, 4<<20)
	for off := int64(0); off < size; {
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		n, err := f.ReadAt(block[:min(int64(len(block)), size-off)], off)
		if _, _ = h.Write(block[:n]); n == 0 && err != nil {
			return nil, err
		}
		off += int64(n)
	}
	return h, nil
}

func sumOf(h *xxh3.Hasher) string {
	sum := h.Sum128().Bytes()
	return hex.EncodeToString(sum[:])
}

// A PartialFolder is a folder that is filled in several runs, under a hidden name. A lock ensures that only one
// process at a time uses it.
type PartialFolder struct {
	Work string // the folder to fill

	path string
	lock *os.File
}

// OpenPartialFolder opens the partial folder for a path, at which nothing may exist.
func OpenPartialFolder(path string) (*PartialFolder, error) {
	p := &PartialFolder{path: strings.TrimRight(path, "/")}
	if p.Work = partialName(p.path); p.Work == "" {
		return nil, errs.In("fetch", path, errs.New(errs.ErrArgument, "the folder's name is too long"))
	}
	if _, err := MakeFolder(p.Work); err != nil {
		return nil, err
	}
	if err := regular.RefusePlanted(p.Work); err != nil {
		return nil, err
	}
	var err error
	if p.lock, err = openPlainly(p.Work, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0); err != nil {
		return nil, Failed(p.Work, -1, err)
	}
	if errors.Is(syscall.Flock(int(p.lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB), syscall.EWOULDBLOCK) {
		_ = p.lock.Close()
		return nil, errs.In("fetch", path, errs.New(errs.ErrArgument,
			"another process is filling this folder: wait for it, or choose another folder"))
	}
	return p, nil
}

// KeepOnly removes files of earlier runs from the folder, except the partial and complete files of these paths.
func (p *PartialFolder) KeepOnly(paths []string) error {
	files, folders := map[string]bool{}, map[string]bool{p.Work: true}
	for _, path := range paths {
		begun := partialName(path)
		files[path], files[begun], files[begun+noteEnd] = true, true, true
		for dir := filepath.Dir(path); !folders[dir] && len(dir) > len(p.Work); dir = filepath.Dir(dir) {
			folders[dir] = true
		}
	}
	err := filepath.WalkDir(p.Work, func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && !folders[path]:
			return errors.Join(os.RemoveAll(path), fs.SkipDir)
		case !d.IsDir() && (!files[path] || !d.Type().IsRegular()):
			return os.Remove(path)
		}
		return nil
	})
	return Failed(p.Work, -1, err)
}

// Publish renames the folder.
func (p *PartialFolder) Publish() error {
	if err := (Disk{}).Rename(p.Work, p.path); err != nil {
		return Failed(p.path, -1, err)
	}
	return Failed(p.path, -1, Disk{}.SyncNames(p.path))
}

// Close unlocks the folder. With drop, it removes the folder and its contents.
func (p *PartialFolder) Close(drop bool) {
	if drop {
		_ = os.RemoveAll(p.Work)
	}
	_ = syscall.Flock(int(p.lock.Fd()), syscall.LOCK_UN)
	_ = p.lock.Close()
}
