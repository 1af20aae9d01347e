package cache

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/source/sourcetest"
)

// Another user who can write to the cache folder cannot choose the bytes of a load: not with their own object
// or note, not with another name for a stored object, and not with the folder itself. If they replace a lock
// file with a link, no file is created at its target.
func TestPlanted(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root can change the owner of a file")
	}
	const uri = "http://h/x"
	data, other := random(1000, 1), random(1000, 2)
	open := func(dir, uri string, data []byte) ([]byte, error) {
		s, err := Folder{Path: dir}.Keep(t.Context(),
			&tagged{Mem: sourcetest.Mem{Name: uri, Data: data}, id: "e", read: new(atomic.Int64)})
		if err != nil {
			return nil, err
		}
		defer s.Close()
		p := make([]byte, len(data))
		return p, s.ReadAt(t.Context(), p, 0)
	}
	find := func(dir, pattern string) string {
		list, _ := filepath.Glob(dir + "/" + pattern)
		if len(list) != 1 {
			t.Fatal(list)
		}
		return list[0]
	}
	key := func(dir, uri string) string { return Folder{Path: dir}.keyOf(uri, "e", int64(len(data))) }
	last := func(dir string) []byte {
		s, err := Folder{Path: dir}.Last(t.Context(), uri)
		if s == nil || err != nil {
			return nil
		}
		defer s.Close()
		p := make([]byte, s.Size())
		if err := s.ReadAt(t.Context(), p, 0); err != nil {
			t.Fatal(err)
		}
		return p
	}
	shared := func(mode os.FileMode) string {
		dir := filepath.Join(t.TempDir(), "shared")
		if err := errors.Join(os.Mkdir(dir, 0o700), os.Chmod(dir, mode|os.ModeSticky)); err != nil {
			t.Fatal(err)
		}
		return dir
	}

	// The attacker's own overwire stores different bytes under the same key. Plant that object and note, owned
	// by the attacker or as links owned by the victim.
	theirs := t.TempDir()
	if _, err := open(theirs, uri, other); err != nil {
		t.Fatal(err)
	}
	object, note := find(theirs, "*-*"), find(theirs, "*.note")
	for _, linked := range []bool{false, true} {
		dir := shared(0o777)
		for _, path := range []string{object, note} {
			b, _ := os.ReadFile(path)
			to := filepath.Join(dir, filepath.Base(path))
			if linked {
				if err := errors.Join(os.Symlink(path, to), os.Lchown(path, 1234, 0)); err != nil {
					t.Fatal(err)
				}
			} else if err := errors.Join(os.WriteFile(to, b, 0o644), os.Chown(to, 1234, 0)); err != nil {
				t.Fatal(err)
			}
		}
		if b := last(dir); b != nil {
			t.Errorf("linked %v: Last loads another user's bytes", linked)
		}
		if b, err := open(dir, uri, data); err != nil || !bytes.Equal(b, data) {
			t.Errorf("linked %v: Keep loads another user's bytes (%v)", linked, err)
		}
		if b := last(dir); !bytes.Equal(b, data) {
			t.Error("the object fetched again was not stored")
		}
	}

	// Plant another name of a stored object: a rename in a folder that is not sticky, or a link.
	dir := shared(0o777)
	if _, err := open(dir, "http://h/y", other); err != nil {
		t.Fatal(err)
	}
	kept := find(dir, "*-*")
	if err := os.Link(kept, key(dir, uri)+strings.TrimPrefix(kept, key(dir, "http://h/y"))); err != nil {
		t.Fatal(err)
	}
	if b, err := open(dir, uri, data); err != nil || !bytes.Equal(b, data) {
		t.Errorf("loaded an object under the name of another (%v)", err)
	}
	f := Folder{Path: dir}
	f.Absent("http://h/y")
	if err := os.Rename(f.notePath("http://h/y"), f.notePath(uri)); err != nil {
		t.Fatal(err)
	}
	if _, err := f.Last(t.Context(), uri); err != nil {
		t.Errorf("used the note of another URI: %v", err)
	}

	// Plant a folder that the attacker created first.
	dir = filepath.Join(shared(0o777), "cache")
	if err := errors.Join(os.Mkdir(dir, 0o755), os.Chown(dir, 1234, 0)); err != nil {
		t.Fatal(err)
	}
	if _, err := open(dir, uri, data); !errors.Is(err, errs.ErrPermission) {
		t.Errorf("another user's folder in a shared folder: %v", err)
	}
	if _, err := open(dir+"/below", uri, data); !errors.Is(err, errs.ErrPermission) {
		t.Errorf("a folder below another user's folder: %v", err)
	}

	dir = shared(0o777)
	if err := os.Symlink(filepath.Join(theirs, "new"), key(dir, uri)+".lock"); err != nil {
		t.Fatal(err)
	}
	if _, err := open(dir, uri, data); err == nil {
		t.Error("a link was used as a lock")
	}
	if _, err := os.Lstat(filepath.Join(theirs, "new")); err == nil {
		t.Error("a file was created at the target of a planted link")
	}
}
