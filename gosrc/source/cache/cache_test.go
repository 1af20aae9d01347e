package cache

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/source/sourcetest"
)

// tagged is a source in memory that has an ETag and counts the bytes read.
type tagged struct {
	sourcetest.Mem
	id   string
	sum  string
	read *atomic.Int64
	fail bool
}

func (t *tagged) Facts() (f source.Facts) {
	f.Identity, f.Settled = source.Pinned(t, t.id)
	f.SHA256 = t.sum
	return f
}

func (t *tagged) ReadAt(ctx context.Context, p []byte, off int64) error {
	t.read.Add(int64(len(p)))
	if t.fail && off > 0 {
		return errs.New(errs.ErrIO, "cut")
	}
	return t.Mem.ReadAt(ctx, p, off)
}

func random(n int, seed uint64) []byte {
	b := make([]byte, n)
	_, _ = rand.NewChaCha8([32]byte{byte(seed)}).Read(b)
	return b
}

func names(t *testing.T, dir string) (kept []string) {
	t.Helper()
	list, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range list {
		if !strings.HasSuffix(e.Name(), ".lock") && !strings.HasSuffix(e.Name(), ".note") {
			kept = append(kept, e.Name())
		}
	}
	return kept
}

func TestSuite(t *testing.T) {
	sourcetest.Suite(t, sourcetest.Is{File: true, Known: true}, func(t *testing.T, data []byte) source.Source {
		s, err := Folder{Path: t.TempDir()}.Keep(context.Background(),
			&tagged{Mem: sourcetest.Mem{Name: "http://h/x", Data: data}, id: "e", read: new(atomic.Int64)})
		if err != nil {
			t.Fatal(err)
		}
		return s
	})
}

// An object is fetched only once, even by parallel callers whose URLs have different signatures. A different
// ETag means a different object. A corrupted file is fetched again. An object without identity is not stored.
func TestKeep(t *testing.T) {
	ctx := context.Background()
	dir := filepath.Join(t.TempDir(), "a*b", "c")
	data := random(9<<20+5, 1)
	var read atomic.Int64
	get := func(uri, id string, data []byte) {
		t.Helper()
		s, err := Folder{Path: dir}.Keep(ctx, &tagged{Mem: sourcetest.Mem{Name: uri, Data: data}, id: id, read: &read})
		if err != nil {
			t.Error(err)
			return
		}
		defer s.Close()
		p := make([]byte, len(data))
		if err := s.ReadAt(ctx, p, 0); err != nil || !bytes.Equal(p, data) || s.URI() != uri {
			t.Errorf("%s: %v, or wrong bytes", uri, err)
		}
	}
	var wg sync.WaitGroup
	for range 6 {
		wg.Add(1)
		go func() { defer wg.Done(); get("http://h/x?sig=1", "e", data) }()
	}
	wg.Wait()
	get("http://u:p@h/x?sig=2", "e", data)
	if read.Load() != int64(len(data)) {
		t.Errorf("fetched %d of %d bytes", read.Load(), len(data))
	}
	kept := names(t, dir)
	if len(kept) != 1 {
		t.Fatal(kept)
	}
	path := filepath.Join(dir, kept[0])
	b, _ := os.ReadFile(path)
	b[5_000_000] ^= 1
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
	read.Store(0)
	get("http://h/x", "e", data)
	if read.Load() != int64(len(data)) {
		t.Errorf("a corrupted file: fetched %d bytes", read.Load())
	}
	other := random(1000, 2)
	get("http://h/x", "f", other)
	get("http://h/empty", "f", nil)
	if kept := names(t, dir); len(kept) != 3 {
		t.Error(kept)
	}
	s, err := Folder{Path: dir}.Keep(ctx, &tagged{Mem: sourcetest.Mem{Name: "http://h/y", Data: data}, read: &read})
	if _, same := s.(*tagged); err != nil || !same {
		t.Errorf("%T %v", s, err)
	}
}

