package hoststore

// Helpers for the tests write files, and run stores in this process and in child processes.

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/overwire/overwire/gosrc/internal/spawn/spawntest"
	"github.com/overwire/overwire/gosrc/save"
	"github.com/overwire/overwire/gosrc/save/savetest"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/source/file"
	"github.com/overwire/overwire/gosrc/tensor"
)

// TestMain runs this program as a store or as a client if the environment says that it is a child process.
func TestMain(m *testing.M) {
	if text := os.Getenv("OVERWIRE_TEST_HOST"); text != "" {
		var c child
		if err := json.Unmarshal([]byte(text), &c); err != nil {
			panic(err)
		}
		c.run()
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// A child is a process that a test starts. It prints a line at each step, and waits for a line on its standard input.
type child struct {
	Socket string
	Budget int64  // a store
	Path   string // a client: the file to put
	Die    string // the step at which the process kills itself
	Stop   string // the steps "half" and "sealing" are only reported if Stop or Die names them
}

// stops reports whether the child reports an optional step.
func (c *child) stops(step string) bool { return c.Die == step || c.Stop == step }

// at reports a step, and kills the process if it is the step at which to die.
func (c *child) at(step string) {
	if step == c.Die {
		_ = unix.Kill(os.Getpid(), unix.SIGKILL)
		select {}
	}
	fmt.Println(step)
	_, _ = bufio.NewReader(os.Stdin).ReadString('\n')
}

func (c *child) fail(err error) {
	fmt.Printf("error %v\n", err)
	os.Exit(1)
}

func (c *child) run() {
	ctx := context.Background()
	if c.Budget > 0 {
		s, err := Listen(Options{Socket: c.Socket, Budget: c.Budget})
		if err != nil {
			c.fail(err)
		}
		c.at("listening")
		s.Close()
		return
	}
	client, err := Dial(ctx, c.Socket)
	if err != nil {
		c.fail(err)
	}
	c.at("connected")
	f, err := file.Open(c.Path)
	if err != nil {
		c.fail(err)
	}
	l, _, err := labelOf(ctx, settled{f})
	if err != nil {
		c.fail(err)
	}
	if c.Die == "putting" { // does not read the reply
		_ = sendMessage(client.conn, request{Version: protocol, Op: opPut, Name: l.name, Size: f.Size()}, -1)
		c.at("putting")
	}
	_, fd, err := client.ask(ctx, request{Op: opPut, Name: l.name, Size: f.Size()}, time.Minute)
	if err != nil {
		c.fail(err)
	}
	c.at("put")
	sum, err := copyInto(ctx, fd, f, func(n int64) {
		if c.stops("half") {
			c.at("half")
		}
	}, nil)
	if err != nil {
		c.fail(err)
	}
	c.at("copied")
	_ = unix.Close(fd)
	q := request{Version: protocol, Op: opSeal, Name: l.name, Identity: l.identity, Sum: sum}
	if c.stops("sealing") { // does not read the reply
		_ = sendMessage(client.conn, q, -1)
		c.at("sealing")
	}
	if _, _, err = client.ask(ctx, q, time.Minute); err != nil {
		c.fail(err)
	}
	c.at("sealed")
	_, held, err := client.ask(ctx, request{Op: opGet, Name: l.name}, time.Minute)
	if err != nil {
		c.fail(err)
	}
	c.at("fetched")
	_ = unix.Close(held)
	if _, err := client.Drop(ctx, l.name); err != nil {
		c.fail(err)
	}
	c.at("dropped")
}

// process is a running child.
type process struct {
	*exec.Cmd
	lines *bufio.Scanner
	in    *os.File
}

// start starts a child. change may change the command.
func (c child) start(t *testing.T, change func(*exec.Cmd)) *process {
	t.Helper()
	text, _ := json.Marshal(c)
	p := &process{Cmd: exec.Command(os.Args[0])}
	p.Env = append(os.Environ(), "OVERWIRE_TEST_HOST="+string(text))
	p.Stderr = os.Stderr
	if change != nil {
		change(p.Cmd)
	}
	out, err := p.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	p.Stdin, p.in, p.lines = r, w, bufio.NewScanner(out)
	if err := p.Start(); err != nil {
		t.Fatal(err)
	}
	_ = r.Close()
	t.Cleanup(func() {
		_ = w.Close()
		p.kill()
	})
	return p
}

// next returns the next line of the child, or "" after its end.
func (p *process) next() string {
	if !p.lines.Scan() {
		return ""
	}
	return p.lines.Text()
}

func (p *process) resume() { _, _ = p.in.WriteString("\n") }

func (p *process) kill() {
	_ = p.Process.Kill()
	_ = p.Wait()
}

// settled is a file that counts as unchanged for a long time.
type settled struct{ *file.File }

func (s settled) Facts() source.Facts {
	f := s.File.Facts()
	f.Settled = true
	return f
}

// openFile opens a file, and lets it count as unchanged for a long time.
func openFile(t *testing.T, path string) settled {
	t.Helper()
	f, err := file.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	return settled{f}
}

// contents are the bytes of the files, which all tests share.
var contents = sync.OnceValue(func() (all [2][]byte) {
	r := savetest.FixedRand()
	in := []save.Input{savetest.BF16("a", r, 300, 256), savetest.BF16("b", r, 3, 5),
		savetest.Input("noise", tensor.U8, []int64{70_001}, savetest.Noise(r, 70_001)), savetest.BF16("large", r, 1500, 512)}
	dir, err := os.MkdirTemp("", "overwire")
	if err != nil {
		panic(err)
	}
	defer os.RemoveAll(dir)
	for i := range all {
		path := filepath.Join(dir, "x")
		if _, err = save.Write(context.Background(), nil, save.Spec{Path: path, Compress: i == 0}, in); err == nil {
			all[i], err = os.ReadFile(path)
		}
		if err != nil {
			panic(err)
		}
	}
	return all
})

// files writes the same tensors as a container and as a plain file.
func files(t *testing.T) (container, plain string) {
	t.Helper()
	dir := t.TempDir()
	container, plain = filepath.Join(dir, "c.safetensors"), filepath.Join(dir, "p.safetensors")
	for i, path := range []string{container, plain} {
		if err := os.WriteFile(path, contents()[i], 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return container, plain
}

// newStore starts a store in this process. When the test ends, nothing may be left of it.
func newStore(t *testing.T, budget int64) *Store {
	t.Helper()
	before := openDescriptors(t)
	s, err := Listen(Options{Socket: filepath.Join(t.TempDir(), "s"), Budget: budget,
		Log: func(text string) { t.Log(text) }})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		s.Close()
		if left := spawntest.Left(); len(left) > 0 {
			t.Errorf("running: %v", left)
		}
		sameDescriptors(t, before)
	})
	return s
}

// openDescriptors lists the open descriptors of memfds and sockets.
func openDescriptors(t *testing.T) (all []string) {
	t.Helper()
	links, err := filepath.Glob("/proc/self/fd/*")
	if err != nil {
		t.Fatal(err)
	}
	for _, at := range links {
		to, err := os.Readlink(at)
		if err == nil && (strings.HasPrefix(to, "/memfd:") || strings.HasPrefix(to, "socket:")) {
			all = append(all, to)
		}
	}
	return all
}

// sameDescriptors fails if more descriptors are open than before. A closed connection may need a moment.
func sameDescriptors(t *testing.T, before []string) {
	t.Helper()
	var now []string
	for range 200 {
		if now = openDescriptors(t); len(now) <= len(before) {
			return
		}
		time.Sleep(5 * time.Millisecond)
	}
	t.Errorf("open descriptors: %v, before %v", now, before)
}

// dial connects to a store until the test ends.
func dial(t *testing.T, s *Store) *Client {
	t.Helper()
	c, err := Dial(t.Context(), s.Path())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

// put puts a file, and expects a state.
func put(t *testing.T, c *Client, src source.Source, want string) label {
	t.Helper()
	if state, err := c.Put(t.Context(), src, func(int64) {}); err != nil || state != want {
		t.Fatalf("put %s: %q, %v, expected %q", src.URI(), state, err, want)
	}
	l, _, err := labelOf(t.Context(), src)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// report polls a store's report until fits accepts it, because a closed connection may need a moment.
func report(t *testing.T, s *Store, fits func(r *Report) bool) *Report {
	t.Helper()
	var r *Report
	for range 400 {
		if r = s.table.report(); fits(r) {
			return r
		}
		time.Sleep(5 * time.Millisecond)
	}
	t.Fatalf("%+v", r)
	return nil
}

// equalBytes fails unless a source has the bytes of a file.
func equalBytes(t *testing.T, src source.Source, path string) {
	t.Helper()
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	got := make([]byte, src.Size())
	if err := src.ReadAt(context.Background(), got, 0); err != nil || !bytes.Equal(got, want) {
		t.Fatalf("%s: %v, or wrong bytes", path, err)
	}
}
