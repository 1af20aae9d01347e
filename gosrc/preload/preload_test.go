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

// plainFile writes a safetensors file with one tensor, which contains data.
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

// joins reports whether a load of a model attaches to a preload, and the notes about preloads.
func joins(t *testing.T, m *load.Model, opt load.Options) (bool, string) {
	t.Helper()
	a, done := Join(m, opt, false, time.Minute)
	if !done {
		t.Fatal("Join took more than a minute")
	}
	return a.Device != nil, fmt.Sprint(a.Notes)
}

// bytes loads a whole model.
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

// A load attaches to a preload by any name of its file and takes each tensor once. Another load reads the tensors
// again.
func TestJoin(t *testing.T) {
	path := plainFile(t, "", "1234")
	p := begin(t, load.Options{}, path)
	if Start(load.Spec{URIs: []string{path}}, load.Options{}) != p {
		t.Error("a second Start of the same file made another preload")
	}
	link := filepath.Join(t.TempDir(), "link")
	if err := os.Symlink(path, link); err != nil {
		t.Fatal(err)
	}
	m := opening(t, load.Spec{URIs: []string{link}})
	if ok, notes := joins(t, m, load.Options{}); !ok || notes != "[]" {
		t.Fatal("not attached by another name:", notes)
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
		t.Error("the preload still holds tensors that were taken")
	}
	if ok, notes := joins(t, opening(t, load.Spec{URIs: []string{path}}), load.Options{}); ok || notes != "[]" {
		t.Error("a tensor was taken twice", notes)
	}
}

// Inspecting a file takes no tensors and leaves its preload to a load.
func TestInspectionTakesNoTensors(t *testing.T) {
	path := plainFile(t, "", "1234")
	p := begin(t, load.Options{}, path)
	m := opening(t, load.Spec{URIs: []string{path}})
	if ok, _ := joins(t, m, load.Options{}); !ok {
		t.Fatal("not attached")
	}
	m.Close()
	if p.model.Spent() {
		t.Fatal("a model that took no tensors ended the preload")
	}
	m = opening(t, load.Spec{URIs: []string{path}})
	if ok, _ := joins(t, m, load.Options{}); !ok || bytes(t, m) != "1234" {
		t.Fatal("not attached afterwards")
	}
}

// If a file is changed in any way after its preload, a load returns the current bytes, and one note says that the
// preload was dropped.
func TestReplaced(t *testing.T) {
	for name, change := range map[string]func(path string){
		"replaced by a rename": func(path string) { _ = os.Rename(plainFile(t, path+".new", "5678"), path) },
		"removed and written": func(path string) {
			_ = os.Remove(path)
			plainFile(t, path, "5678")
		},
		"written in place": func(path string) { plainFile(t, path, "5678") },
		"written in place, with its time restored": func(path string) {
			st, _ := os.Stat(path)
			plainFile(t, path, "5678")
			_ = os.Chtimes(path, st.ModTime(), st.ModTime())
		},
		"truncated and written": func(path string) {
			_ = os.Truncate(path, 1)
			plainFile(t, path, "5678")
		},
		"a link with a different target": func(path string) {
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
					t.Errorf("got the old bytes: %q", got)
				}
				if !p.model.Spent() {
					t.Error("the preload still holds tensors that no load can take")
				}
				if _, notes := joins(t, m, load.Options{}); notes != "[]" {
					t.Error("a note was returned twice:", notes)
				}
			})
		}
	}
}

// A file that is written right after its preload has opened it, in the same clock tick of the file system, is a
// different file.
func TestWrittenInTheSameMoment(t *testing.T) {
	for i := range 30 {
		path := plainFile(t, "", "1234")
		p := begin(t, load.Options{}, path)
		plainFile(t, path, "5678")
		m := opening(t, load.Spec{URIs: []string{path}})
		if ok, _ := joins(t, m, load.Options{}); ok {
			t.Fatalf("round %d: attached", i)
		}
		if got := bytes(t, m); got != "5678" {
			t.Fatalf("round %d: %q", i, got)
		}
		m.Close()
		p.Drop()
	}
}

// A preload that pauses for a file that is being written, any number of times, signals that once, and loads no longer
// wait for it.
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