// An object is compared with the SHA-256 of its store when it is fetched. Wrong bytes are not kept. The source from the
// folder also has the SHA-256.
func TestSHA256(t *testing.T) {
	data := random(9<<20, 1)
	sum := sha256.Sum256(data)
	folder := Folder{Path: t.TempDir()}
	src := &tagged{Mem: sourcetest.Mem{Name: "hf://o/m/x", Data: slices.Clone(data)}, id: "e",
		sum: hex.EncodeToString(sum[:]), read: new(atomic.Int64)}
	src.Data[5] ^= 1
	_, err := folder.Keep(t.Context(), src)
	if !errors.Is(err, errs.ErrCorrupt) || !strings.Contains(err.Error(), src.sum) {
		t.Errorf("wrong bytes: %v", err)
	}
	if kept := names(t, folder.Path); len(kept) != 0 {
		t.Error(kept)
	}
	src.Data = data
	for range 2 {
		s, err := folder.Keep(t.Context(), src)
		if err != nil {
			t.Fatal(err)
		}
		last, err := folder.Last(t.Context(), src.Name)
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range []source.Source{s, last} {
			if got := s.Facts().SHA256; got != src.sum {
				t.Errorf("the source has the SHA-256 %q", got)
			}
			s.Close()
		}
	}
	if src.read.Load() != 2*int64(len(data)) {
		t.Errorf("read %d bytes", src.read.Load())
	}
}

// A failed fetch leaves no files, and temporary files of a killed process are removed.
func TestFailure(t *testing.T) {
	dir := t.TempDir()
	src := &tagged{Mem: sourcetest.Mem{Name: "http://h/x", Data: random(9<<20, 1)}, id: "e", read: new(atomic.Int64),
		fail: true}
	if _, err := (Folder{Path: dir}).Keep(context.Background(), src); !errors.Is(err, errs.ErrIO) {
		t.Errorf("%v", err)
	}
	if kept := names(t, dir); len(kept) != 0 {
		t.Error(kept)
	}
	locks, _ := filepath.Glob(filepath.Join(dir, "*.lock"))
	orphan := strings.TrimSuffix(locks[0], ".lock") + ".tmp-0123"
	if err := os.WriteFile(orphan, []byte("half"), 0o600); err != nil {
		t.Fatal(err)
	}
	src.fail = false
	s, err := Folder{Path: dir}.Keep(context.Background(), src)
	if err != nil {
		t.Fatal(err)
	}
	s.Close()
	if kept := names(t, dir); len(kept) != 1 || strings.Contains(kept[0], "tmp") {
		t.Error(kept)
	}
	// The same applies to temporary files of other objects and of notes. Files of a living process, and a note
	// that was just written, stay.
	dead, live, hour := strings.Repeat("d", 32), strings.Repeat("e", 32), time.Now().Add(-2*time.Hour)
	unlock, err := lockFile(context.Background(), filepath.Join(dir, live+".lock"))
	if err != nil {
		t.Fatal(err)
	}
	defer unlock()
	for _, name := range []string{dead + ".tmp-01", live + ".tmp-02", dead + ".note-03", live + ".note-04"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte("half"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Chtimes(filepath.Join(dir, dead+".note-03"), hour, hour); err != nil {
		t.Fatal(err)
	}
	src.Name = "http://h/y"
	if s, err = (Folder{Path: dir}).Keep(context.Background(), src); err != nil {
		t.Fatal(err)
	}
	s.Close()
	if kept := names(t, dir); len(kept) != 4 || slices.ContainsFunc(kept, func(name string) bool {
		return strings.HasPrefix(name, dead)
	}) {
		t.Error(kept)
	}
	if _, err := (Folder{Path: "/proc/none"}).Keep(context.Background(), src); err == nil {
		t.Error("no error for a folder that cannot be created")
	}
	ctx, cancel := context.WithCancelCause(context.Background())
	cancel(errs.ErrCancelled)
	if _, err := (Folder{Path: t.TempDir()}).Keep(ctx, src); !errors.Is(err, errs.ErrCancelled) {
		t.Errorf("%v", err)
	}
}

// With a limit, the least recently used object is removed before a new one is added. An object larger than the
// limit is not stored, and files with other names stay.
func TestLimit(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "mine"), make([]byte, 5000), 0o600); err != nil {
		t.Fatal(err)
	}
	c := Folder{Path: dir, Limit: 2500}
	kept := func(id string, size int) *atomic.Int64 {
		var read atomic.Int64
		s, err := c.Keep(context.Background(), &tagged{Mem: sourcetest.Mem{Name: "s3://b/" + id,
			Data: random(size, uint64(id[0]))}, id: id, read: &read})
		if err != nil {
			t.Fatal(err)
		}
		_ = s.Close()
		return &read
	}
	for i, id := range []string{"a", "b"} {
		kept(id, 1000)
		at := time.Now().Add(time.Duration(i-10) * time.Second)
		for _, name := range names(t, dir) {
			if info, err := os.Stat(filepath.Join(dir, name)); err == nil && isObject().MatchString(name) &&
				time.Since(info.ModTime()) < 5*time.Second {
				_ = os.Chtimes(filepath.Join(dir, name), at, at)
			}
		}
	}
	if kept("a", 1000).Load() != 0 { // used now, so b is removed first
		t.Error("fetched again")
	}
	kept("c", 1000)
	if kept("a", 1000).Load() != 0 || kept("b", 1000).Load() == 0 {
		t.Error("removed an object that was not the least recently used")
	}
	if read := kept("d", 3000); read.Load() != 0 {
		t.Error("an object larger than the limit was fetched")
	}
	if _, err := os.Stat(filepath.Join(dir, "mine")); err != nil {
		t.Error(err)
	}
}

