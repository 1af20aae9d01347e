package fetch

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/spawn/spawntest"
	"github.com/overwire/overwire/gosrc/knob"
	"github.com/overwire/overwire/gosrc/serve"
	"github.com/overwire/overwire/gosrc/source"
)

// All bodies arrive complete and in order despite network faults. A missing object gives an error after the
// preceding bytes were written. A failing writer ends the fetch.
func TestFetch(t *testing.T) {
	dir := t.TempDir()
	r := rand.New(rand.NewPCG(1, 2))
	var want []byte
	var uris []string
	opt := serve.Options{Faults: map[string]float64{"reset": 0.2, "short": 0.1, "503": 0.1}, Seed: 1}
	s, err := serve.New(dir, opt)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	for i, n := range []int{0, 1, part - 1, 3*part + 17, 300_000} {
		b := make([]byte, n)
		for k := range b {
			b[k] = byte(r.Uint32())
		}
		name := string(rune('a' + i))
		if err := os.WriteFile(filepath.Join(dir, name), b, 0o600); err != nil {
			t.Fatal(err)
		}
		want = append(want, b...)
		if i == 2 {
			uris = append(uris, filepath.Join(dir, name)) // a file among URLs
		} else {
			uris = append(uris, s.URL()+name)
		}
	}
	spec := Spec{URIs: uris, Storage: source.Options{Storage: map[string]string{"retries": "50"}}}
	var got bytes.Buffer
	for range 50 { // opening retries less often than reading
		got.Reset()
		if _, err = Fetch(context.Background(), nil, spec, &got); err == nil {
			break
		}
	}
	if err != nil || !bytes.Equal(got.Bytes(), want) {
		t.Fatalf("%v, or wrong bytes", err)
	}
	steady, err := serve.New(dir, serve.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer steady.Close()
	if _, err := Fetch(context.Background(), nil, Spec{URIs: []string{steady.URL() + "b", steady.URL() + "none"}},
		io.Discard); !errors.Is(err, errs.ErrNotFound) {
		t.Errorf("%v", err)
	}
	if _, err := Fetch(context.Background(), nil, Spec{URIs: []string{steady.URL() + "d"}}, full{}); !errors.Is(err,
		errs.ErrIO) {
		t.Errorf("%v", err)
	}
	if _, err := Fetch(context.Background(), nil, Spec{}, io.Discard); !errors.Is(err, errs.ErrArgument) {
		t.Errorf("%v", err)
	}
	if n := spawntest.Left("serve", "serve watch"); len(n) != 0 {
		t.Errorf("left: %v", n)
	}
}

// A fetch reports the state of its object. A fetch with that pin writes no byte of an object that was replaced by one
// with a different size, date or inode.
func TestPin(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "x")
	day := time.Unix(1, 0)
	put := func(text string) {
		t.Helper()
		if err := os.WriteFile(path+".new", []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		day = day.Add(time.Hour) // inodes are reused, and two writes may share a clock tick
		if err := os.Chtimes(path+".new", day, day); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(path+".new", path); err != nil {
			t.Fatal(err)
		}
	}
	put("first")
	s, err := serve.New(dir, serve.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	for _, uri := range []string{path, s.URL() + "x"} {
		put("first")
		rep, err := Fetch(context.Background(), nil, Spec{URIs: []string{uri}, To: 1}, io.Discard)
		if err != nil || rep.Pin == nil || rep.Pin.Size != 5 || rep.Bytes != 1 {
			t.Fatalf("%v %+v", err, rep)
		}
		for _, text := range []string{"first", "other", "longer than that", ""} {
			put(text)
			var got bytes.Buffer
			_, err := Fetch(context.Background(), nil, Spec{URIs: []string{uri}, From: 1, Pin: rep.Pin}, &got)
			if !errors.Is(err, errs.ErrCorrupt) || !strings.Contains(err.Error(), "changed since it was opened") ||
				got.Len() > 0 {
				t.Errorf("%s, %q: %v, %q", uri, text, err, &got)
			}
		}
		rep, err = Fetch(context.Background(), nil, Spec{URIs: []string{uri}}, io.Discard)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := Fetch(context.Background(), nil, Spec{URIs: []string{uri}, Pin: rep.Pin}, io.Discard); err != nil {
			t.Errorf("%s: unchanged: %v", uri, err)
		}
	}
	if _, err := Fetch(context.Background(), nil, Spec{URIs: []string{path, path}, Pin: &Pin{}},
		io.Discard); !errors.Is(err, errs.ErrArgument) {
		t.Errorf("%v", err)
	}
}

// Two parts are requested at first, and two more for each part written. A caller that only inspects the
// beginning causes few requests.
func TestAhead(t *testing.T) {
	const parts = 6
	var asked atomic.Int64 // the highest byte requested so far
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var from, to int64
		if _, err := fmt.Sscanf(r.Header.Get("Range"), "bytes=%d-%d", &from, &to); err != nil {
			t.Errorf("Range: %q", r.Header.Get("Range"))
		}
		for to >= asked.Load() && !asked.CompareAndSwap(asked.Load(), to) {
		}
		http.ServeContent(w, r, "", time.Unix(1, 0), bytes.NewReader(make([]byte, parts*part)))
	}))
	defer s.Close()
	n := int64(0)
	rep, err := Fetch(context.Background(), nil, Spec{URIs: []string{s.URL}}, writer(func(p []byte) (int, error) {
		time.Sleep(20 * time.Millisecond) // time for reads that should not happen
		if most := (begin + 2*n) * part; asked.Load() >= most {
			t.Errorf("byte %[2]d was requested after only %[1]d parts were written", n, asked.Load())
		}
		n++
		return len(p), nil
	}))
	if err != nil || rep.Bytes != parts*part || n != parts+1 || asked.Load() != parts*part-1 {
		t.Errorf("%v, %d bytes in %d parts", err, rep.Bytes, n)
	}
}

