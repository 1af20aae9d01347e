package hoststore

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/overwire/overwire/gosrc/codec/digest"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/knob"
	"github.com/overwire/overwire/gosrc/save"
	"github.com/overwire/overwire/gosrc/save/savetest"
	"github.com/overwire/overwire/gosrc/tensor"
)

func credential() *syscall.Credential { return &syscall.Credential{Uid: 65534, Gid: 65534} }

// frame returns a message with any body and any length.
func frame(n uint32, body string) []byte {
	return append(binary.LittleEndian.AppendUint32(nil, n), body...)
}

// raw connects to a store without a Client.
func raw(t *testing.T, s *Store) *net.UnixConn {
	t.Helper()
	conn, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: s.Path(), Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	_ = conn.SetDeadline(time.Now().Add(time.Minute))
	return conn
}

// A store refuses each invalid message or ends the connection, and continues to serve other clients.
func TestHostileClients(t *testing.T) {
	s := newStore(t, 64<<20)
	good := func(q request) string {
		q.Version = protocol
		b, _ := json.Marshal(q)
		return string(b)
	}
	name := strings.Repeat("a", 64)
	for _, body := range []string{"", "{", "null", "[]", "{}", `{"version":1,"op":"list"}`, `{"version":2,"op":"fly"}`,
		`{"version":2,"op":"list"} {}`, `{"version":2,"op":"list"}x`, `{"version":2,"op":1}`, `{"version":1e99}`, strings.Repeat("[", 9000),
		good(request{Op: opGet}), good(request{Op: opGet, Name: "../../etc/passwd"}),
		good(request{Op: opGet, Name: strings.Repeat("A", 64)}),
		good(request{Op: opPut, Name: name}), good(request{Op: opPut, Name: name, Size: -1}),
		good(request{Op: opPut, Name: name, Size: 1 << 60}),
		good(request{Op: opPut, Name: name, Size: 1, Label: strings.Repeat("x", 301)}),
		good(request{Op: opSeal, Name: name}),
		good(request{Op: opBudget, Size: -5}), `{"version":2,"op":"put","name":"` + name + `","size":1.5}`} {
		conn := raw(t, s)
		if _, err := conn.Write(frame(uint32(len(body)), body)); err != nil {
			t.Fatal(err)
		}
		got, err := readFrame(conn, conn, maxReply, time.Minute)
		if err != nil {
			t.Errorf("%.60q: %v", body, err)
			continue
		}
		if r, err := parseReply(got); err != nil || r.Error == "" {
			t.Errorf("%.60q: %+v, %v", body, r, err)
		}
	}
	for _, n := range []uint32{maxRequest + 1, 1 << 31, 0xffffffff} {
		conn := raw(t, s)
		_, _ = conn.Write(frame(n, "{}"))
		if got, err := readFrame(conn, conn, maxReply, time.Minute); err != nil || !strings.Contains(string(got), "at most") {
			t.Errorf("a message of %d bytes: %q, %v", n, got, err)
		}
	}
	half := raw(t, s)
	_, _ = half.Write(frame(100, "{"))
	if _, err := dial(t, s).Budget(t.Context(), 0); err != nil {
		t.Errorf("while another client is silent: %v", err)
	}
	// The store closes all descriptors that a client sends.
	before := openDescriptors(t)
	sockets, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	for _, fds := range [][]int{{sockets[0]}, {sockets[0], sockets[1], sockets[0]}} {
		conn := raw(t, s)
		body := good(request{Op: opList})
		if _, _, err := conn.WriteMsgUnix(frame(uint32(len(body)), body), unix.UnixRights(fds...), nil); err != nil {
			t.Fatal(err)
		}
		if got, err := readFrame(conn, conn, maxReply, time.Minute); err != nil || !strings.Contains(string(got), "budget") {
			t.Errorf("%q, %v", got, err)
		}
		_ = conn.Close()
	}
	_, _ = unix.Close(sockets[0]), unix.Close(sockets[1])
	sameDescriptors(t, before)
	// Unsealed puts are limited by the budget, and to one for each connection.
	var held []*Client
	kept := 0
	for i := range 40 {
		c := dial(t, s)
		held = append(held, c)
		_, fd, err := c.ask(t.Context(), request{Op: opPut, Name: fmt.Sprintf("%064d", i), Size: 4 << 20}, time.Minute)
		if err == nil {
			kept++
			_ = unix.Close(fd)
			second := request{Op: opPut, Name: fmt.Sprintf("%064d", 99), Size: 1}
			if _, _, err := c.ask(t.Context(), second, time.Minute); !errors.Is(err, errs.ErrArgument) {
				t.Errorf("a second put: %v", err)
			}
		} else if !errors.Is(err, errs.ErrMemory) {
			t.Error(err)
		}
	}
	if kept != 16 {
		t.Errorf("%d puts of 4 MiB in 64 MiB", kept)
	}
	early := request{Op: opGet, Name: fmt.Sprintf("%064d", 0)}
	if _, fd, err := held[0].ask(t.Context(), early, quick); err != nil || fd >= 0 {
		t.Errorf("fetched before the seal: %d, %v", fd, err)
	}
	for _, c := range held {
		c.Close()
	}
	report(t, s, func(r *Report) bool { return r.Used == 0 })
}

