package file

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/regular"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/source/sourcetest"
)

func write(t *testing.T, data []byte) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "x")
	if err := os.WriteFile(path, data, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestSuite(t *testing.T) {
	t.Run("path", func(t *testing.T) {
		sourcetest.Suite(t, sourcetest.Is{File: true, Known: true}, func(t *testing.T, data []byte) source.Source {
			f, err := Open(write(t, data))
			if err != nil {
				t.Fatal(err)
			}
			return f
		})
	})
	t.Run("network", func(t *testing.T) {
		sourcetest.Suite(t, sourcetest.Is{Remote: true, File: true, Known: true},
			func(t *testing.T, data []byte) source.Source {
				f, err := Open(write(t, data))
				if err != nil {
					t.Fatal(err)
				}
				f.kind = regular.Network // as on a network file system
				return f
			})
	})
	t.Run("descriptor", func(t *testing.T) {
		sourcetest.Suite(t, sourcetest.Is{File: true, Known: true}, func(t *testing.T, data []byte) source.Source {
			o, err := os.Open(write(t, data))
			if err != nil {
				t.Fatal(err)
			}
			defer o.Close()
			f, err := FromFD(int(o.Fd()), "fd")
			if err != nil {
				t.Fatal(err)
			}
			return f
		})
	})
}

func TestOpenRefuses(t *testing.T) {
	dir := t.TempDir()
	fifo := filepath.Join(dir, "fifo")
	if err := unix.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		path string
		want error
	}{
		{filepath.Join(dir, "missing"), errs.ErrNotFound},
		{dir, errs.ErrArgument},
		{fifo, errs.ErrArgument},
		{"/dev/zero", errs.ErrArgument},
		{"a\x00b", errs.ErrArgument},
	} {
		if _, err := Open(c.path); !errors.Is(err, c.want) {
			t.Errorf("%q: %v, want %v", c.path, err, c.want)
		}
	}
}

// If another program truncates a file, reads fail at the first missing byte, and the remaining bytes can still
// be read.
func TestShrinkingFile(t *testing.T) {
	path := write(t, make([]byte, 10_000))
	f, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := os.Truncate(path, 5_000); err != nil {
		t.Fatal(err)
	}
	err = f.ReadAt(context.Background(), make([]byte, 10_000), 0)
	var at *errs.At
	if !errors.Is(err, errs.ErrCorrupt) || !errors.As(err, &at) || at.Offset != 5_000 {
		t.Errorf("%v, want ErrCorrupt at 5000", err)
	}
	if err := f.ReadAt(context.Background(), make([]byte, 5_000), 0); err != nil {
		t.Error(err)
	}
}
