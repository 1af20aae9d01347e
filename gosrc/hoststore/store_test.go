package hoststore

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/hostmem"
)

// Any number of clients can fetch containers and plain files, byte for byte. A client keeps what it has fetched after
// the store ends.
func TestPutAndFetch(t *testing.T) {
	container, plain := files(t)
	s := newStore(t, 1<<30)
	c := dial(t, s)
	var sources []interface{ Close() error }
	for _, path := range []string{container, plain} {
		f := openFile(t, path)
		l := put(t, c, f, "kept")
		put(t, dial(t, s), f, "present")
		for range 2 {
			client := dial(t, s)
			src, err := client.fetch(t.Context(), l.name, l, f.Size(), "x")
			if err != nil || src == nil {
				t.Fatal(src, err)
			}
			equalBytes(t, src, path)
			if src.URI() != "x" {
				t.Error(src.URI())
			}
			sources = append(sources, src)
			defer func() { equalBytes(t, src, path) }()
		}
	}
	r := report(t, s, func(r *Report) bool { return len(r.Entries) == 2 && r.Counts.Puts == 2 })
	if r.Counts.Hits != 4 || r.Entries[0].Users != 2 || r.Entries[0].State != "ready" || r.Used == 0 {
		t.Errorf("%+v", r)
	}
	s.Close()
	if _, err := c.Budget(t.Context(), 0); !errors.Is(err, errs.ErrIO) {
		t.Error(err)
	}
	t.Cleanup(func() {
		for _, src := range sources {
			_ = src.Close()
		}
	})
}

