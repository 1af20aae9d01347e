package fetch

import (
	"bytes"
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"github.com/overwire/overwire/gosrc/fault"
	"github.com/overwire/overwire/gosrc/internal/spawn"
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

type full struct{}

func (full) Write([]byte) (int, error) { return 0, errors.New("no space") }
