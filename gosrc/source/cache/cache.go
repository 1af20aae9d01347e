// Package cache stores whole objects of remote sources in a local folder.
//
// A file is named KEY-SUM. KEY is a hash of the URI without its query (which may be a signature), the other
// settings that select the store (such as an endpoint), the object's ETag and its size. SUM is the XXH3-128 of
// KEY and the file's bytes. Every use verifies SUM. The cache fetches an object again if its file is damaged,
// or if another user of the machine may have planted it or could change it.
//
// NAME.note records the store's last response for a URI. It is used if the store cannot be reached, or need not
// be asked because the URI refers to an immutable state.
//
// A file is written under a temporary name and then renamed, so readers never see an incomplete file. It is not
// synced; damage from a power failure is detected by SUM. If the file system supports locks, one process
// fetches an object while holding a lock on KEY.lock, and other processes wait for it.
//
// With a limit, the least recently used files are removed before a new one is added. Users may delete any file
// in the folder at any time.
package cache

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/avx"
	"github.com/overwire/overwire/gosrc/internal/ordered"
	"github.com/overwire/overwire/gosrc/internal/regular"
	"github.com/overwire/overwire/gosrc/internal/sizes"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/source/file"
	"github.com/zeebo/xxh3"
	"golang.org/x/sys/unix"
)

const (
	part  = 4 << 20 // bytes per read
	reads = 24      // maximum number of parallel reads from a remote source

	// The umask may clear more bits. Neither mode is world-writable, because world-writable files are never trusted.
	folderMode, fileMode = 0o775, 0o664
)

// A Folder is a cache folder for at most Limit bytes of objects; 0 means no limit. StoreOf returns everything
// besides the URI that determines which store a URI of the scheme refers to, so that data from one store is
// never used for another. nil means that the URI is enough.
type Folder struct {
	Path    string
	Limit   int64
	StoreOf func(scheme string) string
}

func (c Folder) storeOf(uri string) string {
	if c.StoreOf == nil {
		return ""
	}
	return c.StoreOf(source.Scheme(uri))
}

// Keep returns the object of src from the folder. It first fetches the object if it is missing, and compares it with
// the SHA-256 of the store, if that is known. It closes src.
// It does not store an object that has no Identity or is larger than the limit, and returns src itself instead.
func (c Folder) Keep(ctx context.Context, src source.Source) (source.Source, error) {
	dir, pin := c.Path, src.Facts().Identity.Pin
	if pin == "" || c.Limit > 0 && src.Size() > c.Limit {
		return src, nil
	}
	defer src.Close()
	f, err := c.keepObject(ctx, src, pin)
	if err != nil {
		if ctx.Err() != nil {
			return nil, err
		}
		return nil, errs.Place("cache", dir, "", -1, err)
	}
	defer f.Close()
	sum := src.Facts().SHA256
	c.writeNote(src.URI(), note{Pin: pin, Size: src.Size(), SHA256: sum})
	return openKept(f, src.URI(), sum)
}

// FindCopy returns the object of src from the folder, and closes src. If the folder does not have it, FindCopy
// returns src.
func (c Folder) FindCopy(ctx context.Context, src source.Source) (source.Source, error) {
	pin := src.Facts().Identity.Pin
	if pin == "" || regular.RefusePlanted(c.Path) != nil {
		return src, nil
	}
	f := findKept(ctx, c.keyOf(src.URI(), pin, src.Size()), src.Size())
	if f == nil {
		return src, nil
	}
	defer f.Close()
	defer src.Close()
	return openKept(f, src.URI(), src.Facts().SHA256)
}

// A keptFile is a file of the folder. sha256 is its hash according to the store, or "".
type keptFile struct {
	*file.File
	sha256 string
}

// Facts adds the hash to the facts of the file.
func (k keptFile) Facts() source.Facts {
	f := k.File.Facts()
	f.SHA256 = k.sha256
	return f
}

// openKept returns a source for a file of the folder. It duplicates the descriptor.
func openKept(f *os.File, uri, sha256 string) (source.Source, error) {
	local, err := file.FromFD(int(f.Fd()), uri)
	if err != nil {
		return nil, err
	}
	return keptFile{local, sha256}, nil
}

func (c Folder) keepObject(ctx context.Context, src source.Source, pin string) (*os.File, error) {
	if err := c.makeFolder(); err != nil {
		return nil, err
	}
	key := c.keyOf(src.URI(), pin, src.Size())
	if f := findKept(ctx, key, src.Size()); f != nil || ctx.Err() != nil {
		return f, context.Cause(ctx)
	}
	unlock, err := lockFile(ctx, key+".lock")
	switch {
	case isWithoutLocks(err):
		source.Notice(fmt.Sprintf(
			"cache %s: the file system does not support locks (%v): each process downloads its own copy, "+
				"and temporary files of killed processes are not removed", c.Path, err))
	case err != nil:
		return nil, err
	default:
		defer unlock()
		if f := findKept(ctx, key, src.Size()); f != nil || ctx.Err() != nil { // another process has fetched it
			return f, context.Cause(ctx)
		}
		c.removeLeftovers(key)
	}
	c.evictFiles(src.Size())
	return fetchObject(ctx, key, src)
}

