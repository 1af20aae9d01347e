package fetch

import (
	"bytes"
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/overwire/overwire/gosrc/fault"
	"github.com/overwire/overwire/gosrc/internal/spawn"
	"github.com/overwire/overwire/gosrc/knob"
	"github.com/overwire/overwire/gosrc/serve"
	"github.com/overwire/overwire/gosrc/source"
)

// Bodies come whole and in order, whatever the network does; a missing one is
// an error after what came before it; a writer that fails ends it all.
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
	for range 5 { // opening gives up sooner than reading
		got.Reset()
		if _, err = Fetch(context.Background(), nil, spec, &got); err == nil {
			break
		}
	}
	if err != nil || !bytes.Equal(got.Bytes(), want) {
		t.Fatalf("%v, or other bytes", err)
	}
	calm, err := serve.New(dir, serve.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer calm.Close()
	if _, err := Fetch(context.Background(), nil, Spec{URIs: []string{calm.URL() + "b", calm.URL() + "none"}}, io.Discard); !errors.Is(err, fault.ErrNotFound) {
		t.Errorf("%v", err)
	}
	if _, err := Fetch(context.Background(), nil, Spec{URIs: []string{calm.URL() + "d"}}, full{}); !errors.Is(err, fault.ErrIO) {
		t.Errorf("%v", err)
	}
	if _, err := Fetch(context.Background(), nil, Spec{}, io.Discard); !errors.Is(err, fault.ErrArgument) {
		t.Errorf("%v", err)
	}
	for _, n := range spawn.Names() {
		if n != "serve" && n != "serve watch" {
			t.Errorf("left: %s", n)
		}
	}
}

// An external downloader is started once for all objects whose sizes are known,
// and at the latest dead when Fetch returns; sizes are compared with and without
// one.
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
			t.Fatalf("%q: %v, or other bytes", program, err)
		}
		for i := range whole {
			for _, by := range []int64{-1, 1} {
				wrong := slices.Clone(whole)
				wrong[i] += by
				// A stream that is cut otherwise is known by what is too much, or missing, at its end.
				if err := fetch(io.Discard, wrong...); !errors.Is(err, fault.ErrCorrupt) && (wrong[i] >= 0 || !errors.Is(err, fault.ErrArgument)) {
					t.Errorf("%q: body %d of %d bytes: %v", program, i, wrong[i], err)
				}
			}
		}
		if err := fetch(io.Discard, 1); !errors.Is(err, fault.ErrArgument) {
			t.Errorf("%v", err)
		}
	}
	text, err := os.ReadFile(starts)
	if lines := strings.Fields(string(text)); err != nil || len(lines) == 0 || slices.ContainsFunc(lines, func(n string) bool { return n != "4" }) {
		t.Errorf("%v: URLs by start: %q", err, text)
	}
	script("printf x; exit 22")
	if err := fetch(io.Discard, whole...); !errors.Is(err, fault.ErrIO) || !strings.Contains(err.Error(), "exit status 22") {
		t.Errorf("%v", err)
	}
	script("cat " + dir + "/a; exec sleep 1000")
	ctx, cancel := context.WithCancelCause(context.Background())
	time.AfterFunc(200*time.Millisecond, func() { cancel(fault.ErrCancelled) })
	if _, err := Fetch(ctx, nil, Spec{URIs: uris, Sizes: whole}, io.Discard); !errors.Is(err, fault.ErrCancelled) {
		t.Errorf("%v", err)
	}
	for _, n := range spawn.Names() {
		if n != "serve" && n != "serve watch" {
			t.Errorf("left: %s", n)
		}
	}
}

type full struct{}

func (full) Write([]byte) (int, error) { return 0, errors.New("no space") }
