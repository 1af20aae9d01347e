package companions

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/overwire/overwire/gosrc/errs"
)

// Find decides by the kind of a file whether it is copied. (Tests of package convert cover links, caches, modes and
// whole folders.)
func TestFind(t *testing.T) {
	dir := t.TempDir()
	at := func(name string) string { return filepath.Join(dir, name) }
	for name, size := range map[string]int64{
		"config.json": 2, "empty": 0, "large.json": MaxOther + 1, "small.bin": MaxOther, "large.bin": MaxOther + 1, "LARGE.GGUF": MaxOther + 1,
		"other.safetensors": 1, "other.safetensors.index.json": 1, ".hidden": 1, "taken.json": 1,
	} {
		if err := errors.Join(os.WriteFile(at(name), nil, 0o640), os.Truncate(at(name), size)); err != nil {
			t.Fatal(err)
		}
	}
	for _, err := range []error{
		os.Mkdir(at("sub"), 0o700), os.Mkdir(at(".git"), 0o700), os.Mkdir(at("out"), 0o700),
		unix.Mkfifo(at("pipe"), 0o600), os.Symlink("loop", at("loop")),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	taken := map[string]bool{"taken.json": true}
	found, left, err := Find(Folder{Path: dir, Avoid: at("out")}, taken)
	if err != nil {
		t.Fatal(err)
	}
	sizes := map[string]int64{}
	for _, f := range found {
		if sizes[f.Name] = f.Size; f.Mode != 0o640 || f.Path != at(f.Name) {
			t.Errorf("%+v", f)
		}
	}
	if len(sizes) != 4 || sizes["config.json"] != 2 || sizes["empty"] != 0 || sizes["large.json"] != MaxOther+1 || sizes["small.bin"] != MaxOther {
		t.Errorf("found %v", sizes)
	}
	if len(left) != 9 { // .git .hidden LARGE.GGUF large.bin loop two others pipe sub
		t.Errorf("left %q", left)
	}
	if _, left, _ = Find(Folder{Path: dir, Avoid: at("out"), Below: true}, taken); len(left) != 8 { // without sub
		t.Errorf("left %q", left)
	}
	for _, in := range []Folder{{Path: dir, Avoid: dir}, {Path: at("config.json")}, {Path: at("none")}} {
		if found, left, err := Find(in, nil); len(found)+len(left) != 0 || err != nil {
			t.Errorf("%+v: %v %v %v", in, found, left, err)
		}
	}
}

// Copy copies all bytes. If the file has changed, it returns a typed error that names the file. It stops if it is
// cancelled or if a write fails.
func TestCopy(t *testing.T) {
	path := filepath.Join(t.TempDir(), "f")
	want := make([]byte, 2*step+7)
	for i := range want {
		want[i] = byte(i * 31)
	}
	if err := os.WriteFile(path, want, 0o600); err != nil {
		t.Fatal(err)
	}
	copied := func(ctx context.Context, f File) ([]byte, error) {
		got := make([]byte, len(want))
		end := int64(0)
		err := CopyFile(ctx, f, func(p []byte, off int64) error {
			if off != end {
				t.Errorf("at %d after %d", off, end)
			}
			end += int64(copy(got[off:], p))
			return nil
		})
		return got[:end], err
	}
	if got, err := copied(t.Context(), File{Path: path, Size: int64(len(want))}); err != nil ||
		string(got) != string(want) {
		t.Errorf("%d bytes, %v", len(got), err)
	}
	for _, size := range []int64{0, 1, int64(len(want)) - 1, int64(len(want)) + 1} {
		var at *errs.At
		if _, err := copied(t.Context(), File{Path: path, Size: size}); !errors.Is(err, errs.ErrCorrupt) ||
			!errors.As(err, &at) || at.Source != path {
			t.Errorf("of %d bytes: %v", size, err)
		}
	}
	if _, err := copied(t.Context(), File{Path: path + "none", Size: 1}); !errors.Is(err, errs.ErrNotFound) {
		t.Error(err)
	}
	full := errors.New("full")
	if err := CopyFile(t.Context(), File{Path: path, Size: int64(len(want))}, func([]byte, int64) error {
		return full
	}); !errors.Is(err, full) {
		t.Error(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := copied(ctx, File{Path: path, Size: int64(len(want))}); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}
