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

func TestForeignBytes(t *testing.T) {
	// Only UTF-8 names are sent to a store. A local file may have any name.
	for _, uri := range []string{"http://127.0.0.1:1/caf\xe9", "s3://b/\xff", "redis://127.0.0.1:1/\xc3", "hf://a/b/\x80"} {
		if _, err := With(source.Options{}).Open(context.Background(), uri); !errors.Is(err, errs.ErrArgument) {
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
		s, err := With(source.Options{}).Open(context.Background(), uri)
		if err != nil {
			t.Fatal(err)
		}
		_ = s.Close()
	}
}
