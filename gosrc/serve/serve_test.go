package serve

import (
	"context"
	"errors"
	"io"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"github.com/overwire/overwire/gosrc/fault"
	"github.com/overwire/overwire/gosrc/internal/spawn"
)

func get(t *testing.T, url, span string) (int, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(context.Background(), http.MethodGet, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	if span != "" {
		req.Header.Set("Range", span)
	}
	resp, err := http.DefaultTransport.RoundTrip(req)
	if err != nil {
		return 0, err.Error()
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		return resp.StatusCode, err.Error()
	}
	return resp.StatusCode, string(b)
}

// Files below the folder are served, whole and in ranges, and nothing else is.
func TestServe(t *testing.T) {
	top := t.TempDir()
	dir := filepath.Join(top, "d")
	for path, text := range map[string]string{"d/sub/a": "0123456789", "secret": "no"} {
		if err := errors.Join(os.MkdirAll(filepath.Dir(filepath.Join(top, path)), 0o700), os.WriteFile(filepath.Join(top, path), []byte(text), 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink("../secret", filepath.Join(dir, "link")); err != nil {
		t.Fatal(err)
	}
	s, err := New(dir, Options{})
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		path, span string
		code       int
		body       string
	}{
		{"sub/a", "", 200, "0123456789"}, {"sub/a", "bytes=3-5", 206, "345"}, {"sub/a", "bytes=20-", 416, ""},
		{"link", "", 404, ""}, {"sub", "", 404, ""}, {"%2e%2e/secret", "", 404, ""}, {"none", "", 404, ""},
	} {
		code, body := get(t, s.URL()+c.path, c.span)
		if code != c.code || c.body != "" && body != c.body {
			t.Errorf("%s %s: %d %q", c.path, c.span, code, body)
		}
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	if n := spawn.Left(); len(n) != 0 {
		t.Errorf("left: %v", n)
	}
}

// A connection waits for the server's link and for its own, each as fast as its
// rate says, by a clock that only they move.
func TestRate(t *testing.T) {
	for _, c := range []*conn{{s: &Server{link: link{rate: 10 << 20}}}, {s: &Server{}, own: link{rate: 10 << 20}}} {
		synctest.Test(t, func(t *testing.T) {
			begun := time.Now()
			for range 8 {
				c.send(step)
			}
			if d := time.Since(begun); d < 198*time.Millisecond || d > 200*time.Millisecond {
				t.Errorf("2 MiB over a link of 10 MiB/s in %v", d)
			}
		})
	}
}

// The same seed gives the same faults.
func TestSeed(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "x"), make([]byte, 2<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	var seen []map[string]int64
	for range 2 {
		s, err := New(dir, Options{Seed: 5, Faults: map[string]float64{"500": 0.3, "503": 0.2}})
		if err != nil {
			t.Fatal(err)
		}
		for range 40 {
			get(t, s.URL()+"x", "bytes=0-9")
		}
		seen = append(seen, s.Faults())
		s.Close()
	}
	if !maps.Equal(seen[0], seen[1]) || seen[0]["500"] == 0 || seen[0]["503"] == 0 {
		t.Error(seen)
	}
	for _, bad := range []map[string]float64{{"none": 0.1}, {"500": 0.6, "503": 0.6}, {"500": -1}} {
		if _, err := New(dir, Options{Faults: bad}); !errors.Is(err, fault.ErrArgument) {
			t.Errorf("%v: %v", bad, err)
		}
	}
}