// makeFolder creates the folder if it is missing. It refuses a folder that another user may have planted.
func (c Folder) makeFolder() error {
	if err := os.MkdirAll(c.Path, folderMode); err != nil {
		return errs.FromOS(err)
	}
	return regular.RefusePlanted(c.Path)
}

func (c Folder) keyOf(uri, pin string, size int64) string {
	return filepath.Join(c.Path, source.ObjectKey(uri, c.storeOf(uri), pin, size))
}

// removeLeftovers removes temporary files of killed processes, for objects and notes. The caller has locked the
// key own. For every other object, the lock shows whether its writer is alive. Notes have no lock, because
// writing one takes little time. Their temporary files are removed after an hour.
func (c Folder) removeLeftovers(own string) {
	entries, _ := os.ReadDir(c.Path)
	for _, e := range entries {
		path := filepath.Join(c.Path, e.Name())
		name, _, isObject := strings.Cut(e.Name(), ".tmp-")
		key := filepath.Join(c.Path, name)
		switch {
		case !isLeftover().MatchString(e.Name()):
		case !isObject: // a note
			if info, err := e.Info(); err == nil && time.Since(info.ModTime()) > time.Hour {
				_ = os.Remove(path)
			}
		case key == own:
			_ = os.Remove(path)
		default:
			if unlock, isFree, _ := tryLock(key + ".lock"); isFree {
				_ = os.Remove(path)
				unlock()
			}
		}
	}
}

// isLeftover matches the temporary names of objects and notes.
var isLeftover = sync.OnceValue(func() *regexp.Regexp {
	return regexp.MustCompile(`^[0-9a-f]{32}(\.tmp|\.note)-[0-9a-f]+$`)
})

// evictFiles removes objects until one of size bytes fits within the limit. Processes that have a removed file
// open can still read it.
func (c Folder) evictFiles(size int64) {
	if c.Limit <= 0 {
		return
	}
	var all []fs.FileInfo
	sum := size
	entries, _ := os.ReadDir(c.Path)
	for _, e := range entries {
		if info, err := e.Info(); err == nil && isObject().MatchString(e.Name()) {
			all, sum = append(all, info), sum+info.Size()
		}
	}
	slices.SortFunc(all, func(a, b fs.FileInfo) int { return c.lastUse(a).Compare(c.lastUse(b)) })
	for _, info := range all {
		if sum <= c.Limit {
			return
		}
		if os.Remove(filepath.Join(c.Path, info.Name())) == nil {
			sum -= info.Size()
			counts.evictions.Add(1)
		}
	}
}

// noteUse records the last use of an object as the time of its lock file. The object's own times must not
// change because readers use them to detect writes. Errors are ignored: if the folder is not writable, no files
// are evicted either.
func noteUse(key string) {
	now := unix.NsecToTimespec(time.Now().UnixNano())
	_ = unix.UtimesNanoAt(unix.AT_FDCWD, key+".lock", []unix.Timespec{now, now}, unix.AT_SYMLINK_NOFOLLOW)
}

// lastUse returns when an object was last used, or when it was added if it was not used since.
func (c Folder) lastUse(object fs.FileInfo) time.Time {
	at := object.ModTime()
	key, _, _ := strings.Cut(object.Name(), "-")
	if st, err := os.Lstat(filepath.Join(c.Path, key+".lock")); err == nil && st.ModTime().After(at) {
		at = st.ModTime()
	}
	return at
}

