package file

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/hostmem"
	"github.com/overwire/overwire/gosrc/internal/regular"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/source/sourcetest"
)

// noise creates a file of n random bytes and syncs it to the disk.
func noise(t *testing.T, n int, seed uint64) (string, []byte) {
	t.Helper()
	data := make([]byte, n)
	r := rand.NewChaCha8([32]byte{byte(seed), byte(seed >> 8)})
	_, _ = r.Read(data)
	path := filepath.Join(t.TempDir(), "x")
	o, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer o.Close()
	if _, err := o.Write(data); err != nil {
		t.Fatal(err)
	}
	if err := o.Sync(); err != nil {
		t.Fatal(err)
	}
	return path, data
}

// opened opens a file and announces a load of total bytes.
func opened(t *testing.T, path string, total int64, how string) *File {
	t.Helper()
	f, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	f.Expect(total, true, how)
	return f
}

// evict drops a range from the page cache, and skips the test if that does not work.
func evict(t *testing.T, f *File, off, n int64) {
	t.Helper()
	_ = unix.Fadvise(f.fd, off, n, unix.FADV_DONTNEED)
	if share, known := residentShare(f.fd, off, n); !known || share > 0.1 {
		t.Skipf("pages cannot be dropped from the page cache: %.2f resident, %v", share, known)
	}
}

// A file reads the same by direct I/O as through the cache.
func TestSuiteDirect(t *testing.T) {
	sourcetest.Suite(t, sourcetest.Is{File: true, Known: true}, func(t *testing.T, data []byte) source.Source {
		return opened(t, write(t, data), int64(len(data)), "direct")
	})
}

