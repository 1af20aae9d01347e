package open

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/source"
)

func TestFilePath(t *testing.T) {
	// Promise: a file:// URI names the very bytes that its escapes stand for; one that
	// readers take for different files is refused.
	for uri, want := range map[string]string{
		"file:///a/b": "/a/b", "FILE:///a%20b": "/a b", "file://localhost/x": "/x", "file:///caf%E9": "/caf\xe9", "file:///%E2%82": "/\xe2\x82",
		"file:///caf\xe9": "/caf\xe9", "file:///caf%EF%BF%BD": "/caf\ufffd", "file:///a%3Fb%23c%25": "/a?b#c%", "file:///a%0Ab": "/a\nb", "file:///a+b;c": "/a+b;c",
	} {
		if got, err := FilePath(uri); err != nil || got != want {
			t.Errorf("%q: %q, %v", uri, got, err)
		}
	}
	for _, uri := range []string{"file:///a?b", "file:///a#b", "file:///a?", "file:///a#", "file://host/x", "file://", "file:///a%00b", "file:///%zz", "file:///a%2"} {
		if got, err := FilePath(uri); !errors.Is(err, errs.ErrArgument) {
			t.Errorf("%q: %q, %v", uri, got, err)
		}
	}
}

func TestForeignBytes(t *testing.T) {
	// Promise: a store is asked for names in UTF-8 only; a local file for any.
	for _, uri := range []string{"http://127.0.0.1:1/caf\xe9", "s3://b/\xff", "redis://127.0.0.1:1/\xc3", "hf://a/b/\x80"} {
		if _, err := Source(context.Background(), uri); !errors.Is(err, errs.ErrArgument) {
			t.Errorf("%q: %v", uri, err)
		}
		if _, err := Presign(context.Background(), uri, source.Options{}, 1); !errors.Is(err, errs.ErrArgument) {
			t.Errorf("%q: %v", uri, err)
		}
		if Writable(uri) {
			if _, err := Create(context.Background(), uri, source.Options{}, 1); !errors.Is(err, errs.ErrArgument) {
				t.Errorf("%q: %v", uri, err)
			}
		}
	}
	path := filepath.Join(t.TempDir(), "caf\xe9")
	if err := os.WriteFile(path, []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, uri := range []string{path, "file://" + path} {
		s, err := Source(context.Background(), uri)
		if err != nil {
			t.Fatal(err)
		}
		_ = s.Close()
	}
}