// A child that is forked during a fetch inherits the open lock file. This does not prevent later fetches of the
// object.
func TestLockOfAForkedChild(t *testing.T) {
	dir, read := t.TempDir(), new(atomic.Int64)
	src := func(fail bool) source.Source {
		return &forking{tagged{Mem: sourcetest.Mem{Name: "http://h/x", Data: random(part+1, 1)}, id: "e", read: read,
			fail: fail}, t}
	}
	if _, err := (Folder{Path: dir}).Keep(context.Background(), src(true)); !errors.Is(err, errs.ErrIO) {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	s, err := Folder{Path: dir}.Keep(ctx, src(false))
	if err != nil {
		t.Fatal(err)
	}
	s.Close()
}

// A forking source duplicates the open lock files whenever it is read, as a fork would.
type forking struct {
	tagged
	t *testing.T
}

func (f *forking) ReadAt(ctx context.Context, p []byte, off int64) error {
	open, _ := filepath.Glob("/proc/self/fd/*")
	for _, name := range open {
		if to, _ := os.Readlink(name); strings.HasSuffix(to, ".lock") {
			number, _ := strconv.Atoi(filepath.Base(name))
			if child, err := syscall.Dup(number); err == nil {
				f.t.Cleanup(func() { _ = syscall.Close(child) })
			}
		}
	}
	return f.tagged.ReadAt(ctx, p, off)
}

// Using an object again does not look like a write to its other readers.
func TestUseChangesNoState(t *testing.T) {
	c := Folder{Path: t.TempDir(), Limit: 1 << 20}
	keep := func() source.Source {
		s, err := c.Keep(context.Background(), &tagged{Mem: sourcetest.Mem{Name: "s3://b/x", Data: random(1000, 1)}, id: "x",
			read: new(atomic.Int64)})
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	keep().Close()
	first := keep()
	defer first.Close()
	time.Sleep(10 * time.Millisecond) // more than one clock tick of the file system
	keep().Close()
	if err := source.Unwritten(first); err != nil {
		t.Error(err)
	}
}
