package serve

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// put writes a file of one repeated byte with a constant modification time, in place or by a rename.
func put(t *testing.T, path string, fill byte, inPlace bool) {
	t.Helper()
	data, to := bytes.Repeat([]byte{fill}, 2<<20), path
	if !inPlace {
		to += ".new"
	}
	f, err := os.OpenFile(to, os.O_WRONLY|os.O_CREATE, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	_, err = f.WriteAt(data, 0)
	old := time.Unix(1, 0)
	if err := errors.Join(err, f.Close(), os.Chtimes(to, old, old), os.Rename(to, path)); err != nil {
		t.Fatal(err)
	}
}

// A different file of the same size and time has a different ETag, so that clients detect the change. Only a file that
// is written continuously has a weak ETag.
func TestEachStateHasItsOwnETag(t *testing.T) {
	path := filepath.Join(t.TempDir(), "x")
	s, err := New(filepath.Dir(path), Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	seen := map[string]bool{}
	for _, inPlace := range []bool{false, true, false} {
		put(t, path, 'a', inPlace)
		resp, err := http.DefaultClient.Head(s.URL() + "x")
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		tag := resp.Header.Get("ETag")
		if seen[tag] || !strings.HasPrefix(tag, `"`) {
			t.Errorf("ETag %s, after %v", tag, seen)
		}
		seen[tag] = true
	}
	end, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		f, _ := os.OpenFile(path, os.O_WRONLY, 0)
		defer f.Close()
		for {
			select {
			case <-end:
				return
			default:
				_, _ = f.WriteAt([]byte("b"), 0)
			}
		}
	}()
	defer func() { close(end); <-done }()
	var tags []string
	for until := time.Now().Add(time.Minute); time.Now().Before(until); { // the writer may pause for longer than a tick
		resp, err := http.DefaultClient.Head(s.URL() + "x")
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		tag := resp.Header.Get("ETag")
		if strings.HasPrefix(tag, `W/"`) {
			return
		}
		tags = append(tags, tag)
	}
	t.Errorf("the ETags of a file that is being written are all strong: %s", slices.Compact(tags))
}

// If the file is replaced or written during a response, the response ends early and contains bytes of only one
// state.
func TestResponsesHaveOneState(t *testing.T) {
	for name, opt := range map[string]Options{
		"ranges": {}, "no ranges": {NoRanges: true}, "chunked": {Chunked: true},
		"faults": {Faults: map[string]float64{"etag": 1}},
	} {
		for _, inPlace := range []bool{false, true} {
			path := filepath.Join(t.TempDir(), "x")
			put(t, path, 'a', false)
			opt.Rate = 4 << 20
			s, err := New(filepath.Dir(path), opt)
			if err != nil {
				t.Fatal(err)
			}
			defer s.Close()
			req, err := http.NewRequestWithContext(context.Background(), http.MethodGet, s.URL()+"x", nil)
			if err != nil {
				t.Fatal(err)
			}
			req.Header.Set("Range", "bytes=0-2097151")
			resp, err := http.DefaultTransport.RoundTrip(req)
			if err != nil {
				t.Fatal(err)
			}
			defer resp.Body.Close()
			first := make([]byte, 1)
			if _, err := io.ReadFull(resp.Body, first); err != nil {
				t.Fatal(err)
			}
			put(t, path, 'b', inPlace)
			rest, err := io.ReadAll(resp.Body)
			if err == nil || bytes.ContainsFunc(rest, func(r rune) bool { return r != 'a' }) {
				t.Errorf("%s, in place %v: %v, and %d bytes of %d from %q to %q", name, inPlace, err, len(rest)+1, 2<<20, first,
					rest[max(0, len(rest)-1):])
			}
		}
	}
}
