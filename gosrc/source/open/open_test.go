package open

import (
	"bytes"
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/source/sourcetest"
)

// Every URI is opened under the common redirect policy, with and without a cache.
func TestRoutes(t *testing.T) {
	for _, cached := range []bool{false, true} {
		sourcetest.Routes(t, func(uri string, opt source.Options) ([]byte, error) {
			if cached {
				opt.Storage["cache"] = t.TempDir()
				defer delete(opt.Storage, "cache")
			}
			s, err := With(opt).Open(context.Background(), uri)
			if err != nil {
				return nil, err
			}
			defer s.Close()
			p := make([]byte, s.Size())
			return p, errors.Join(s.ReadAt(context.Background(), p[262_144:], 262_144),
				s.ReadAt(context.Background(), p[:262_144], 0))
		})
	}
}

// A redirect never opens another store or a local file, even if its scheme is supported.
func TestSchemes(t *testing.T) {
	w := sourcetest.NewWorld(t)
	for scheme := range schemes {
		w.Script(302, map[string]string{"pub/a": scheme + "://{pub}/b"})
		s, err := With(source.Options{}).Open(context.Background(), w.URL("http://{pub}/a"))
		if scheme == "http" {
			if err != nil {
				t.Error(err)
				continue
			}
			p := make([]byte, 10)
			if err := s.ReadAt(context.Background(), p, 0); err != nil || !bytes.Equal(p, w.Data[:10]) {
				t.Error(err)
			}
			s.Close()
		} else if err == nil {
			t.Errorf("%s: opened after a redirect", scheme)
			s.Close()
		}
	}
}

// An unknown scheme gives an error that lists the known schemes.
func TestUnknownScheme(t *testing.T) {
	_, err := With(source.Options{}).Open(context.Background(), "ftp://host/model.safetensors")
	if !errors.Is(err, errs.ErrNotSupported) || !strings.Contains(err.Error(), "file, hf, http, https") {
		t.Error(err)
	}
}

// The scheme of a store that must be accessed through another scheme is refused for reading and writing, and
// the error says what to write instead.
func TestRecipes(t *testing.T) {
	for uri, says := range map[string]string{
		"gs://bucket/m.safetensors": "https://storage.googleapis.com", "GCS://bucket/m.safetensors": "HMAC",
		"az://container/m.safetensors": "blob.core.windows.net", "abfss://c@account/m.safetensors": "shared access signature",
	} {
		_, err := With(source.Options{}).Open(context.Background(), uri)
		_, writeErr := Create(context.Background(), uri, source.Options{}, 1)
		for _, err := range []error{err, writeErr} {
			if !errors.Is(err, errs.ErrNotSupported) || !strings.Contains(err.Error(), says) {
				t.Errorf("%s: %v", uri, err)
			}
		}
	}
}