// A client rejects anything but sealed bytes that match the name, and leaks no descriptor.
func TestHostileStores(t *testing.T) {
	container, _ := files(t)
	f := openFile(t, container)
	l, _, _ := labelOf(t.Context(), f)
	sealed := func(size int64, data []byte, add int) int {
		fd, err := unix.MemfdCreate("x", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
		if err == nil {
			err = unix.Ftruncate(fd, size)
		}
		if err == nil {
			_, err = unix.Pwrite(fd, data, 0)
		}
		if err == nil {
			_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, add)
		}
		if err != nil {
			t.Fatal(err)
		}
		return fd
	}
	whole, err := os.ReadFile(container)
	if err != nil {
		t.Fatal(err)
	}
	other := append([]byte{}, whole...)
	other[100] ^= 1
	found := fmt.Sprintf(`{"found":true,"size":%d}`, f.Size())
	device, err := unix.Open("/dev/zero", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(device)
	for what, c := range map[string]struct {
		answer []byte
		fds    []int
		hangs  bool
	}{
		"nothing":         {answer: nil},
		"no descriptor":   {answer: frame(uint32(len(found)), found)},
		"not sealed":      {answer: frame(uint32(len(found)), found), fds: []int{sealed(f.Size(), whole, unix.F_SEAL_SHRINK)}},
		"short":           {answer: frame(uint32(len(found)), found), fds: []int{sealed(100, whole[:100], seals)}},
		"long":            {answer: frame(uint32(len(found)), found), fds: []int{sealed(f.Size()+1, whole, seals)}},
		"other bytes":     {answer: frame(uint32(len(found)), found), fds: []int{sealed(f.Size(), other, seals)}},
		"device":          {answer: frame(uint32(len(found)), found), fds: []int{device}},
		"two descriptors": {answer: frame(uint32(len(found)), found), fds: []int{device, device}},
		"not JSON":        {answer: frame(3, "abc")},
		"too long":        {answer: frame(1<<30, found)},
		"half":            {answer: frame(100, found)},
		"another reply":   {answer: frame(uint32(len(`{"error":"no","class":"x"}`)), `{"error":"no","class":"x"}`)},
	} {
		t.Run(what, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "s")
			listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
			if err != nil {
				t.Fatal(err)
			}
			defer listener.Close()
			go func() {
				conn, err := listener.AcceptUnix()
				if err != nil {
					return
				}
				defer conn.Close()
				_, _ = conn.Read(make([]byte, 1000))
				if c.answer != nil {
					_, _, _ = conn.WriteMsgUnix(c.answer, unix.UnixRights(c.fds...), nil)
				}
			}()
			client, err := Dial(t.Context(), path)
			if err != nil {
				t.Fatal(err)
			}
			defer client.Close()
			before := openDescriptors(t)
			src, err := client.fetch(t.Context(), l.name, l, f.Size(), "x")
			if err == nil || src != nil {
				t.Errorf("%v, %v", src, err)
			}
			client.Close()
			if now := openDescriptors(t); len(now) > len(before) {
				t.Errorf("open: %v, before: %v", now, before)
			}
		})
		for _, fd := range c.fds {
			if fd != device {
				_ = unix.Close(fd)
			}
		}
	}
}

// The parsers accept or refuse any bytes, and never panic. What they accept is within the limits.
func FuzzMessages(f *testing.F) {
	for _, text := range []string{`{"version":2,"op":"list"}`, `{"version":2,"op":"find"}`, `{"version":2,"op":"put","name":"` + strings.Repeat("0", 64) + `","size":5}`,
		`{"found":true,"size":3}`, `{"report":{"entries":[{}]}}`, `{"error":"x","class":"IOFailure"}`, "null", "[1", ""} {
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		q, err := parseRequest(b)
		if err == nil && (q.Size < 0 || q.Size > maxSize || len(q.Label) > maxText ||
			q.Op != opList && q.Op != opBudget && len(q.Name) != nameLength) {
			t.Errorf("%+v", q)
		}
		if err != nil && !errs.Classed(err) {
			t.Errorf("no class: %v", err)
		}
		_, _ = parseReply(b)
	})
}

