package pipe

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/spawn"
	"github.com/overwire/overwire/gosrc/internal/spawn/spawntest"
	"github.com/overwire/overwire/gosrc/knob"
	"github.com/overwire/overwire/gosrc/serve"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/source/sourcetest"
)

// script writes a shell script that acts as the downloader.
func script(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "downloader")
	if err := os.WriteFile(path, []byte("#!/bin/sh\n"+text+"\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	return path
}

func served(t *testing.T, files map[string][]byte) string {
	t.Helper()
	dir := t.TempDir()
	for name, b := range files {
		if err := os.WriteFile(filepath.Join(dir, name), b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	s, err := serve.New(dir, serve.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s.URL()
}

func curl(t *testing.T) string {
	t.Helper()
	path, err := exec.LookPath("curl")
	if err != nil {
		t.Skip("curl is not installed")
	}
	return path
}

// curl passes the common suite and downloads several URLs in one run.
func TestCurl(t *testing.T) {
	program := curl(t)
	sourcetest.Suite(t, sourcetest.Is{Remote: true, InOrder: true}, func(t *testing.T, data []byte) source.Source {
		s, err := Open(context.Background(), program, served(t, map[string][]byte{"x": data})+"x", source.Options{})
		if err != nil {
			t.Fatal(err)
		}
		return s
	})
	a, b := bytes.Repeat([]byte("a"), 1<<20), bytes.Repeat([]byte("b"), 3<<20)
	base := served(t, map[string][]byte{"a": a, "b": b, "none": nil})
	srcs, err := Start(context.Background(), program, []string{base + "a", base + "none", base + "b"},
		[]int64{1 << 20, 0, 3 << 20}, source.Options{})
	if err != nil {
		t.Fatal(err)
	}
	for i, want := range [][]byte{a, nil, b} {
		p := make([]byte, len(want))
		if err := srcs[i].ReadAt(context.Background(), p, 0); err != nil || !bytes.Equal(p, want) {
			t.Errorf("body %d: %v, or wrong bytes", i, err)
		}
		srcs[i].Close()
	}
	// Neither an error page nor the output after it is used as weights.
	srcs, err = Start(context.Background(), program, []string{base + "missing", base + "a"}, []int64{1 << 20, 1 << 20},
		source.Options{})
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range srcs {
		if err := s.ReadAt(context.Background(), make([]byte, 1), 0); !errors.Is(err, errs.ErrIO) ||
			!strings.Contains(err.Error(), "404") {
			t.Errorf("%v", err)
		}
		defer s.Close()
	}
	if _, err := Open(context.Background(), program, base+"missing", source.Options{}); !errors.Is(err, errs.ErrIO) ||
		!strings.Contains(err.Error(), "404") {
		t.Errorf("%v", err)
	}
}

// If the program fails, the read returns an error and never wrong bytes.
func TestFailures(t *testing.T) {
	ctx := context.Background()
	for name, c := range map[string]struct {
		text  string
		sizes []int64
		class error
	}{
		"status":     {"printf 12345; echo 'password=hunter2hunter2' >&2; exit 3", []int64{6}, errs.ErrIO},
		"too few":    {"printf 12345", []int64{6}, errs.ErrCorrupt},
		"too many":   {"printf 12345678", []int64{6, 1}, errs.ErrCorrupt},
		"at the end": {"printf 1234567; exit 3", []int64{6, 1}, errs.ErrIO},
		"much later": {"printf 1234567; sleep 0.1; printf 8", []int64{6, 1}, errs.ErrCorrupt},
		"standstill": {"printf 12345; sleep 60", []int64{6}, errs.ErrTimeout},
		"signal":     {"printf 12345; kill -9 $$", []int64{6}, errs.ErrIO},
		"any size":   {"printf 12345; exit 1", nil, errs.ErrIO},
	} {
		urls := []string{"http://h/a", "http://h/b"}[:max(1, len(c.sizes))]
		opt := source.Options{}
		if c.class == errs.ErrTimeout { // a short timeout in other cases could expire before the program starts
			opt.Storage = map[string]string{"timeout": "0.2"}
		}
		srcs, err := Start(ctx, script(t, c.text), urls, c.sizes, opt)
		if err == nil {
			last := srcs[len(srcs)-1]
			err = last.ReadAt(ctx, make([]byte, last.Size()), 0)
			for _, s := range srcs {
				s.Close()
			}
		}
		if !errors.Is(err, c.class) || strings.Contains(fmt.Sprint(err), "hunter2") {
			t.Errorf("%s: %v, want %v", name, err, c.class)
		}
	}
	for uri, opt := range map[string]source.Options{
		"-o/etc/passwd": {}, "file:///etc/passwd": {}, "http://h/\n": {},
		"http://h/x": {Storage: map[string]string{"token": "x"}},
	} {
		if _, err := Open(ctx, "/bin/false", uri, opt); !errors.Is(err, errs.ErrArgument) {
			t.Errorf("%q: %v", uri, err)
		}
	}
	if _, err := Open(ctx, "/no/such/program", "http://h/x", source.Options{}); !errors.Is(err, errs.ErrNotFound) {
		t.Errorf("%v", err)
	}
	if n := spawntest.Left(); len(n) != 0 {
		t.Errorf("left: %v", n)
	}
}

// The program's standard error is appended to the file that a setting names. Links, pipes and other users'
// files are refused.
func TestLog(t *testing.T) {
	t.Cleanup(func() { knob.Load(nil) })
	path := filepath.Join(t.TempDir(), "log")
	knob.Load(map[string]string{"OVERWIRE_DOWNLOADER_LOG": path})
	for range 2 {
		if _, err := Open(context.Background(), script(t, "echo said >&2; exit 3"), "http://h/x",
			source.Options{}); !errors.Is(err, errs.ErrIO) {
			t.Error(err)
		}
	}
	if b, err := os.ReadFile(path); string(b) != "said\nsaid\n" {
		t.Errorf("%q, %v", b, err)
	}
	link := path + ".link"
	if err := os.Symlink(path, link); err != nil {
		t.Fatal(err)
	}
	pipe := path + ".pipe" // with a reader that never reads
	if err := unix.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	reader, err := os.OpenFile(pipe, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer reader.Close()
	others := []string{link, pipe}
	if os.Geteuid() == 0 { // only root may give a file to another user
		shared := filepath.Join(t.TempDir(), "shared")
		if err := errors.Join(os.Mkdir(shared, 0o700), os.Chmod(shared, 0o777|os.ModeSticky),
			os.WriteFile(shared+"/planted", nil, 0o600), os.Chown(shared+"/planted", 1234, 0)); err != nil {
			t.Fatal(err)
		}
		others = append(others, shared+"/planted")
	}
	for _, other := range others {
		knob.Load(map[string]string{"OVERWIRE_DOWNLOADER_LOG": other})
		if _, err := Open(context.Background(), script(t, "head -c 200000 /dev/zero >&2; printf x"), "http://h/x",
			source.Options{}); err == nil || !strings.Contains(err.Error(), other) {
			t.Errorf("%v", err)
		}
	}
}

// The log is never another user's file, even if such a file repeatedly appears and disappears.
func TestLogThatComesAndGoes(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root can change the owner of a file")
	}
	shared := t.TempDir()
	path, planted := shared+"/log", shared+"/planted"
	if err := os.Chmod(shared, 0o777|os.ModeSticky); err != nil {
		t.Fatal(err)
	}
	stop, ended := make(chan struct{}), make(chan error, 1)
	go func() {
		for {
			select {
			case <-stop:
				ended <- nil
				return
			default:
			}
			if err := errors.Join(os.WriteFile(planted, nil, 0o600), os.Chown(planted, 1234, 0),
				os.Rename(planted, path), os.Remove(path)); err != nil {
				ended <- err
				return
			}
		}
	}()
	for refused := 0; refused < 5000 && len(ended) == 0; {
		log, err := openLog(path)
		if err != nil {
			refused++
			continue
		}
		st, err := log.Stat()
		_ = log.Close()
		if err != nil || st.Sys().(*syscall.Stat_t).Uid != 0 {
			t.Errorf("another user's file was opened as the log: %v", err)
			break
		}
	}
	close(stop)
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// Secrets in URLs appear neither in curl's arguments, which any user can read, nor in the log, whatever the
// program prints.
func TestSecrets(t *testing.T) {
	t.Cleanup(func() { knob.Load(nil) })
	base := served(t, map[string][]byte{`a"b\c`: []byte("12345"), "x": []byte("67")})
	user := strings.Replace(base, "://", "://user:planted@", 1)
	urls := []string{user + `a"b%5Cc?sig=planted`, base + "x"}
	dir := t.TempDir()
	said, log := filepath.Join(dir, "arguments"), filepath.Join(dir, "log")
	knob.Load(map[string]string{"OVERWIRE_DOWNLOADER_LOG": log})
	program := filepath.Join(dir, "curl")
	text := "#!/bin/sh\necho \"$@\" >> " + said + "\nprintf 'at %s' \"" + user + "?sig=planted\" >&2\nexec " + curl(t) +
		" \"$@\"\n"
	if err := os.WriteFile(program, []byte(text), 0o700); err != nil {
		t.Fatal(err)
	}
	srcs, err := Start(context.Background(), program, urls, []int64{5, 2}, source.Options{})
	if err != nil {
		t.Fatal(err)
	}
	for i, want := range []string{"12345", "67"} {
		p := make([]byte, len(want))
		if err := srcs[i].ReadAt(context.Background(), p, 0); err != nil || string(p) != want {
			t.Errorf("%q, %v", p, err)
		}
	}
	for _, s := range srcs {
		s.Close()
	}
	if _, err := Open(context.Background(), program, user+"none?sig=planted", source.Options{}); err == nil ||
		strings.Contains(err.Error(), "planted") {
		t.Errorf("%v", err)
	}
	for _, path := range []string{said, log} {
		if b, err := os.ReadFile(path); err != nil || len(b) == 0 || bytes.Contains(b, []byte("planted")) {
			t.Errorf("%s: %q, %v", path, b, err)
		}
	}
}

// Errors and the log keep a limited part of a program's output. If that cuts off the beginning of a URL, no
// other part of the URL is shown, because it could not be recognized as one.
func TestLongSecrets(t *testing.T) {
	t.Cleanup(func() { knob.Load(nil) })
	for _, size := range []int{500, 3000, 70_000, 300_000} {
		log := filepath.Join(t.TempDir(), "log")
		knob.Load(map[string]string{"OVERWIRE_DOWNLOADER_LOG": log})
		words := fmt.Sprintf("{ printf 'at http://h/x?sig='; head -c %d /dev/zero | tr '\\0' P; printf ' failed\nthe end'; "+
			"} >&2; exit 3", size)
		_, err := Open(context.Background(), script(t, words), "http://h/x", source.Options{})
		text, readErr := os.ReadFile(log)
		for _, one := range []string{fmt.Sprint(err), string(text)} {
			if readErr != nil || strings.Contains(one, "PP") || !strings.Contains(one, "the end") {
				t.Errorf("%d bytes: %.300q, %v", size, one, readErr)
			}
		}
	}
}

// Cancel and Close kill the program and its children.
func TestKilled(t *testing.T) {
	for _, end := range []string{"cancel", "close"} {
		pids := filepath.Join(t.TempDir(), "pids")
		program := script(t, "sleep 1000 & echo $! > "+pids+".new; mv "+pids+".new "+pids+"; wait")
		started := func() {
			for range 60_000 {
				if _, err := os.Stat(pids); err == nil {
					return
				}
				time.Sleep(time.Millisecond)
			}
		}
		ctx, cancel := context.WithCancelCause(context.Background())
		if end == "cancel" {
			spawn.Go("test", func() {
				started()
				cancel(errs.ErrCancelled)
			})
			if _, err := Open(ctx, program, "http://h/x", source.Options{}); !errors.Is(err, errs.ErrCancelled) {
				t.Fatal(err)
			}
		} else {
			srcs, err := Start(ctx, program, []string{"http://h/x"}, []int64{1}, source.Options{})
			if err != nil {
				t.Fatal(err)
			}
			started()
			srcs[0].Close()
		}
		cancel(nil)
		var pid int
		b, err := os.ReadFile(pids)
		if _, serr := fmt.Sscan(string(b), &pid); err != nil || serr != nil {
			t.Fatal(err, serr)
		}
		gone := false
		for range 3000 {
			state, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
			if gone = err != nil || strings.Contains(string(state), ") Z "); gone {
				break
			}
			time.Sleep(10 * time.Millisecond)
		}
		if !gone {
			_ = unix.Kill(pid, unix.SIGKILL)
			t.Errorf("%s: a child is still running", end)
		}
	}
}
