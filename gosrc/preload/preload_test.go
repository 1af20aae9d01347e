package preload

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/load"
	"github.com/overwire/overwire/gosrc/source"
)

// plainFile writes a safetensors file with one tensor of four bytes, or as many as data has.
func plainFile(t *testing.T, path, data string) string {
	t.Helper()
	if path == "" {
		path = filepath.Join(t.TempDir(), "a.safetensors")
	}
	n := max(4, len(data))
	h := fmt.Sprintf(`{"x":{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]}}`, n, n)
	b := append([]byte{byte(len(h)), 0, 0, 0, 0, 0, 0, 0}, h...)
	if err := os.WriteFile(path, append(b, data...), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func begin(t *testing.T, opt load.Options, uris ...string) *Preload {
	t.Helper()
	p := Start(load.Spec{URIs: uris}, opt)
	if _, done, err := p.Opened(time.Minute); err != nil || !done {
		t.Fatal(done, err)
	}
	t.Cleanup(p.Drop)
	return p
}

func opening(t *testing.T, spec load.Spec) *load.Model {
	t.Helper()
	m, err := load.Open(t.Context(), spec)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(m.Close)
	return m
}

// joins reports whether a load of a model joins a preload, and what was logged about preloads.
func joins(t *testing.T, m *load.Model, opt load.Options) (bool, string) {
	t.Helper()
	a, done := Join(m, opt, false, time.Minute)
	if !done {
		t.Fatal("a minute was not enough")
	}
	return a.Device != nil, fmt.Sprint(a.Notes)
}

// bytes loads all of a model.
func bytes(t *testing.T, m *load.Model) string {
	t.Helper()
	l, err := m.Start(nil, load.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if done, err := l.Job().Wait(time.Minute); !done || err != nil {
		t.Fatal(done, err)
	}
	var all []byte
	for i := range l.Len() {
		mem, _, _, ok := l.Take(i)
		if !ok {
			t.Fatal("no tensor", i)
		}
		all = append(all, mem.Slice()...)
		mem.Release()
	}
	return string(all)
}

// A load joins a preload by any name of its file, gets each tensor once, and reads again what it needs again.
func TestJoin(t *testing.T) {
	path := plainFile(t, "", "1234")
	p := begin(t, load.Options{}, path)
	if Start(load.Spec{URIs: []string{path}}, load.Options{}) != p {
		t.Error("a second start of the same file")
	}
	link := filepath.Join(t.TempDir(), "link")
	if err := os.Symlink(path, link); err != nil {
		t.Fatal(err)
	}
	m := opening(t, load.Spec{URIs: []string{link}})
	if ok, notes := joins(t, m, load.Options{}); !ok || notes != "[]" {
		t.Fatal("not joined by another name:", notes)
	}
	for range 3 {
		if got := bytes(t, m); got != "1234" {
			t.Fatalf("%q", got)
		}
	}
	again := opening(t, load.Spec{URIs: []string{path}})
	if ok, _ := joins(t, again, load.Options{}); !ok {
		t.Error("two models of one file do not share its preload")
	}
	again.Close()
	m.Close()
	if !p.model.Spent() {
		t.Error("tensors that were given are held")
	}
	if ok, notes := joins(t, opening(t, load.Spec{URIs: []string{path}}), load.Options{}); ok || notes != "[]" {
		t.Error("given twice", notes)
	}
}

// Inspecting a file takes nothing, and leaves its preload to a load.
func TestLook(t *testing.T) {
	path := plainFile(t, "", "1234")
	p := begin(t, load.Options{}, path)
	m := opening(t, load.Spec{URIs: []string{path}})
	if ok, _ := joins(t, m, load.Options{}); !ok {
		t.Fatal("not joined")
	}
	m.Close()
	if p.model.Spent() {
		t.Fatal("a model that took nothing has ended the preload")
	}
	m = opening(t, load.Spec{URIs: []string{path}})
	if ok, _ := joins(t, m, load.Options{}); !ok || bytes(t, m) != "1234" {
		t.Fatal("not joined afterwards")
	}
}

// Whatever happens to a file between its preload and the load, the load has the current bytes, and one note says that
// the preload was dropped.
func TestReplaced(t *testing.T) {
	for name, change := range map[string]func(path string){
		"renamed over": func(path string) { _ = os.Rename(plainFile(t, path+".new", "5678"), path) },
		"removed and written": func(path string) {
			_ = os.Remove(path)
			plainFile(t, path, "5678")
		},
		"written in place": func(path string) { plainFile(t, path, "5678") },
		"written in place, its date put back": func(path string) {
			st, _ := os.Stat(path)
			plainFile(t, path, "5678")
			_ = os.Chtimes(path, st.ModTime(), st.ModTime())
		},
		"truncated and written": func(path string) {
			_ = os.Truncate(path, 1)
			plainFile(t, path, "5678")
		},
		"a link that leads elsewhere": func(path string) {
			_ = os.Remove(path)
			_ = os.Symlink(plainFile(t, path+".other", "5678"), path)
		},
	} {
		for _, mapped := range []string{"on", "off"} {
			t.Run(name+", map "+mapped, func(t *testing.T) {
				path := plainFile(t, "", "1234")
				on := mapped == "on"
				p := Start(load.Spec{URIs: []string{path}, Map: &on}, load.Options{})
				t.Cleanup(p.Drop)
				if _, done, err := p.Opened(time.Minute); err != nil || !done {
					t.Fatal(done, err)
				}
				if _, err := p.model.Job().Wait(time.Minute); err != nil {
					t.Fatal(err)
				}
				change(path)
				m := opening(t, load.Spec{URIs: []string{path}, Map: &on})
				ok, notes := joins(t, m, load.Options{})
				if ok || strings.Count(notes, "dropped") != 1 {
					t.Error("joined:", ok, notes)
				}
				if got := bytes(t, m); got != "5678" {
					t.Errorf("%q: the bytes of before", got)
				}
				if !p.model.Spent() {
					t.Error("tensors that no load can take are held")
				}
				if _, notes := joins(t, m, load.Options{}); notes != "[]" {
					t.Error("said twice:", notes)
				}
			})
		}
	}
}

// A file that is written right after its preload has opened it, in the same clock tick of the file system, counts as
// another file.
func TestWrittenInTheSameMoment(t *testing.T) {
	for i := range 30 {
		path := plainFile(t, "", "1234")
		p := begin(t, load.Options{}, path)
		plainFile(t, path, "5678")
		m := opening(t, load.Spec{URIs: []string{path}})
		if ok, _ := joins(t, m, load.Options{}); ok {
			t.Fatalf("round %d: joined", i)
		}
		if got := bytes(t, m); got != "5678" {
			t.Fatalf("round %d: %q", i, got)
		}
		m.Close()
		p.Drop()
	}
}

// However often a preload pauses for a file that is being written, and however coarse the file's times are, it says so
// once, and a load no longer waits for it.
func TestPausesOnce(t *testing.T) {
	for _, changed := range []int64{5, int64(3 * time.Second)} {
		synctest.Test(t, func(t *testing.T) {
			p := &Preload{paused: make(chan struct{})}
			for look := range looks {
				if err := p.pauseForClock(t.Context(), look, []source.Identity{{Changed: changed}}); err != nil {
					t.Fatal(err)
				}
			}
			<-p.paused
		})
	}
}

// later writes a file again, with a time that the file system distinguishes from the previous one.
func later(t *testing.T, path, data string) {
	t.Helper()
	plainFile(t, path, data)
	if err := os.Chtimes(path, time.Now(), time.Now().Add(time.Second)); err != nil {
		t.Fatal(err)
	}
}

// refused loads a model with a file that was written after it was opened.
func refused(t *testing.T, m *load.Model) {
	t.Helper()
	l, err := m.Start(nil, load.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if _, err := l.Job().Wait(time.Minute); !errors.Is(err, errs.ErrCorrupt) {
		t.Error(err)
	}
}

// A file that was opened and then written joins nothing, neither before the load begins nor through a model that was
// opened before. That model is refused.
func TestWrittenAfterItWasOpened(t *testing.T) {
	path := plainFile(t, "", "1234")
	begin(t, load.Options{}, path)
	m := opening(t, load.Spec{URIs: []string{path}})
	later(t, path, "5678")
	if ok, notes := joins(t, m, load.Options{}); ok || !strings.Contains(notes, "written to since") {
		t.Error(ok, notes)
	}
	refused(t, m)
}

// A model that has joined is refused if its file was written since.
func TestWrittenAfterItWasJoined(t *testing.T) {
	path := plainFile(t, "", "1234")
	p := begin(t, load.Options{}, path)
	m := opening(t, load.Spec{URIs: []string{path}})
	if ok, _ := joins(t, m, load.Options{}); !ok {
		t.Fatal("not joined")
	}
	later(t, path, "5678")
	refused(t, m)
	m.Close()
	if !p.model.Spent() {
		t.Error("it is held")
	}
}

// Files of one preload are joined one by one; a replaced file drops the whole preload.
func TestShards(t *testing.T) {
	dir := t.TempDir()
	var paths []string
	for i, data := range []string{"aaaa", "bbbb", "cccc"} {
		h := fmt.Sprintf(`{"%d":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}`, i)
		path := filepath.Join(dir, fmt.Sprintf("%d.safetensors", i))
		b := append([]byte{byte(len(h)), 0, 0, 0, 0, 0, 0, 0}, h...)
		if err := os.WriteFile(path, append(b, data...), 0o600); err != nil {
			t.Fatal(err)
		}
		paths = append(paths, path)
	}
	p := begin(t, load.Options{}, dir)
	for i, want := range []string{"aaaa", "bbbb"} {
		m := opening(t, load.Spec{URIs: []string{paths[i]}})
		if ok, notes := joins(t, m, load.Options{}); !ok || bytes(t, m) != want {
			t.Error(i, ok, notes)
		}
		m.Close()
	}
	if p.model.Spent() {
		t.Error("a file that was not loaded is gone")
	}
	m := opening(t, load.Spec{URIs: []string{dir}})
	if ok, _ := joins(t, m, load.Options{}); !ok || bytes(t, m) != "aaaabbbbcccc" {
		t.Error("the rest")
	}
	m.Close()

	p = begin(t, load.Options{}, dir)
	if err := os.WriteFile(paths[1]+".new", mustRead(t, paths[2]), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(paths[1]+".new", paths[1]); err != nil {
		t.Fatal(err)
	}
	m = opening(t, load.Spec{URIs: paths})
	if ok, notes := joins(t, m, load.Options{}); ok || strings.Count(notes, "dropped") != 1 {
		t.Error("joined though a shard was replaced:", notes)
	}
	if bytes(t, m) != "aaaacccccccc" || !p.model.Spent() {
		t.Error("wrong bytes, or held")
	}
}

func mustRead(t *testing.T, path string) []byte {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// A load with other settings than the preload drops it: another way of mapping or reading, another device, or nothing
// to load.
func TestOtherSettings(t *testing.T) {
	off := false
	for name, c := range map[string]struct {
		spec load.Spec
		opt  load.Options
	}{
		"not mapped":  {load.Spec{Map: &off}, load.Options{}},
		"read direct": {load.Spec{}, load.Options{Read: "direct"}},
		"to a GPU":    {load.Spec{}, load.Options{Device: "cuda:3"}},
	} {
		data := strings.Repeat("1234", 20_000) // large enough to be mapped
		path := plainFile(t, "", data)
		on := true
		p := Start(load.Spec{URIs: []string{path}, Map: &on}, load.Options{})
		c.spec.URIs = []string{path}
		m := opening(t, c.spec)
		if ok, notes := joins(t, m, c.opt); ok || strings.Count(notes, "dropped") != 1 {
			t.Errorf("%s: joined %v, %s", name, ok, notes)
		}
		if got := bytes(t, m); got != data || !p.model.Spent() {
			t.Errorf("%s: other bytes, or some are left", name)
		}
	}
	path := plainFile(t, "", "1234")
	begin(t, load.Options{}, path)
	m := opening(t, load.Spec{URIs: []string{path}})
	if a, _ := Join(m, load.Options{}, true, time.Minute); a.Device != nil || len(a.Notes) != 1 {
		t.Error("a load that takes nothing:", a)
	}
}

// An error of a preload stays its own: no load gets it.
func TestFailed(t *testing.T) {
	path := filepath.Join(t.TempDir(), "later")
	p := Start(load.Spec{URIs: []string{path}}, load.Options{})
	if _, done, err := p.Opened(time.Minute); !done || !errors.Is(err, errs.ErrNotFound) {
		t.Errorf("%v, want ErrNotFound", err)
	}
	plainFile(t, path, "12") // half of it
	p = Start(load.Spec{URIs: []string{path}}, load.Options{})
	if _, done, err := p.Opened(time.Minute); !done || err == nil {
		t.Error("half a file was preloaded")
	}
	plainFile(t, path, "1234")
	m := opening(t, load.Spec{URIs: []string{path}})
	if ok, notes := joins(t, m, load.Options{}); ok || notes != "[]" || bytes(t, m) != "1234" {
		t.Error(ok, notes)
	}
}

// A dropped preload is no longer joined. A load that has joined it keeps it.
func TestDrop(t *testing.T) {
	path := plainFile(t, "", "1234")
	m := opening(t, load.Spec{URIs: []string{path}})
	p := begin(t, load.Options{}, path)
	if ok, _ := joins(t, m, load.Options{}); !ok {
		t.Fatal("not joined")
	}
	p.Drop()
	if ok, _ := joins(t, opening(t, load.Spec{URIs: []string{path}}), load.Options{}); ok {
		t.Error("a dropped preload is joined")
	}
	if bytes(t, m) != "1234" {
		t.Error("wrong bytes")
	}
	m.Close()
	if !p.model.Spent() {
		t.Error("it is held")
	}
}

// A save drops the preload of what it replaced, also of stores by name, and no other.
func TestSweep(t *testing.T) {
	path, other := plainFile(t, "", "1234"), plainFile(t, "", "1234")
	p, q := begin(t, load.Options{}, path), begin(t, load.Options{}, other)
	Sweep(path)
	if ok, _ := joins(t, opening(t, load.Spec{URIs: []string{path}}), load.Options{}); !ok {
		t.Error("a file that was not written to was swept")
	}
	plainFile(t, path, "5678")
	Sweep(path)
	mu.Lock()
	n := len(live)
	mu.Unlock()
	if n != 1 {
		t.Errorf("%d preloads live", n)
	}
	if _, notes := joins(t, opening(t, load.Spec{URIs: []string{other}}),
		load.Options{}); strings.Count(notes, "dropped") != 1 {
		t.Error(notes)
	}
	_, _ = p, q
}