// A name belongs to one state of one file. A different file with the same header has a different name, because its
// tensors may be different.
func TestNames(t *testing.T) {
	container, plain := files(t)
	name := func(path string) (label, bool) {
		l, ok, err := labelOf(t.Context(), openFile(t, path))
		if err != nil {
			t.Fatal(err)
		}
		return l, ok
	}
	copied := func(path string) string {
		b, err := os.ReadFile(path)
		if err == nil {
			err = os.WriteFile(path+"2", b, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
		return path + "2"
	}
	a, _ := name(container)
	b, _ := name(copied(container))
	if a.name == b.name || a.identity == "" {
		t.Error("two containers have the same name")
	}
	p, _ := name(plain)
	if q, _ := name(copied(plain)); p.name == q.name || p.identity == "" {
		t.Error("two plain files have the same name")
	}
	now := openFile(t, plain)
	if err := os.WriteFile(plain+"3", nil, 0o600); err != nil {
		t.Fatal(err)
	}
	time.Sleep(20 * time.Millisecond) // a tick of the file system's clock
	f, err := os.OpenFile(plain, os.O_WRONLY, 0)
	if err == nil {
		_, err = f.WriteAt([]byte{1}, now.Size()-1)
		_ = f.Close()
	}
	if err != nil {
		t.Fatal(err)
	}
	if q, _ := name(plain); q.name == p.name {
		t.Error("a changed plain file has its old name")
	}
	for path, text := range map[string]string{"empty": "", "short": "{", "text": "this is not a model, but text",
		"huge": "\xff\xff\xff\xff\xff\xff\xff\xff{", "beyond": "\xff\x00\x00\x00\x00\x00\x00\x00{}", "json": `{"a": 1, "b": 2}`} {
		at := filepath.Join(t.TempDir(), path)
		if err := os.WriteFile(at, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if l, ok := name(at); ok {
			t.Errorf("%s has the name %s", path, l.name)
		}
	}
	if _, ok, err := labelOf(t.Context(), now.File); ok || err != nil {
		t.Error("a plain file that was written just now has a name")
	}
}

// A client that keeps its writable descriptor can change neither size nor bytes, and a put that is still mapped for
// writing is refused.
func TestSeals(t *testing.T) {
	_, plain := files(t)
	s := newStore(t, 1<<30)
	f := openFile(t, plain)
	l, _, _ := labelOf(t.Context(), f)
	begin := func() (*Client, int) {
		c := dial(t, s)
		r, fd, err := c.ask(t.Context(), request{Op: opPut, Name: l.name, Size: f.Size()}, time.Minute)
		if err != nil || fd < 0 || r.Size != f.Size() {
			t.Fatal(r, fd, err)
		}
		t.Cleanup(func() { _ = unix.Close(fd) })
		return c, fd
	}
	c, fd := begin()
	for _, size := range []int64{0, f.Size() - 1, f.Size() + 1} {
		if err := unix.Ftruncate(fd, size); err != unix.EPERM {
			t.Errorf("resized to %d: %v", size, err)
		}
	}
	sum, err := copyInto(t.Context(), fd, f, func(int64) {}, nil)
	if err != nil {
		t.Fatal(err)
	}
	mem, err := unix.Mmap(fd, 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	q := request{Op: opSeal, Name: l.name, Identity: l.identity, Sum: sum}
	if _, _, err := c.ask(t.Context(), q, time.Minute); !errors.Is(err, errs.ErrArgument) {
		t.Errorf("sealed while mapped: %v", err)
	}
	_ = unix.Munmap(mem)
	report(t, s, func(r *Report) bool { return r.Used == 0 && len(r.Entries) == 0 })

	c, fd = begin()
	if _, err := copyInto(t.Context(), fd, f, func(int64) {}, nil); err != nil {
		t.Fatal(err)
	}
	if _, _, err := c.ask(t.Context(), q, time.Minute); err != nil {
		t.Fatal(err)
	}
	if _, err := unix.Pwrite(fd, []byte{1}, 0); err != unix.EPERM {
		t.Errorf("written after the seal: %v", err)
	}
	r, got, err := c.ask(t.Context(), request{Op: opGet, Name: l.name}, time.Minute)
	if err != nil || got < 0 || !r.Found {
		t.Fatal(r, err)
	}
	defer unix.Close(got)
	if flags, _ := unix.FcntlInt(uintptr(got), unix.F_GETFL, 0); flags&unix.O_ACCMODE != unix.O_RDONLY {
		t.Errorf("flags %o", flags)
	}
}

// Contents that do not match the name or a checksum are refused, wherever the wrong byte is.
func TestWrongContents(t *testing.T) {
	container, plain := files(t)
	s := newStore(t, 1<<30)
	for _, path := range []string{container, plain} {
		f := openFile(t, path)
		l, _, _ := labelOf(t.Context(), f)
		var sum string
		try := func(spoil func(fd int), q request) error {
			c := dial(t, s)
			defer c.Close()
			_, fd, err := c.ask(t.Context(), request{Op: opPut, Name: l.name, Size: f.Size()}, time.Minute)
			if err != nil || fd < 0 {
				t.Fatal(fd, err)
			}
			if sum, err = copyInto(t.Context(), fd, f, func(int64) {}, nil); err != nil {
				t.Fatal(err)
			}
			spoil(fd)
			_ = unix.Close(fd)
			q.Op, q.Name = opSeal, l.name
			if q.Sum == "" {
				q.Sum = sum
			}
			_, _, err = c.ask(t.Context(), q, time.Minute)
			return err
		}
		for _, at := range []int64{0, 9, 5000, f.Size() / 3, f.Size() - 100} {
			if path == container && at == f.Size()-100 {
				at = f.Size() / 2
			}
			err := try(func(fd int) {
				var b [1]byte
				_, _ = unix.Pread(fd, b[:], at)
				b[0] ^= 1
				if _, err := unix.Pwrite(fd, b[:], at); err != nil {
					t.Fatal(err)
				}
			}, request{Identity: l.identity})
			if !errors.Is(err, errs.ErrCorrupt) && !errors.Is(err, errs.ErrFormat) {
				t.Errorf("%s with a changed byte at %d: %v", path, at, err)
			}
		}
		if err := try(func(int) {}, request{Identity: strings.Repeat("a", 64)}); !errors.Is(err, errs.ErrCorrupt) {
			t.Errorf("%s with another identity: %v", path, err)
		}
		want := errs.ErrCorrupt // the name is not the digest of the bytes
		if path == plain {
			want = errs.ErrArgument
		}
		if err := try(func(int) {}, request{}); !errors.Is(err, want) {
			t.Errorf("%s without an identity: %v", path, err)
		}
		report(t, s, func(r *Report) bool { return r.Used == 0 && len(r.Entries) == 0 && r.Counts.Puts == 0 })
	}
}

// The least recently used entries make room, except those in use. A put that cannot fit is refused with the
// reason, before memory is allocated or anything is evicted.
func TestBudget(t *testing.T) {
	s := newStore(t, 10<<20)
	tab := s.table
	add := func(n int, size int64) error {
		e, existing, err := tab.reserve(fmt.Sprintf("%064d", n), "", size)
		if existing != nil {
			t.Fatal("exists")
		}
		if err == nil {
			if err = tab.allocate(t.Context(), e); err == nil {
				e.isReady = true
			} else {
				tab.abandon(e)
			}
		}
		return err
	}
	names := func() (all []int) {
		for _, e := range s.table.report().Entries {
			n, _ := strconv.Atoi(strings.TrimLeft(e.Name, "0"))
			all = append(all, n)
		}
		return all
	}
	for i := 1; i <= 3; i++ {
		if err := add(i, 3<<20); err != nil {
			t.Fatal(err)
		}
	}
	c := dial(t, s)
	if _, fd, err := c.ask(t.Context(), request{Op: opGet, Name: fmt.Sprintf("%064d", 1)}, quick); err != nil || fd < 0 {
		t.Fatal(err)
	} else {
		defer unix.Close(fd)
	}
	if err := add(4, 4<<20); err != nil { // evicts 2
		t.Fatal(err)
	}
	if got := fmt.Sprint(names()); got != "[4 1 3]" {
		t.Error(got)
	}
	var memory *errs.Memory
	if err := add(5, 8<<20); !errors.As(err, &memory) || memory.Total != 10<<20 || memory.Free != 7<<20 {
		t.Errorf("over the budget: %v", err)
	}
	if got := len(names()); got != 3 {
		t.Errorf("%d entries after a refusal", got)
	}
	leave := func(fn func() int64) {
		tab.mu.Lock()
		defer tab.mu.Unlock()
		tab.available = fn
	}
	leave(func() int64 { return spare + 2<<20 })
	if err := add(6, 7<<20); err != nil { // 2 MiB are free, and 3 and 4 have 7 MiB
		t.Errorf("with room after evictions: %v", err)
	}
	if err := add(7, 3<<20+9<<20); !errors.As(err, &memory) {
		t.Errorf("over the memory: %v", err)
	}
	leave(hostmem.Available)
	if _, err := c.Budget(t.Context(), 4<<20); err != nil {
		t.Fatal(err)
	}
	if got := fmt.Sprint(names()); got != "[1]" {
		t.Errorf("after a smaller budget: %v", got)
	}
	if n, err := c.Drop(t.Context(), fmt.Sprintf("%064d", 1)); err != nil || n != 3<<20 {
		t.Error(n, err)
	}
	report(t, s, func(r *Report) bool { return r.Used == 3<<20 && r.Entries[0].State == "dropped" })
	c.Close()
	report(t, s, func(r *Report) bool { return r.Used == 0 && len(r.Entries) == 0 })
}

// Many clients that put one name at the same time leave one entry.
func TestConcurrentPuts(t *testing.T) {
	container, _ := files(t)
	s := newStore(t, 1<<30)
	var wg sync.WaitGroup
	var mu sync.Mutex
	states := map[string]int{}
	for range 8 {
		wg.Go(func() {
			c, err := Dial(t.Context(), s.Path())
			if err != nil {
				t.Error(err)
				return
			}
			defer c.Close()
			state, err := c.Put(t.Context(), openFile(t, container), func(int64) {})
			if err != nil {
				t.Error(err)
			}
			mu.Lock()
			states[state]++
			mu.Unlock()
		})
	}
	wg.Wait()
	if states["kept"] != 1 || states["kept"]+states["writing"]+states["present"] != 8 {
		t.Error(states)
	}
	report(t, s, func(r *Report) bool { return len(r.Entries) == 1 && r.Counts.Puts == 1 })
}

// A client that is killed at any step leaves either a whole entry or nothing.
func TestKilledClients(t *testing.T) {
	container, plain := files(t)
	s := newStore(t, 1<<30)
	for i, die := range []string{"connected", "putting", "put", "half", "copied", "sealing", "sealed", "fetched", "dropped"} {
		path := []string{container, plain}[i%2]
		p := child{Socket: s.Path(), Path: path, Die: die}.start(t, nil)
		for line := p.next(); line != ""; line = p.next() {
			if strings.HasPrefix(line, "error") {
				t.Fatalf("%s: %s", die, line)
			}
			p.resume()
		}
		_ = p.Wait()
		whole := die == "sealing" || die == "sealed" || die == "fetched"
		r := report(t, s, func(r *Report) bool {
			return (len(r.Entries) == 1) == whole && (!whole || r.Entries[0].State == "ready" && r.Entries[0].Users == 0)
		})
		if (r.Used > 0) != whole {
			t.Errorf("%s: %+v", die, r)
		}
		if whole {
			f := openFile(t, path)
			l, _, _ := labelOf(t.Context(), f)
			c := dial(t, s)
			src, err := c.fetch(t.Context(), l.name, l, f.Size(), "x")
			if err != nil || src == nil {
				t.Fatal(err)
			}
			equalBytes(t, src, path)
			_ = src.Close()
			if _, err := c.Drop(t.Context(), l.name); err != nil {
				t.Fatal(err)
			}
			c.Close()
			report(t, s, func(r *Report) bool { return len(r.Entries) == 0 })
		}
	}
}

// If the store is killed at any step of a client, the client gets an error and keeps what it has fetched. A new store
// starts at the same socket. Only one store can run there.
func TestKilledStores(t *testing.T) {
	container, _ := files(t)
	f := openFile(t, container)
	l, _, _ := labelOf(t.Context(), f)
	socket := filepath.Join(t.TempDir(), "s")
	before := openDescriptors(t)
	for _, die := range []string{"connected", "put", "half", "copied", "sealing", "sealed", "fetched"} {
		store := child{Socket: socket, Budget: 1 << 30}.start(t, nil)
		if line := store.next(); line != "listening" {
			t.Fatal(line)
		}
		if _, err := Listen(Options{Socket: socket, Budget: 1}); !errors.Is(err, errs.ErrArgument) {
			t.Errorf("a second store: %v", err)
		}
		p := child{Socket: socket, Path: container, Stop: die}.start(t, nil)
		line := p.next()
		for ; line != die; line = p.next() {
			if line == "" || strings.HasPrefix(line, "error") {
				t.Fatalf("before %s: %q", die, line)
			}
			p.resume()
		}
		var held *Client
		if die == "fetched" {
			var err error
			if held, err = Dial(t.Context(), socket); err != nil {
				t.Fatal(err)
			}
			src, err := held.fetch(t.Context(), l.name, l, f.Size(), "x")
			if err != nil || src == nil {
				t.Fatal(err)
			}
			store.kill()
			equalBytes(t, src, container)
			_ = src.Close()
		}
		store.kill()
		p.resume()
		for line = p.next(); line == "half" || line == "copied"; line = p.next() { // copying needs no store
			p.resume()
		}
		if !strings.HasPrefix(line, "error") {
			t.Errorf("after %s: %q", die, line)
		}
		p.kill()
		if held != nil {
			if _, err := held.Budget(t.Context(), 0); !errors.Is(err, errs.ErrIO) {
				t.Error(err)
			}
		}
	}
	sameDescriptors(t, before)
	if _, err := Dial(t.Context(), socket); !errors.Is(err, errs.ErrNotFound) {
		t.Errorf("no store: %v", err)
	}
}

// A store in a control group refuses puts that exceed the group's remaining memory, and is not killed.
func TestControlGroup(t *testing.T) {
	group := "/sys/fs/cgroup/memory/overwire-test-" + strconv.Itoa(os.Getpid())
	if err := os.Mkdir(group, 0o755); err != nil {
		t.Skip("cgroup v1 is not available: ", err)
	}
	defer os.Remove(group)
	if err := os.WriteFile(group+"/memory.limit_in_bytes", []byte(strconv.Itoa(spare+100<<20)), 0); err != nil {
		t.Skip(err)
	}
	socket := filepath.Join(t.TempDir(), "s")
	store := child{Socket: socket, Budget: 1 << 40}.start(t, nil)
	if line := store.next(); line != "listening" {
		t.Fatal(line)
	}
	if err := os.WriteFile(group+"/cgroup.procs", []byte(strconv.Itoa(store.Process.Pid)), 0); err != nil {
		t.Skip(err)
	}
	ask := func(n int, size int64) (int, error) {
		c, err := Dial(t.Context(), socket)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(c.Close)
		_, fd, err := c.ask(t.Context(), request{Op: opPut, Name: fmt.Sprintf("%064d", n), Size: size}, time.Minute)
		return fd, err
	}
	fd, err := ask(1, 40<<20)
	if err != nil {
		t.Fatal(err)
	}
	_ = unix.Close(fd)
	for size := int64(80 << 20); size <= 1<<30; size *= 2 {
		if _, err := ask(2, size); !errors.Is(err, errs.ErrMemory) {
			t.Errorf("%d bytes: %v", size, err)
		}
	}
	c, err := Dial(t.Context(), socket)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if r, err := c.Budget(t.Context(), 0); err != nil || r.Used != 40<<20 || r.Available > 190<<20 {
		t.Errorf("%+v, %v", r, err)
	}
	store.kill()
}

// Two users cannot use each other's stores, even if the socket lets them connect.
func TestOtherUser(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("only root can start a process of another user")
	}
	container, _ := files(t)
	dir, err := os.MkdirTemp("", "overwire")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	if err := os.Chmod(dir, 0o777); err != nil {
		t.Fatal(err)
	}
	other := func(cmd *exec.Cmd) {
		// The other user may not be able to read the folder of this program.
		exe := filepath.Join(dir, "exe")
		b, err := os.ReadFile("/proc/self/exe")
		if err == nil {
			_ = os.WriteFile(exe, b, 0o755)
		}
		cmd.Path, cmd.Dir = exe, dir
		cmd.SysProcAttr = &unix.SysProcAttr{Credential: credential()}
	}
	s, err := Listen(Options{Socket: filepath.Join(dir, "s"), Budget: 1 << 30})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	refusedAs := func(want string) {
		t.Helper()
		p := child{Socket: s.Path(), Path: container}.start(t, other)
		line := p.next()
		if line == "connected" {
			p.resume()
			line = p.next()
		}
		if !strings.HasPrefix(line, "error") || !strings.Contains(line, want) {
			t.Errorf("%q", line)
		}
	}
	refusedAs("permission denied") // by the mode of the socket
	if err := os.Chmod(s.Path(), 0o777); err != nil {
		t.Fatal(err)
	}
	refusedAs("belongs to user 0") // by the client
	theirs := child{Socket: filepath.Join(dir, "t"), Budget: 1 << 30}.start(t, other)
	if line := theirs.next(); line != "listening" {
		t.Fatal(line)
	}
	if _, err := Dial(t.Context(), filepath.Join(dir, "t")); !errors.Is(err, errs.ErrPermission) {
		t.Errorf("a client of root: %v", err)
	}
	report(t, s, func(r *Report) bool { return len(r.Entries) == 0 })
}

// A store does not use what another user could have planted: links, folders of others, and files in place of sockets.
func TestPlanted(t *testing.T) {
	dir := t.TempDir()
	for name, plant := range map[string]func(path string) error{
		"file":        func(p string) error { return os.WriteFile(p, nil, 0o600) },
		"folder":      func(p string) error { return os.Mkdir(p, 0o700) },
		"link":        func(p string) error { return os.Symlink("/tmp/none", p) },
		"lock link":   func(p string) error { return os.Symlink("/tmp/none", p+".lock") },
		"lock folder": func(p string) error { return os.Mkdir(p+".lock", 0o700) },
		"lock pipe":   func(p string) error { return unix.Mkfifo(p+".lock", 0o600) },
	} {
		path := filepath.Join(dir, name)
		if err := plant(path); err != nil {
			t.Fatal(err)
		}
		if s, err := Listen(Options{Socket: path, Budget: 1}); err == nil {
			s.Close()
			t.Errorf("%s: no error", name)
		}
	}
	for name, ok := range map[string]bool{"0700": true, "0770": false, "0707": false, "link": false, "none": false} {
		path := filepath.Join(dir, "d"+name)
		if mode, err := strconv.ParseUint(name, 8, 32); err == nil {
			_ = os.Mkdir(path, 0o700)
			_ = os.Chmod(path, os.FileMode(mode))
		} else if name == "link" {
			_ = os.Symlink(filepath.Join(dir, "d0700"), path)
		}
		if err := checkFolder(path, 0o077); (err == nil) != ok {
			t.Errorf("%s: %v", name, err)
		}
	}
	long := filepath.Join(dir, strings.Repeat("x", 120))
	if _, err := Listen(Options{Socket: long, Budget: 1}); !errors.Is(err, errs.ErrArgument) {
		t.Error(err)
	}
	if s, err := Listen(Options{Socket: filepath.Join(dir, "s"), Budget: math.MaxInt64}); err != nil {
		t.Error(err)
	} else {
		var st unix.Stat_t
		if err := unix.Stat(s.Path(), &st); err != nil || st.Mode&0o777 != 0o700 {
			t.Errorf("%o, %v", st.Mode, err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		s.Wait(ctx)
		if _, err := os.Lstat(s.Path()); !errors.Is(err, os.ErrNotExist) {
			t.Error("the socket was not removed")
		}
	}
}
