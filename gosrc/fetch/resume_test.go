package fetch

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/job"
	"github.com/overwire/overwire/gosrc/serve"
	"github.com/overwire/overwire/gosrc/source"
)

func noise(n int, seed uint64) []byte {
	b := make([]byte, n)
	r := rand.New(rand.NewPCG(seed, 1))
	for i := range b {
		b[i] = byte(r.Uint32())
	}
	return b
}

// hiddenIn returns the hidden names in a folder and its subfolders.
func hiddenIn(dir string) (names []string) {
	_ = filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if err == nil && path != dir && strings.HasPrefix(d.Name(), ".") {
			names = append(names, d.Name())
		}
		return nil
	})
	return names
}

// serving starts a slow server. It returns its URL and the number of bytes sent.
func serving(t *testing.T, dir string) (url string, sent *atomic.Int64) {
	t.Helper()
	s, err := serve.New(dir, serve.Options{Rate: 60 << 20})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s.URL(), &s.Sent
}

// stopAt runs fn, cancels it after n bytes have arrived, and returns its error.
func stopAt(n int64, fn func(ctx context.Context, j *job.Job) error) error {
	ctx, cancel := context.WithCancelCause(context.Background())
	j, done := job.New("fetch"), make(chan struct{})
	defer close(done)
	go func() {
		for j.Bytes.Load() < n {
			select {
			case <-done:
				return
			case <-time.After(time.Millisecond):
			}
		}
		cancel(errs.ErrCancelled)
	}()
	return fn(ctx, j)
}

// An interrupted fetch resumes where it stopped: the server sends only the rest, the file is not visible before
// it is complete, and no other files remain. If the object or the partial file has changed, the fetch starts
// over.
func TestResume(t *testing.T) {
	const size = 14 << 20
	for name, between := range map[string]func(t *testing.T, served, partial string){
		"the rest":       func(*testing.T, string, string) {},
		"another object": func(t *testing.T, served, _ string) { replace(t, served, noise(size, 2)) },
		"damage": func(t *testing.T, _, partial string) {
			b, err := os.ReadFile(partial)
			if err != nil {
				t.Fatal(err)
			}
			b[1000]++
			replace(t, partial, b)
		},
		"a note without bytes": func(t *testing.T, _, partial string) { replace(t, partial, nil) },
		"bytes without a note": func(t *testing.T, _, partial string) { _ = os.Remove(partial + ".json") },
		"a damaged note":       func(t *testing.T, _, partial string) { replace(t, partial+".json", []byte(`{"done":-1}`)) },
	} {
		t.Run(name, func(t *testing.T) {
			dir, out := t.TempDir(), filepath.Join(t.TempDir(), "x")
			served, partial := filepath.Join(dir, "x"), filepath.Join(filepath.Dir(out), ".x.partial")
			replace(t, served, noise(size, 1))
			url, sent := serving(t, dir)
			spec := Spec{URIs: []string{url + "x"}, Own: true}
			err := stopAt(6<<20, func(ctx context.Context, j *job.Job) error {
				_, err := File(ctx, j, spec, out)
				return err
			})
			if !errors.Is(err, errs.ErrCancelled) {
				t.Fatal(err)
			}
			if st, err := os.Stat(partial); err != nil || st.Size() < 6<<20 {
				t.Fatalf("the partial file is missing or too short: %v", err)
			}
			if _, err := os.Stat(out); err == nil {
				t.Fatal("an incomplete file is visible")
			}
			source.Notices()
			between(t, served, partial)
			before := sent.Load()
			if _, err := File(context.Background(), nil, spec, out); err != nil {
				t.Fatal(err)
			}
			want, _ := os.ReadFile(served)
			if got, err := os.ReadFile(out); err != nil || !bytes.Equal(got, want) {
				t.Errorf("%v, or wrong bytes", err)
			}
			if again := sent.Load() - before; (name == "the rest") != (again < size-5<<20) {
				t.Errorf("the second run received %d of %d bytes", again, size)
			}
			if left := hiddenIn(filepath.Dir(out)); len(left) > 0 {
				t.Errorf("left: %v", left)
			}
		})
	}
}

func replace(t *testing.T, path string, data []byte) {
	t.Helper()
	if err := errors.Join(os.WriteFile(path+".new", data, 0o600), os.Rename(path+".new", path)); err != nil {
		t.Fatal(err)
	}
}

// Several concurrent fetches to one file all end with the complete file.
func TestSeveralFetches(t *testing.T) {
	dir, out := t.TempDir(), filepath.Join(t.TempDir(), "x")
	want := noise(9<<20, 1)
	replace(t, filepath.Join(dir, "x"), want)
	url, _ := serving(t, dir)
	var wg sync.WaitGroup
	for range 3 {
		wg.Go(func() {
			if _, err := File(context.Background(), nil, Spec{URIs: []string{url + "x"}, Own: true}, out); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if got, err := os.ReadFile(out); err != nil || !bytes.Equal(got, want) || len(hiddenIn(filepath.Dir(out))) > 0 {
		t.Errorf("%v, or wrong bytes, or hidden files %v", err, hiddenIn(filepath.Dir(out)))
	}
}

// A folder becomes visible when it is complete. An interrupted run leaves its files hidden. The next run
// fetches the rest and removes files that are no longer listed.
func TestResumeFolder(t *testing.T) {
	dir, out := t.TempDir(), filepath.Join(t.TempDir(), "m")
	for name, data := range map[string][]byte{"model.safetensors": noise(8<<20, 1), "model2.safetensors": noise(8<<20, 2), "old.txt": nil,
		"sub/config.json": []byte("{}")} {
		if err := os.MkdirAll(filepath.Dir(filepath.Join(dir, name)), 0o700); err != nil {
			t.Fatal(err)
		}
		replace(t, filepath.Join(dir, name), data)
	}
	url, sent := serving(t, dir)
	fetch := func(ctx context.Context, j *job.Job) error {
		_, err := Folder(ctx, j, url, out, source.Options{})
		return err
	}
	if err := stopAt(12<<20, fetch); !errors.Is(err, errs.ErrCancelled) {
		t.Fatal(err)
	}
	if _, err := os.Stat(out); err == nil {
		t.Fatal("an incomplete folder is visible")
	}
	source.Notices()
	if err := os.Remove(filepath.Join(dir, "old.txt")); err != nil {
		t.Fatal(err)
	}
	before := sent.Load()
	if err := fetch(context.Background(), nil); err != nil {
		t.Fatal(err)
	}
	if again := sent.Load() - before; again > 7<<20 {
		t.Errorf("the second run received %d bytes of 16 MiB", again)
	}
	for _, name := range []string{"model.safetensors", "model2.safetensors", "sub/config.json"} {
		want, _ := os.ReadFile(filepath.Join(dir, name))
		if got, err := os.ReadFile(filepath.Join(out, name)); err != nil || !bytes.Equal(got, want) {
			t.Errorf("%s: %v, or wrong bytes", name, err)
		}
	}
	if entries, _ := os.ReadDir(out); len(entries) != 3 || len(hiddenIn(filepath.Dir(out))) > 0 {
		t.Errorf("%v, hidden %v", entries, hiddenIn(filepath.Dir(out)))
	}
}