type writer func(p []byte) (int, error)

func (w writer) Write(p []byte) (int, error) { return w(p) }

// An external downloader is started once for all objects of known sizes, and has ended when Fetch returns.
// Sizes are verified with and without a downloader.
func TestDownloader(t *testing.T) {
	t.Cleanup(func() { knob.Load(nil) })
	dir := t.TempDir()
	a, b := bytes.Repeat([]byte("a"), 3<<20), bytes.Repeat([]byte("b"), 5<<20)
	for name, data := range map[string][]byte{"a": a, "b": b, "none": nil} {
		if err := os.WriteFile(filepath.Join(dir, name), data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	s, err := serve.New(dir, serve.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	starts := filepath.Join(dir, "starts")
	script := func(text string) {
		path := filepath.Join(dir, "downloader")
		if err := os.WriteFile(path, []byte("#!/bin/sh\necho $# >> "+starts+"\n"+text+"\n"), 0o700); err != nil {
			t.Fatal(err)
		}
		knob.Load(map[string]string{"OVERWIRE_DOWNLOADER": path})
	}
	uris := []string{s.URL() + "a", s.URL() + "none", s.URL() + "b", s.URL() + "none"}
	fetch := func(w io.Writer, sizes ...int64) error {
		_, err := Fetch(context.Background(), nil, Spec{URIs: uris, Sizes: sizes}, w)
		return err
	}
	whole := []int64{3 << 20, 0, 5 << 20, 0}
	for _, program := range []string{"", "for u; do cat " + dir + "/${u##*/}; done"} {
		if program != "" {
			script(program)
		}
		var got bytes.Buffer
		if err := fetch(&got, whole...); err != nil || !bytes.Equal(got.Bytes(), append(slices.Clone(a), b...)) {
			t.Fatalf("%q: %v, or wrong bytes", program, err)
		}
		for i := range whole {
			for _, by := range []int64{-1, 1} {
				wrong := slices.Clone(whole)
				wrong[i] += by
				// If the stream is divided at wrong offsets, its end has extra or missing bytes.
				if err := fetch(io.Discard, wrong...); !errors.Is(err, errs.ErrCorrupt) &&
					(wrong[i] >= 0 || !errors.Is(err, errs.ErrArgument)) {
					t.Errorf("%q: body %d of %d bytes: %v", program, i, wrong[i], err)
				}
			}
		}
		if err := fetch(io.Discard, 1); !errors.Is(err, errs.ErrArgument) {
			t.Errorf("%v", err)
		}
	}
	text, err := os.ReadFile(starts)
	if lines := strings.Fields(string(text)); err != nil || len(lines) == 0 ||
		slices.ContainsFunc(lines, func(n string) bool {
			return n != "4"
		}) {
		t.Errorf("%v: URLs by start: %q", err, text)
	}
	script("printf x; exit 22")
	if err := fetch(io.Discard, whole...); !errors.Is(err, errs.ErrIO) ||
		!strings.Contains(err.Error(), "exit status 22") {
		t.Errorf("%v", err)
	}
	script("cat " + dir + "/a; exec sleep 1000")
	ctx, cancel := context.WithCancelCause(context.Background())
	time.AfterFunc(200*time.Millisecond, func() { cancel(errs.ErrCancelled) })
	if _, err := Fetch(ctx, nil, Spec{URIs: uris, Sizes: whole}, io.Discard); !errors.Is(err, errs.ErrCancelled) {
		t.Errorf("%v", err)
	}
	if n := spawntest.Left("serve", "serve watch"); len(n) != 0 {
		t.Errorf("left: %v", n)
	}
}

type full struct{}

func (full) Write([]byte) (int, error) { return 0, errors.New("no space") }