// later writes a file again, at a time that the file system distinguishes from the previous one.
func later(t *testing.T, path, data string) {
	t.Helper()
	plainFile(t, path, data)
	if err := os.Chtimes(path, time.Now(), time.Now().Add(time.Second)); err != nil {
		t.Fatal(err)
	}
}

// refused loads a model after its open file was overwritten, and expects an error.
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

// A load of a file that was written after the preload opened it does not attach to the preload, even through a
// model opened before the write. That model is refused.
func TestWrittenAfterItWasOpened(t *testing.T) {
	path := plainFile(t, "", "1234")
	begin(t, load.Options{}, path)
	m := opening(t, load.Spec{URIs: []string{path}})
	later(t, path, "5678")
	if ok, notes := joins(t, m, load.Options{}); ok || !strings.Contains(notes, "modified after") {
		t.Error(ok, notes)
	}
	refused(t, m)
}

// A model that has attached to a preload is refused if its file is written afterwards.
func TestWrittenAfterItWasJoined(t *testing.T) {
	path := plainFile(t, "", "1234")
	p := begin(t, load.Options{}, path)
	m := opening(t, load.Spec{URIs: []string{path}})
	if ok, _ := joins(t, m, load.Options{}); !ok {
		t.Fatal("not attached")
	}
	later(t, path, "5678")
	refused(t, m)
	m.Close()
	if !p.model.Spent() {
		t.Error("the preload still holds tensors")
	}
}

// Loads attach to the files of one preload one by one. A replaced file drops the whole preload.
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
		t.Error("the tensors of a file that was not loaded are gone")
	}
	m := opening(t, load.Spec{URIs: []string{dir}})
	if ok, _ := joins(t, m, load.Options{}); !ok || bytes(t, m) != "aaaabbbbcccc" {
		t.Error("the other files do not attach")
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
		t.Error("attached although a shard was replaced:", notes)
	}
	if bytes(t, m) != "aaaacccccccc" || !p.model.Spent() {
		t.Error("wrong bytes, or the preload still holds tensors")
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

// A load drops a preload whose settings (mapping, reading mode or device) differ from its own. A load that
// takes no tensors also drops it.
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
			t.Errorf("%s: attached %v, %s", name, ok, notes)
		}
		if got := bytes(t, m); got != data || !p.model.Spent() {
			t.Errorf("%s: wrong bytes, or the preload still holds tensors", name)
		}
	}
	path := plainFile(t, "", "1234")
	begin(t, load.Options{}, path)
	m := opening(t, load.Spec{URIs: []string{path}})
	if a, _ := Join(m, load.Options{}, true, time.Minute); a.Device != nil || len(a.Notes) != 1 {
		t.Error("a load that takes no tensors:", a)
	}
}

// No load gets the error of a failed preload.
func TestFailed(t *testing.T) {
	path := filepath.Join(t.TempDir(), "later")
	p := Start(load.Spec{URIs: []string{path}}, load.Options{})
	if _, done, err := p.Opened(time.Minute); !done || !errors.Is(err, errs.ErrNotFound) {
		t.Errorf("%v, want ErrNotFound", err)
	}
	plainFile(t, path, "12") // half of the file
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

// Loads do not attach to a dropped preload. A load that attached before keeps its tensors.
func TestDrop(t *testing.T) {
	path := plainFile(t, "", "1234")
	m := opening(t, load.Spec{URIs: []string{path}})
	p := begin(t, load.Options{}, path)
	if ok, _ := joins(t, m, load.Options{}); !ok {
		t.Fatal("not attached")
	}
	p.Drop()
	if ok, _ := joins(t, opening(t, load.Spec{URIs: []string{path}}), load.Options{}); ok {
		t.Error("attached to a dropped preload")
	}
	if bytes(t, m) != "1234" {
		t.Error("wrong bytes")
	}
	m.Close()
	if !p.model.Spent() {
		t.Error("the preload still holds tensors")
	}
}

// Sweep drops only preloads of files that were replaced. For stores, it compares names.
func TestSweep(t *testing.T) {
	path, other := plainFile(t, "", "1234"), plainFile(t, "", "1234")
	p, q := begin(t, load.Options{}, path), begin(t, load.Options{}, other)
	Sweep(path)
	if ok, _ := joins(t, opening(t, load.Spec{URIs: []string{path}}), load.Options{}); !ok {
		t.Error("the preload of an unchanged file was dropped")
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
