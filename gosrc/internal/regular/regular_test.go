package regular

import (
	"bytes"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/overwire/overwire/gosrc/errs"
)

// Every file that is not a regular file is refused, directly and through a link, without waiting.
func TestOnlyRegularFiles(t *testing.T) {
	dir := t.TempDir()
	in := func(name string) string { return filepath.Join(dir, name) }
	write := func(name string, b []byte) string {
		if err := os.WriteFile(in(name), b, 0o600); err != nil {
			t.Fatal(err)
		}
		return in(name)
	}
	link := func(name, to string) string {
		if err := os.Symlink(to, in(name)); err != nil {
			t.Fatal(err)
		}
		return in(name)
	}
	if err := unix.Mkfifo(in("fifo"), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Chdir(dir) // socket paths have a short length limit
	l, err := net.Listen("unix", "socket")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	sparse := write("sparse", nil)
	if err := os.Truncate(sparse, 1<<40); err != nil {
		t.Fatal(err)
	}
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	defer w.Close()
	descriptor := "/proc/self/fd/" + strconv.Itoa(int(r.Fd()))
	for _, c := range []struct {
		path  string
		class error // nil if the file can be read
		bytes int   // -1 means any number above 0
	}{
		{write("plain", []byte("content")), nil, 7},
		{write("empty", nil), nil, 0},
		{write("full", make([]byte, 1000)), nil, 1000},
		{write("over", make([]byte, 1001)), errs.ErrFormat, 0},
		{link("link", "plain"), nil, 7},
		{"/proc/self/stat", nil, -1},
		{"/proc/self/smaps", errs.ErrFormat, 0}, // reports size 0, but has more bytes than the limit
		{"/proc/self/mem", errs.ErrIO, 0},
		{sparse, errs.ErrFormat, 0},
		{in("fifo"), errs.ErrArgument, 0},
		{link("to fifo", "fifo"), errs.ErrArgument, 0},
		{in("socket"), errs.ErrArgument, 0},
		{dir, errs.ErrArgument, 0},
		{"/dev/zero", errs.ErrArgument, 0},
		{link("to zero", "/dev/zero"), errs.ErrArgument, 0},
		{"/dev/null", errs.ErrArgument, 0},
		{descriptor, errs.ErrArgument, 0},
		{link("loop", "loop"), errs.ErrArgument, 0},
		{filepath.Join(link("here", "."), "here", "here", "fifo"), errs.ErrArgument, 0},
		{link("dangling", "nowhere"), errs.ErrNotFound, 0},
		{in("absent"), errs.ErrNotFound, 0},
	} {
		b, err := Read(c.path, 1000)
		if c.class != nil && !errors.Is(err, c.class) ||
			c.class == nil && (err != nil || c.bytes >= 0 && len(b) != c.bytes || c.bytes < 0 && len(b) == 0) {
			t.Errorf("%s: %d bytes, %v; want %d, %v", c.path, len(b), err, c.bytes, c.class)
		}
	}
	if b, err := Read(in("plain"), 7); err != nil || !bytes.Equal(b, []byte("content")) {
		t.Errorf("%q %v", b, err)
	}
}

// A file that does not report its actual size is refused.
func TestSized(t *testing.T) {
	empty := filepath.Join(t.TempDir(), "empty")
	if err := os.WriteFile(empty, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]error{empty: nil, os.Args[0]: nil, "/proc/self/status": errs.ErrNotSupported,
		"/proc/self/mem": errs.ErrIO} {
		fd, st, err := Open(path)
		if err != nil {
			t.Fatal(err)
		}
		if err := Sized(fd, &st); !errors.Is(err, want) {
			t.Errorf("%s: %v, want %v", path, err, want)
		}
		_ = unix.Close(fd)
	}
	fd, st, err := Open(empty)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Close(fd) }()
	if err := os.WriteFile(empty, []byte("written since"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := Sized(fd, &st); !errors.Is(err, errs.ErrCorrupt) {
		t.Errorf("a file that is being written: %v", err)
	}
}
