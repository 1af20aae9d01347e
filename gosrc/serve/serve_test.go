package serve

import (
	"context"
	"errors"
	"io"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/spawn/spawntest"
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

// Only files below the folder are served, as a whole and in ranges.
func TestServe(t *testing.T) {
	top := t.TempDir()
	dir := filepath.Join(top, "d")
	for path, text := range map[string]string{"d/sub/a": "0123456789", "secret": "no"} {
		if err := errors.Join(os.MkdirAll(filepath.Dir(filepath.Join(top, path)), 0o700),
			os.WriteFile(filepath.Join(top, path), []byte(text), 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink("../secret", filepath.Join(dir, "link")); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mkfifo(filepath.Join(dir, "pipe"), 0o600); err != nil {
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
		{"link", "", 404, ""}, {".hidden", "", 404, ""}, {"sub/.git/config", "", 404, ""},
		{"sub", "", 404, ""}, {"sub/a/", "", 404, ""},
		{"%2e%2e/secret", "", 404, ""}, {"none", "", 404, ""},
		{"pipe", "", 404, ""}, // no thread waits for a writer
	} {
		code, body := get(t, s.URL()+c.path, c.span)
		if code != c.code || c.body != "" && body != c.body {
			t.Errorf("%s %s: %d %q", c.path, c.span, code, body)
		}
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	if n := spawntest.Left(); len(n) != 0 {
		t.Errorf("left: %v", n)
	}
}

// A connection waits for the server's link and for its own, each at its rate. The clock is simulated.
func TestRate(t *testing.T) {
	for _, c := range []*conn{{s: &Server{link: link{rate: 10 << 20}}}, {s: &Server{}, own: link{rate: 10 << 20}}} {
		synctest.Test(t, func(t *testing.T) {
			begun := time.Now()
			for range 8 {
				c.waitForLinks(step)
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
		if _, err := New(dir, Options{Faults: bad}); !errors.Is(err, errs.ErrArgument) {
			t.Errorf("%v: %v", bad, err)
		}
	}
}

// Each fault has the effect that Kinds describes, and leaves no goroutine. Faults of ranges do not affect other
// requests.
func TestEachFault(t *testing.T) {
	dir := t.TempDir()
	text := make([]byte, 5000)
	for i := range text {
		text[i] = byte(i)
	}
	if err := os.WriteFile(filepath.Join(dir, "x"), text, 0o600); err != nil {
		t.Fatal(err)
	}
	asked := string(text[1000:3000])
	broken := func(r *http.Response, body string, err error) bool {
		return r.StatusCode == 206 && err != nil && strings.HasPrefix(asked, body) && len(body) < len(asked)
	}
	want := map[string]func(r *http.Response, body string, err error) bool{
		"reset":   broken,
		"short":   broken,
		"stall":   broken, // after the client's patience
		"trickle": broken,
		"range": func(r *http.Response, body string, err error) bool {
			return r.StatusCode == 206 && err == nil && r.Header.Get("Content-Range") == "bytes 1001-3000/5000" &&
				body == string(text[1001:3001])
		},
		"whole": func(r *http.Response, body string, err error) bool {
			return r.StatusCode == 200 && err == nil && body == string(text)
		},
		"length": func(r *http.Response, body string, err error) bool {
			return r.StatusCode == 206 && r.ContentLength > 2000 && errors.Is(err, io.ErrUnexpectedEOF) && body == asked
		},
		"etag": func(r *http.Response, body string, err error) bool {
			return r.StatusCode == 206 && err == nil && r.Header.Get("ETag") == `"another"` && body == asked
		},
		"gzip": func(r *http.Response, body string, err error) bool {
			return r.StatusCode == 200 && r.Header.Get("Content-Encoding") == "gzip" &&
				strings.HasPrefix(body, "\x1f\x8b")
		},
		"loop": func(r *http.Response, _ string, _ error) bool {
			return r.StatusCode == 302 && r.Header.Get("Location") == "/x"
		},
		"500": func(r *http.Response, _ string, _ error) bool { return r.StatusCode == 500 },
		"503": func(r *http.Response, _ string, _ error) bool {
			return r.StatusCode == 503 && r.Header.Get("Retry-After") == "7"
		},
		"429": func(r *http.Response, _ string, _ error) bool {
			return r.StatusCode == 429 && r.Header.Get("Retry-After") == "7"
		},
	}
	for kind, says := range Kinds() {
		t.Run(kind, func(t *testing.T) {
			s, err := New(dir, Options{Faults: map[string]float64{kind: 1}, Seed: 3, RetryAfter: 7 * time.Second})
			if err != nil {
				t.Fatal(err)
			}
			ask := func(span string) (*http.Response, string, error) {
				patience, stop := context.WithCancel(context.Background())
				defer stop()
				req, _ := http.NewRequestWithContext(patience, http.MethodGet, s.URL()+"x", nil)
				req.Header.Set("Accept-Encoding", "identity")
				if span != "" {
					req.Header.Set("Range", span)
				}
				r, err := (&http.Transport{DisableKeepAlives: true}).RoundTrip(req)
				if err != nil {
					t.Fatal(err)
				}
				defer r.Body.Close()
				if (kind == "stall" || kind == "trickle") && (span != "" || !faults[kind].ranged) {
					time.AfterFunc(300*time.Millisecond, stop)
				}
				body, err := io.ReadAll(r.Body)
				return r, string(body), err
			}
			if r, body, err := ask("bytes=1000-2999"); !want[kind](r, body, err) {
				t.Errorf("not %s: %v, %d bytes, %v", says, r, len(body), err)
			}
			if _, body, err := ask(""); faults[kind].ranged && (err != nil || body != string(text)) {
				t.Errorf("the whole file: %d bytes, %v", len(body), err)
			}
			if err := s.Close(); err != nil {
				t.Error(err)
			}
		})
	}
	if n := spawntest.Left(); len(n) != 0 {
		t.Errorf("left: %v", n)
	}
}