// A store and its clients survive random commands from many connections, and nothing is left afterwards.
func TestRandomCommands(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	container, _ := files(t)
	s := newStore(t, 30<<20)
	f := openFile(t, container)
	l, _, _ := labelOf(t.Context(), f)
	done := make(chan bool)
	for g := range 6 {
		r := rand.New(rand.NewPCG(seed, uint64(g)))
		go func() {
			defer func() { done <- true }()
			for range 30 {
				c, err := Dial(t.Context(), s.Path())
				if err != nil {
					t.Error(err)
					return
				}
				switch r.IntN(6) {
				case 0:
					_, _ = c.Put(t.Context(), f, func(int64) {})
				case 1:
					_, _ = c.Drop(t.Context(), l.name)
				case 2, 3:
					if src, err := c.fetch(t.Context(), l.name, l, f.Size(), "x"); err == nil && src != nil {
						_ = src.Close()
					}
				case 4:
					q := request{Op: opPut, Name: fmt.Sprintf("%064d", r.IntN(3)), Size: 1 + r.Int64N(20<<20)}
					_, fd, _ := c.ask(t.Context(), q, time.Minute)
					if fd >= 0 {
						_ = unix.Close(fd)
					}
				case 5:
					_, _ = c.Budget(t.Context(), 10<<20+r.Int64N(20<<20))
				}
				c.Close()
			}
		}()
	}
	for range 6 {
		<-done
	}
	c := dial(t, s)
	_, _ = c.Drop(t.Context(), l.name)
	report(t, s, func(r *Report) bool { return r.Used == 0 && len(r.Entries) == 0 })
}

// The tensors of a container that this process has kept are found by their names and digests. A file with the same
// tensors is never found.
func TestDigests(t *testing.T) {
	dir, r := t.TempDir(), savetest.FixedRand()
	in := []save.Input{savetest.BF16("a", r, 300, 256), savetest.BF16("b", r, 3, 5),
		savetest.Input("zeros", tensor.U8, []int64{64 << 20}, make([]byte, 64<<20))}
	write := func(name string, change func(b []byte)) string {
		path := filepath.Join(dir, name)
		_, err := save.Write(t.Context(), nil, save.Spec{Path: path, Compress: true, Digests: true}, in)
		if err != nil {
			t.Fatal(err)
		}
		b, err := os.ReadFile(path)
		if err == nil {
			change(b)
			err = os.WriteFile(path, b, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
		return path
	}
	sums := map[string]digest.Sum{"a": {High: 1}, "b": {High: 2}, "zeros": {High: 3}}
	all, b, zeros := []string{"a", "b", "zeros"}, []string{"b"}, []string{"zeros"}
	kept := write("kept", func([]byte) {})
	other := write("other", func(b []byte) { b[len(b)/2] ^= 1 })
	s := newStore(t, 1<<30)
	t.Cleanup(func() { knob.Load(nil) })
	knob.Load(map[string]string{"OVERWIRE_HOST": s.Path()})
	find := func(n int, names []string, more map[string]digest.Sum) {
		t.Helper()
		want := maps.Clone(more)
		if want == nil {
			want = map[string]digest.Sum{}
		}
		for _, name := range names {
			want[name] = sums[name]
		}
		link := &Link{path: s.Path(), users: 1}
		parts := FindParts(t.Context(), link, want)
		link.Done()
		if len(parts) != n {
			t.Fatalf("%v: %d containers, expected %d", want, len(parts), n)
		}
		for _, p := range parts {
			report(t, s, func(r *Report) bool { return r.Entries[0].Users == 1 })
			if len(p.Digests) != 3 || len(p.Index.Tensors) != 3 {
				t.Errorf("%+v", p.Digests)
			}
			equalBytes(t, p.Source, kept)
			_ = p.Source.Close()
		}
		report(t, s, func(r *Report) bool { return r.Entries[0].Users == 0 })
	}
	put(t, dial(t, s), openFile(t, kept), "kept")
	find(0, all, nil)
	for range 2 { // the second time, the store has the bytes
		if err := KeepBytes(t.Context(), openFile(t, kept), sums); err != nil {
			t.Fatal(err)
		}
		find(0, nil, nil)
		find(0, nil, map[string]digest.Sum{"b": sums["a"], "c": sums["b"]}) // the digests of other names
		find(1, b, map[string]digest.Sum{"a": {High: 4}})
		find(1, all, nil)
	}
	entries := report(t, s, func(r *Report) bool { return r.Counts.Puts == 2 && len(r.Entries) == 2 }).Entries
	name, err := contentName(t.Context(), openFile(t, kept))
	if err != nil || !slices.ContainsFunc(entries, func(x Item) bool { return x.Name == name }) {
		t.Errorf("%s, %v: %+v", name, err, entries)
	}
	if _, err := dial(t, s).Drop(t.Context(), name); err != nil {
		t.Fatal(err)
	}
	find(0, zeros, nil)
	// Other bytes do not get the name, even with the same header and index.
	for path, l := range map[string]label{other: {name: name}, kept: {name: name, identity: "x"}} {
		c := dial(t, s)
		_, err := c.putAs(t.Context(), openFile(t, path), l, func(int64) {}, nil)
		if !errors.Is(err, errs.ErrCorrupt) || !strings.Contains(err.Error(), "match the name") {
			t.Errorf("%+v: %v", l, err)
		}
	}
}
