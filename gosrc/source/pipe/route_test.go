package pipe

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

// curl follows redirects to https, and redirects to http only between addresses of private networks. It never
// sends user and password to the new location.
func TestRedirects(t *testing.T) {
	program := curl(t)
	w := sourcetest.NewWorld(t)
	type steps = map[string]string
	for _, c := range []struct {
		start string
		steps steps
		seen  string
		ok    bool
	}{
		{"http://{pub}/a", nil, "pub/a", true},
		{"http://user:" + sourcetest.Planted + "@{pub}/a", steps{"pub/a": "https://{tls2}/b"}, "pub/a+ tls2/b", true},
		{"https://{tls}/a?" + sourcetest.Planted, steps{"tls/a": "https://{tls2}/b"}, "tls/a? tls2/b", true},
		{"https://{tls}/a", steps{"tls/a": "http://{tls}/b"}, "tls/a", false},
		{"http://{pub}/a", steps{"pub/a": "http://{net}/b"}, "pub/a", false},
		{"http://{pub}/a", steps{"pub/a": "http://{link}/b"}, "pub/a", false},
		{"http://{pub}/a", steps{"pub/a": "http://[::ffff:127.0.0.2]:{net:}/b"}, "pub/a", false},
		{"http://{pub}/a", steps{"pub/a": "https://{tls2}/b", "tls2/b": "http://{net}/c"}, "pub/a tls2/b", false},
		{"http://{pub}/a", steps{"pub/a": "file:///etc/passwd"}, "pub/a", false},
		{"http://{net}/a", steps{"net/a": "http://{net2}/b"}, "net/a net2/b", true},
	} {
		w.Script(302, c.steps)
		got, err := func() ([]byte, error) {
			s, err := Open(context.Background(), program, w.URL(c.start),
				source.Options{Env: map[string]string{"CURL_CA_BUNDLE": w.CA}})
			if err != nil {
				return nil, err
			}
			defer s.Close()
			p := make([]byte, s.Size())
			return p, s.ReadAt(context.Background(), p, 0)
		}()
		if seen := strings.Join(w.Seen(), " "); seen != c.seen {
			t.Errorf("%s: asked %q, want %q", c.start, seen, c.seen)
		}
		switch {
		case c.ok && (err != nil || !bytes.Equal(got, w.Data)):
			t.Errorf("%s: %v, or wrong bytes", c.start, err)
		case !c.ok && (!errors.Is(err, errs.ErrIO) || strings.Contains(err.Error(), sourcetest.Planted)):
			t.Errorf("%s: %v", c.start, err)
		}
	}
}
