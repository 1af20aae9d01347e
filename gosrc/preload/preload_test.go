package preload

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/overwire/overwire/gosrc/fault"
	"github.com/overwire/overwire/gosrc/load"
)

// plainFile writes the smallest safetensors file with a tensor in it.
func plainFile(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "a.safetensors")
	h := `{"x":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}`
	b := append([]byte{byte(len(h)), 0, 0, 0, 0, 0, 0, 0}, h...)
	if err := os.WriteFile(path, append(b, 1, 2, 3, 4), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// A preload is handed over once, however the path is written.
func TestTakeOnce(t *testing.T) {
	path := plainFile(t)
	p := Start(load.Spec{URIs: []string{path}}, load.Options{})
	if Start(load.Spec{URIs: []string{path}}, load.Options{}) != p {
		t.Error("a second start of the same file")
	}
	link := filepath.Join(t.TempDir(), "link")
	if err := os.Symlink(path, link); err != nil {
		t.Fatal(err)
	}
	if Take(load.Spec{URIs: []string{link}}) != p {
		t.Fatal("not found by another name")
	}
	if Take(load.Spec{URIs: []string{path}}) != nil {
		t.Error("handed over twice")
	}
	m, l, done, err := p.Opened(-1)
	if err != nil || !done {
		t.Fatal(done, err)
	}
	for i := range 2000 { // what is open is open, however short the wait
		if _, _, done, err := p.Opened(0); !done || err != nil {
			t.Fatalf("wait %d: %v %v", i, done, err)
		}
	}
	defer m.Close()
	defer l.Close()
	if _, err := l.Job().Wait(5 * time.Second); err != nil {
		t.Fatal(err)
	}
	mem, _, _, ok := l.Take(0)
	if !ok || string(mem.Slice()) != "\x01\x02\x03\x04" {
		t.Error("wrong bytes")
	}
	mem.Release()
}

// A missing file is an error when the preload is used, not when it starts.
func TestMissing(t *testing.T) {
	uris := []string{filepath.Join(t.TempDir(), "none")}
	Start(load.Spec{URIs: uris}, load.Options{})
	if _, _, done, err := Take(load.Spec{URIs: uris}).Opened(-1); !done || !errors.Is(err, fault.ErrNotFound) {
		t.Errorf("%v, want ErrNotFound", err)
	}
}

// A preload that is dropped cannot be taken.
func TestDrop(t *testing.T) {
	path := plainFile(t)
	Start(load.Spec{URIs: []string{path}}, load.Options{}).Drop()
	if Take(load.Spec{URIs: []string{path}}) != nil {
		t.Error("a dropped preload is handed over")
	}
}