// isObject matches the names of objects. The folder may also contain the user's own files.
var isObject = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^[0-9a-f]{32}-[0-9a-f]{32}$`) })

// findKept opens the file of a key if its hash matches. It removes files that do not match or that are not trusted.
func findKept(ctx context.Context, key string, size int64) *os.File {
	names, _ := filepath.Glob(source.EscapeGlob(key) + "-*")
	for _, name := range names {
		fd, st, err := regular.Open(name)
		if err != nil {
			continue
		}
		f := os.NewFile(uintptr(fd), name)
		if regular.IsTrusted(name, &st) && hasSum(ctx, f, key, size) {
			noteUse(key)
			counts.hits.Add(1)
			counts.hitBytes.Add(size)
			return f
		}
		_ = f.Close()
		if ctx.Err() != nil {
			return nil
		}
		_ = os.Remove(name)
	}
	return nil
}

// hasSum reports whether a file has this size and the hash in its name.
func hasSum(ctx context.Context, f *os.File, key string, size int64) bool {
	if st, err := f.Stat(); err != nil || st.Size() != size {
		return false
	}
	sum, err := passBytes(ctx, key, size, min(8, runtime.GOMAXPROCS(0)), func(b []byte, off int64) error {
		_, err := f.ReadAt(b, off)
		return errs.FromOS(err)
	}, nil, nil)
	return err == nil && f.Name() == key+"-"+sum
}

// passBytes reads size bytes with several workers. It hashes the key and then the bytes, in order. The key is
// hashed so that the file of another object does not match under this name. If write is not nil, it is called
// with each hashed block while further blocks are being read. If second is not nil, it also hashes the bytes.
func passBytes(ctx context.Context, key string, size int64, workers int,
	read, write func(b []byte, off int64) error, second hash.Hash) (string, error) {
	h := xxh3.New128()
	_, _ = h.WriteString(filepath.Base(key))
	slots := make([][]byte, workers+workers/4+1)
	cut := func(k int) ([]byte, int64) {
		off := int64(k) * part
		return slots[k%len(slots)][:min(part, size-off)], off
	}
	tasks := ordered.Tasks{
		N: int(sizes.CeilDiv(size, part)), Window: len(slots), Workers: workers,
		Work: func(_, k int) error {
			if slot := &slots[k%len(slots)]; *slot == nil {
				*slot = make([]byte, min(part, size))
			}
			return read(cut(k))
		},
		Turn: func(k int) error {
			b, _ := cut(k)
			_, _ = h.Write(b)
			if second != nil {
				avx.Clear()
				_, _ = second.Write(b)
			}
			return nil
		},
	}
	if write != nil {
		tasks.Flush = func(k int) error { return write(cut(k)) }
	}
	if err := tasks.Run(ctx, "cache"); err != nil {
		return "", err
	}
	sum := h.Sum128().Bytes()
	return hex.EncodeToString(sum[:]), nil
}

// fetchObject fetches the object into a temporary file and renames it.
func fetchObject(ctx context.Context, key string, src source.Source) (f *os.File, err error) {
	var r [8]byte
	_, _ = rand.Read(r[:]) // cannot fail
	temp := key + ".tmp-" + hex.EncodeToString(r[:])
	if f, err = os.OpenFile(temp, os.O_RDWR|os.O_CREATE|os.O_EXCL, fileMode); err != nil {
		return nil, errs.FromOS(err)
	}
	defer func() {
		if err != nil {
			_ = f.Close()
			_ = os.Remove(temp)
			f = nil
		}
	}()
	read := func(b []byte, off int64) error { return src.ReadAt(ctx, b, off) }
	var second hash.Hash
	want := src.Facts().SHA256
	if want != "" {
		second = sha256.New()
	}
	sum, err := passBytes(ctx, key, src.Size(), reads, read, func(b []byte, off int64) error {
		_, err := f.WriteAt(b, off)
		return errs.FromOS(err)
	}, second)
	if err != nil {
		return f, err
	}
	if second != nil {
		if got := hex.EncodeToString(second.Sum(nil)); got != want {
			return f, errs.New(errs.ErrCorrupt, "%s: the SHA-256 of the received bytes is %s, but the store reports "+
				"%s: try again", errs.RedactURI(src.URI()), got, want)
		}
	}
	if err := os.Rename(temp, key+"-"+sum); err != nil {
		return f, errs.FromOS(err)
	}
	counts.fetches.Add(1)
	counts.fetchBytes.Add(src.Size())
	return f, nil
}

// lockFile waits for an exclusive lock. The lock ends with the process. unlock also releases it for forked
// children, which inherit the open file.
func lockFile(ctx context.Context, path string) (unlock func(), err error) {
	for {
		if unlock, isFree, err := tryLock(path); isFree || err != nil {
			return unlock, err
		}
		select {
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// isWithoutLocks reports whether an error means that a file system or sandbox does not support locks.
func isWithoutLocks(err error) bool {
	return slices.ContainsFunc([]error{unix.ENOLCK, unix.ENOSYS, unix.ENOTSUP, unix.EINVAL, unix.EPERM},
		func(number error) bool { return errors.Is(err, number) })
}

// tryLock is like lockFile but does not wait. It does not follow symbolic links.
func tryLock(path string) (unlock func(), isFree bool, err error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW|unix.O_NONBLOCK, fileMode)
	if err != nil {
		return nil, false, errs.FromOS(err)
	}
	err = syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
	if err == nil {
		return func() { _ = errors.Join(syscall.Flock(int(f.Fd()), syscall.LOCK_UN), f.Close()) }, true, nil
	}
	_ = f.Close()
	if errors.Is(err, syscall.EWOULDBLOCK) || errors.Is(err, syscall.EINTR) {
		return nil, false, nil
	}
	return nil, false, errs.FromOS(&os.PathError{Op: "lock", Path: path, Err: err})
}

// Counts are numbers of objects and bytes since the process started. Hits came from a folder and fetches from
// the store. Away counts the hits that were used because the store could not be reached.
type Counts struct {
	Hits       int64 `json:"hits"`
	HitBytes   int64 `json:"hit_bytes"`
	Fetches    int64 `json:"fetches"`
	FetchBytes int64 `json:"fetch_bytes"`
	Away       int64 `json:"away"`
	Evictions  int64 `json:"evictions"`
}

var counts struct{ hits, hitBytes, fetches, fetchBytes, away, evictions atomic.Int64 }

// CountedObjects returns the counts so far.
func CountedObjects() Counts {
	return Counts{
		Hits: counts.hits.Load(), HitBytes: counts.hitBytes.Load(),
		Fetches: counts.fetches.Load(), FetchBytes: counts.fetchBytes.Load(),
		Away: counts.away.Load(), Evictions: counts.evictions.Load(),
	}
}

// CountAway counts an object that Last returned because its store could not be reached.
func CountAway() { counts.away.Add(1) }

// A note is a store's last response for a URI: an object's state, its absence, or a folder's listing.
type note struct {
	Name   string   `json:"name"` // the note's file name, so that another URI's note does not match
	Pin    string   `json:"pin,omitempty"`
	Size   int64    `json:"size,omitempty"`
	SHA256 string   `json:"sha256,omitempty"` // the object's hash according to the store
	Absent bool     `json:"absent,omitempty"`
	List   []string `json:"list,omitempty"`
}

// maxNote is the largest note that is read, in bytes.
const maxNote = 64 << 20

// notePath returns the path of a URI's note. It depends on the query, which may select the object. The key of
// an object does not depend on the query because it contains the pin.
func (c Folder) notePath(uri string) string {
	query := ""
	if _, hub := source.ParseHF(uri); !hub {
		query = strings.TrimPrefix(uri, source.Path(uri))
	}
	hash := sha256.Sum256([]byte(source.BareURI(uri) + "\x00" + query + "\x00" + c.storeOf(uri)))
	return filepath.Join(c.Path, hex.EncodeToString(hash[:16])+".note")
}

// writeNote replaces a note. It ignores errors: a missing note only matters while the store cannot be reached.
func (c Folder) writeNote(uri string, n note) {
	n.Name = filepath.Base(c.notePath(uri))
	text, err := json.Marshal(n)
	if err != nil || c.makeFolder() != nil {
		return
	}
	var r [8]byte
	_, _ = rand.Read(r[:]) // cannot fail
	temp := c.notePath(uri) + "-" + hex.EncodeToString(r[:])
	if err = os.WriteFile(temp, text, fileMode); err == nil {
		err = os.Rename(temp, c.notePath(uri))
	}
	if err != nil {
		_ = os.Remove(temp)
	}
}

func (c Folder) read(uri string) (n note, ok bool) {
	path := c.notePath(uri)
	if regular.RefusePlanted(c.Path) != nil {
		return n, false
	}
	text, err := regular.ReadTrusted(path, maxNote)
	if err != nil || json.Unmarshal(text, &n) != nil || n.Name != filepath.Base(path) {
		return note{}, false
	}
	return n, true
}

// Absent records that the object does not exist.
func (c Folder) Absent(uri string) { c.writeNote(uri, note{Absent: true}) }

// Last returns the object in the state that the store last reported. It returns errs.ErrNotFound if the object
// did not exist then. It returns nil, nil if nothing is known or the object is not in the folder.
func (c Folder) Last(ctx context.Context, uri string) (source.Source, error) {
	n, ok := c.read(uri)
	switch {
	case !ok || n.Pin == "" && !n.Absent:
		return nil, nil
	case n.Absent:
		return nil, errs.In("open", uri, errs.New(errs.ErrNotFound,
			"the object did not exist when the store was last asked"))
	}
	f := findKept(ctx, c.keyOf(uri, n.Pin, n.Size), n.Size)
	if f == nil {
		return nil, context.Cause(ctx)
	}
	defer f.Close()
	return openKept(f, uri, n.SHA256)
}

// KeepList records a folder's listing.
func (c Folder) KeepList(uri string, uris []string) { c.writeNote(uri, note{List: uris}) }

// LastList returns a folder's last recorded listing, or nil.
func (c Folder) LastList(uri string) []string {
	n, _ := c.read(uri)
	return n.List
}
