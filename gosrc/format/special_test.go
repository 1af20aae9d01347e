package format

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/spawn"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/source/file"
)

// An index.json that is not a regular file or never ends is refused. Opening it never waits for a writer or reads
// more than fits in memory.
func TestIndexIsAFile(t *testing.T) {
	opener := func(_ context.Context, uri string, _ source.Outline) (source.Source, error) { return file.Open(uri) }
	for name, c := range map[string]struct {
		put  func(path string) error
		want error
	}{
		"a pipe":         {func(p string) error { return unix.Mkfifo(p, 0o600) }, errs.ErrArgument},
		"/dev/zero":      {func(p string) error { return os.Symlink("/dev/zero", p) }, errs.ErrArgument},
		"a terminal":     {func(p string) error { return os.Symlink("/dev/ptmx", p) }, errs.ErrArgument},
		"a folder":       {func(p string) error { return os.Mkdir(p, 0o700) }, errs.ErrArgument},
		"its own folder": {func(p string) error { return os.Symlink(".", p) }, errs.ErrArgument},
		"a loop":         {func(p string) error { return os.Symlink(p, p) }, errs.ErrArgument},
		"nothing":        {func(p string) error { return os.Symlink("nowhere", p) }, errs.ErrNotFound},
		"of /proc":       {func(p string) error { return os.Symlink("/proc/self/status", p) }, errs.ErrFormat},
		"memory":         {func(p string) error { return os.Symlink("/proc/self/mem", p) }, errs.ErrIO},
		"a terabyte": {func(p string) error {
			return errors.Join(os.WriteFile(p, nil, 0o600), os.Truncate(p, 1<<40))
		}, errs.ErrFormat},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			path := filepath.Join(dir, "model.safetensors.index.json")
			if err := c.put(path); err != nil {
				t.Fatal(err)
			}
			for _, uri := range []string{dir, path} {
				if name == "a folder" && uri == path || name == "its own folder" && uri == path {
					continue // here the path is a folder without a model
				}
				ended := make(chan error, 2)
				spawn.Go("test", func() {
					_, _, _, err := OpenAll(t.Context(), []string{uri}, opener, Options{})
					ended <- err
					_, _, err = Names(t.Context(), []string{uri}, opener, Options{})
					ended <- err
				})
				for range 2 {
					select {
					case err := <-ended:
						if !errors.Is(err, c.want) {
							t.Errorf("got %v, want %v", err, c.want)
						}
					case <-time.After(20 * time.Second):
						t.Fatal("opening the index did not return within 20 s")
					}
				}
			}
		})
	}
}