// Parallel reads at any offset, length and address return the bytes of the file in every mode, and write
// nothing outside the destination.
func TestAnyAlignment(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	path, data := noise(t, 5<<20+777, seed)
	for _, how := range []string{"direct", "buffered", "auto"} {
		t.Run(how, func(t *testing.T) {
			f := opened(t, path, 1<<50, how)
			t.Logf("O_DIRECT aligned to %d", f.direct.align)
			var wg sync.WaitGroup
			for g := range 4 {
				r := rand.New(rand.NewPCG(seed, uint64(g)))
				mem, err := unix.Mmap(-1, 0, 6<<20, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
				if err != nil {
					t.Fatal(err)
				}
				defer func() { _ = unix.Munmap(mem) }()
				wg.Add(1)
				go func() {
					defer wg.Done()
					for range 60 {
						off := r.IntN(len(data))
						n := r.IntN(len(data) - off + 1)
						at := 1 + r.IntN(len(mem)-n-2)
						switch r.IntN(4) { // like the pipeline, which reads aligned blocks
						case 0:
							off, at = off&^4095, at&^4095
						case 1:
							off, at, n = off&^511, at&^4095, n&^511
						}
						if at == 0 {
							at = 4096
						}
						mem[at-1], mem[at+n] = 0xa5, 0x5a
						if err := f.ReadAt(context.Background(), mem[at:at+n], int64(off)); err != nil {
							t.Errorf("%d bytes at %d to %d: %v", n, off, at, err)
							return
						}
						if !bytes.Equal(mem[at:at+n], data[off:off+n]) || mem[at-1] != 0xa5 || mem[at+n] != 0x5a {
							t.Errorf("%d bytes at %d to address %d: wrong bytes", n, off, at)
							return
						}
					}
				}()
			}
			wg.Wait()
		})
	}
}

// In a load that does not fit into memory, or that fills host memory, cold pages are read by direct I/O and
// stay cold, and resident pages are read from the cache. A GPU load that fits, and a load from a slow disk,
// leave everything in the cache.
func TestColdStaysCold(t *testing.T) {
	path, data := noise(t, 3*window+100_000, 7)
	f := opened(t, path, 1, "buffered")
	if kindOf(f.fd) != regular.Disk || dioAlign(f.fd) == 0 {
		t.Skip("O_DIRECT is not available")
	}
	got := make([]byte, len(data))
	read := func() {
		const piece = 1 << 20
		clear(got)
		for at := 0; at < len(data); at += piece {
			end := min(len(data), at+piece)
			f.prefetchRange(int64(at), int64(end-at)) // must not load pages that direct I/O reads
			if err := f.ReadAt(context.Background(), got[at:end], int64(at)); err != nil {
				t.Fatal(err)
			}
		}
		if !bytes.Equal(got, data) {
			t.Fatal("wrong bytes")
		}
	}
	fits := int64(len(data))
	for _, c := range []struct {
		name       string
		total      int64
		host, slow bool
		kept       float64 // share of the cold window that is resident afterwards
	}{
		{"too large", 1 << 50, false, false, 0},
		{"too large, slow", 1 << 50, true, true, 0},
		{"to the host", fits, true, false, 0},
		{"to the host, slow", fits, true, true, 1},
		{"to a GPU", fits, false, false, 1},
	} {
		undisturbed(t, path, f, fits, func() error {
			f.Expect(fits, false, "buffered")
			read()
			evict(t, f, window, window)
			if d := f.Expect(c.total, c.host, "auto"); d != depth {
				return fmt.Errorf("%s: depth %d for a partly cold load", c.name, d)
			}
			l := f.direct.load.Load()
			if l == nil && c.kept == 0 {
				t.Skip("O_DIRECT is not available")
			}
			least, most := int64(0), int64(0)
			switch {
			case c.kept == 0:
				least, most = window, window
			case c.slow:
				least, most = 1, 1<<20
			}
			if c.slow { // as if other files of the load had been slow
				l.waited.Store(depth * int64(probeTime))
				l.bytes.Store(probe - 1)
				least, most = least+probe-1, most+probe-1
			}
			read()
			if n := f.DirectBytes(); n < least || n > most {
				return fmt.Errorf("%s: %d bytes by direct I/O", c.name, n)
			}
			for i, want := range []float64{1, c.kept, 1} {
				if share, _ := residentShare(f.fd, int64(i)*window, window); share < want-0.1 || share > want+0.1 {
					return fmt.Errorf("%s, window %d: %.2f resident, want %.0f", c.name, i, share, want)
				}
			}
			return nil
		})
	}
	undisturbed(t, path, f, fits, func() error {
		f.Expect(fits, false, "buffered")
		read()
		if d := f.Expect(1<<50, true, "auto"); d != 0 {
			return fmt.Errorf("depth %d for a resident file", d)
		}
		return nil
	})
}

// undisturbed calls check up to five times, until it succeeds. A host that is short of memory, or that reclaims
// memory which seems unused, may drop pages at any time. A failure therefore counts only if untouched pages
// remain in the cache for as long as check took, at least twice.
func undisturbed(t *testing.T, path string, f *File, size int64, check func() error) {
	t.Helper()
	var err error
	stayed := 0
	for range 5 {
		start := time.Now()
		if err = check(); err == nil {
			return
		}
		took := time.Since(start)
		if _, e := os.ReadFile(path); e != nil {
			t.Fatal(e)
		}
		time.Sleep(took)
		if share, _ := residentShare(f.fd, 0, size); share == 1 {
			stayed++
		}
		t.Log(err)
	}
	if stayed > 1 {
		t.Fatal(err)
	}
	t.Skip("this host drops pages from the page cache too quickly")
}

// cachestat and mincore report the same residency.
func TestResident(t *testing.T) {
	const size = 8 << 20
	path, _ := noise(t, size, 3)
	f := opened(t, path, 1, "auto")
	undisturbed(t, path, f, size, func() error {
		if _, err := os.ReadFile(path); err != nil {
			t.Fatal(err)
		}
		evict(t, f, 4<<20, 4<<20)
		for _, c := range []struct {
			off, n int64
			want   float64
		}{{0, 4 << 20, 1}, {4 << 20, 4 << 20, 0}, {2 << 20, 4 << 20, 0.5}, {10, 0, 1}, {4095, 2, 1}} {
			a, okA := residentShare(f.fd, c.off, c.n)
			if !okA || a != c.want {
				return fmt.Errorf("%d bytes at %d: %v, %v, want %v", c.n, c.off, a, okA, c.want)
			}
			if c.n == 0 {
				continue
			}
			first, last := c.off/page, (c.off+c.n-1)/page
			if b, ok := mincoreShare(f.fd, first*page, int(last-first+1)); !ok || a != b {
				return fmt.Errorf("%d bytes at %d: cachestat %v, mincore %v", c.n, c.off, a, b)
			}
		}
		return nil
	})
}

// If the kernel refuses a direct read in the middle of a range, the rest is read through the cache.
func TestRefusedDirect(t *testing.T) {
	path, data := noise(t, 3<<20+5, 4)
	f := opened(t, path, 1, "direct")
	if f.direct.align < 2 {
		t.Skip("O_DIRECT is not available")
	}
	f.direct.align = 1 // an alignment that the kernel refuses
	got := make([]byte, len(data)-1)
	if err := f.ReadAt(context.Background(), got, 1); err != nil || !bytes.Equal(got, data[1:]) {
		t.Fatalf("%v, or wrong bytes", err)
	}
	if !f.direct.stopped.Load() {
		t.Skip("this file system accepts unaligned direct reads")
	}
	if f.direct.wantsDirect(f, 0, 1<<20) {
		t.Error("direct I/O is tried again after a refusal")
	}
}

// In every mode, a file that shrinks gives an error at the first missing byte, and a failing medium gives the
// kernel's error.
func TestReadErrors(t *testing.T) {
	for _, how := range []string{"buffered", "direct"} {
		t.Run(how, func(t *testing.T) {
			const n = 3 << 20
			for _, left := range []int64{0, 1, 4096, 1_000_001, 2<<20 + 512, n - 1} {
				path := write(t, make([]byte, n))
				f := opened(t, path, n, how)
				if err := os.Truncate(path, left); err != nil {
					t.Fatal(err)
				}
				var at *errs.At
				err := f.ReadAt(context.Background(), make([]byte, n), 0)
				if !errors.Is(err, errs.ErrCorrupt) || !errors.As(err, &at) || at.Offset != left {
					t.Errorf("cut to %d: %v", left, err)
				}
			}
		})
	}
	t.Run("EIO", func(t *testing.T) {
		// Reading unmapped memory of this process gives a real EIO from the kernel.
		fd, err := unix.Open("/proc/self/mem", unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			t.Skip(err)
		}
		f := &File{uri: "failing disk", size: 1 << 20, fd: fd}
		defer f.Close()
		var at *errs.At
		err = f.ReadAt(context.Background(), make([]byte, 1<<20), 0)
		if !errors.Is(err, errs.ErrIO) || !errors.As(err, &at) || at.Offset != 0 || at.Source != "failing disk" {
			t.Errorf("%v, want ErrIO at 0", err)
		}
	})
	t.Run("short read", func(t *testing.T) {
		// The readable memory of this process ends within the request, so the kernel returns a real short read.
		mem, err := unix.Mmap(-1, 0, 3*page, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
		if err != nil {
			t.Fatal(err)
		}
		base, have := uintptr(unsafe.Pointer(&mem[0])), int64(2*page)
		for i := range mem {
			mem[i] = byte(i * 11)
		}
		if err := unix.MunmapPtr(unsafe.Pointer(&mem[have]), page); err != nil {
			t.Fatal(err)
		}
		defer func() { _ = unix.MunmapPtr(unsafe.Pointer(&mem[0]), uintptr(have)) }()
		fd, err := unix.Open("/proc/self/mem", unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			t.Skip(err)
		}
		f := &File{uri: "failing disk", size: 1 << 62, fd: fd}
		defer f.Close()
		got := make([]byte, 3*page)
		var at *errs.At
		err = f.ReadAt(context.Background(), got, int64(base))
		if !errors.Is(err, errs.ErrIO) || !errors.As(err, &at) || at.Offset != int64(base)+have {
			t.Errorf("%v, want ErrIO after %d bytes", err, have)
		}
		if !bytes.Equal(got[:have], mem[:have]) {
			t.Error("wrong bytes before the error")
		}
	})
}

// A file's identity changes with its bytes, and is reliable only once it has settled.
func TestIdentity(t *testing.T) {
	begun := time.Now()
	path := write(t, make([]byte, 1000))
	state := func() (source.Identity, bool) {
		f, err := Open(path)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		facts := f.Facts()
		return facts.Identity, facts.Settled
	}
	a, ok := state()
	if ok && time.Since(begun) < settle-time.Second {
		t.Error("a file that was written just now has settled")
	}
	old := time.Now().Add(-time.Hour)
	if err := os.Chtimes(path, old, old); err != nil {
		t.Fatal(err)
	}
	b, _ := state()
	if a == b || b.Size != 1000 {
		t.Errorf("%+v and %+v", a, b)
	}
	if err := os.WriteFile(path, make([]byte, 1000), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Chtimes(path, old, old); err != nil {
		t.Fatal(err)
	}
	c, _ := state()
	if b == c {
		t.Error("same identity after a write that restored the modification time")
	}
}

// A write after the file was opened is detected, even if the writer restored the modification time as rsync does. A
// rename, a new mode or link, or a new file at its path does not count as a change.
func TestUnwritten(t *testing.T) {
	old := time.Now().Add(-time.Hour)
	for name, c := range map[string]struct {
		change func(path string) error
		fine   bool
	}{
		"nothing": {func(string) error { return nil }, true},
		"written": {func(path string) error { return os.WriteFile(path, make([]byte, 1000), 0o600) }, false},
		"written, with its old time": {func(path string) error {
			return errors.Join(os.WriteFile(path, make([]byte, 1000), 0o600), os.Chtimes(path, old, old))
		}, false},
		"mode": {func(path string) error { return os.Chmod(path, 0o640) }, true},
		"link": {func(path string) error { return os.Link(path, path+"2") }, true},
		"name": {func(path string) error { return os.Rename(path, path+"2") }, true},
		"replaced": {func(path string) error {
			return errors.Join(os.WriteFile(path+"2", make([]byte, 1000), 0o600), os.Rename(path+"2", path))
		}, true},
		"removed": {os.Remove, true},
	} {
		path := write(t, make([]byte, 1000))
		if err := os.Chtimes(path, old, old); err != nil {
			t.Fatal(err)
		}
		f, err := Open(path)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		time.Sleep(10 * time.Millisecond) // more than one clock tick of the file system
		if err := c.change(path); err != nil {
			t.Fatal(err)
		}
		if err := source.Unwritten(f); (err == nil) != c.fine {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// The host's available memory is a plausible number.
func TestAvailableMemory(t *testing.T) {
	if m := hostmem.Available(); m < 1<<20 || m > 1<<50 {
		t.Errorf("%d bytes available", m)
	}
}
