package http

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/source/sourcetest"
)

// With every kind of redirect, only the permitted servers are reached, and only with the permitted secrets.
func TestRoutes(t *testing.T) {
	sourcetest.Routes(t, func(uri string, opt source.Options) ([]byte, error) {
		s, err := new(Hub).Open(context.Background(), uri, opt)
		if err != nil {
			return nil, err
		}
		defer s.Close()
		p := make([]byte, s.Size())
		if err := s.ReadAt(context.Background(), p[:1000], 0); err != nil {
			return nil, err
		}
		return p, errors.Join(s.ReadAt(context.Background(), p[:source.HeadBytes], 0),
			s.ReadAt(context.Background(), p[source.HeadBytes:], source.HeadBytes))
	})
	isSettled(t)
}

// After a first request that was redirected within a private network, reads go directly to the redirect's
// target, even over several new parallel connections.
func TestRedirectedRanges(t *testing.T) {
	w := sourcetest.NewWorld(t)
	for _, from := range []string{"net", "pub"} {
		to := from + "2"
		w.Script(302, map[string]string{from + "/a": "http://{" + to + "}/b"})
		s := opened(t, w.URL("http://{"+from+"}/a"), nil)
		for range 3 {
			failures := make(chan error)
			for i := range 6 {
				go func() {
					p := make([]byte, 70_000)
					off := int64(270_000 + 70_000*i)
					err := s.ReadAt(context.Background(), p, off)
					if err == nil && !bytes.Equal(p, w.Data[off:off+70_000]) {
						err = errors.New("wrong bytes")
					}
					failures <- err
				}()
			}
			for range 6 {
				if err := <-failures; err != nil {
					t.Error(err)
				}
			}
			s.o.client.transport.CloseIdleConnections()
		}
		for _, at := range w.Seen()[1:] {
			if at != to+"/b" {
				t.Errorf("asked %s again", at)
			}
		}
	}
}

// An idle connection of one object is not reused for another object that may not reach the connection's
// address.
func TestIdleConnections(t *testing.T) {
	w := sourcetest.NewWorld(t)
	w.Script(302, map[string]string{"net/a": "http://{net2}/b", "pub/a": "http://{net2}/b"})
	near := opened(t, w.URL("http://{net}/a"), nil)
	if err := near.ReadAt(context.Background(), make([]byte, 1000), 500_000); err != nil {
		t.Fatal(err)
	}
	w.Script(302, map[string]string{"net/a": "http://{net2}/b", "pub/a": "http://{net2}/b"})
	_, err := new(Hub).Open(context.Background(), w.URL("http://{pub}/a"), source.Options{})
	if !errors.Is(err, errs.ErrPermission) || strings.Join(w.Seen(), " ") != "pub/a" {
		t.Errorf("%v after %v", err, w.Seen())
	}
	if err := near.ReadAt(context.Background(), make([]byte, 1000), 600_000); err != nil {
		t.Errorf("the other object: %v", err)
	}
}

// If a name resolves to an address in a more private network than before, the request is refused, even for the
// server that the caller named, because the route began on the internet.
func TestRebinding(t *testing.T) {
	w := sourcetest.NewWorld(t)
	pub, inside := w.URL("{pub}"), w.URL("{net}")
	opt := source.Options{Storage: map[string]string{"retries": "0", "token": sourcetest.Planted}}
	c, err := holdClient(opt)
	if err != nil {
		t.Fatal(err)
	}
	defer c.dropClient()
	var turned atomic.Bool
	dial := c.transport.DialContext
	c.transport.DialContext = func(ctx context.Context, network, address string) (net.Conn, error) {
		if strings.HasPrefix(address, "rebound.example:") { // as a name server would resolve it
			address = pub
			if turned.Load() {
				address = inside
			}
		}
		return dial(ctx, network, address)
	}
	w.Script(302, nil)
	s := opened(t, "http://rebound.example/a", opt.Storage)
	turned.Store(true)
	c.transport.CloseIdleConnections()
	err = s.ReadAt(context.Background(), make([]byte, 1000), 500_000)
	if !errors.Is(err, errs.ErrPermission) {
		t.Errorf("%v", err)
	}
	for _, at := range w.Seen() {
		if strings.HasPrefix(at, "net") {
			t.Errorf("%s was asked", at)
		}
	}
	// The same holds for a redirect to a name.
	turned.Store(true)
	w.Script(302, map[string]string{"pub2/a": "http://rebound.example/b"})
	if _, err := new(Hub).Open(context.Background(), w.URL("http://{pub2}/a"), opt); !errors.Is(err,
		errs.ErrPermission) {
		t.Errorf("%v after %v", err, w.Seen())
	}
}

// The address to which a proxy connects is unknown, unless the URL contains it.
func TestProxiedRedirects(t *testing.T) {
	w := sourcetest.NewWorld(t)
	env := map[string]string{"HTTP_PROXY": w.URL("http://proxy:" + sourcetest.Planted + "@{net}")}
	for location, ok := range map[string]bool{
		"http://198.51.100.7/b": true, "http://other.example/b": true, "http://10.0.0.1/b": false,
		"http://[fd00::1]/b":       false,
		"http://169.254.169.254/b": false, "http://[::ffff:10.0.0.1]/b": false, "http://[64:ff9b::a00:1]/b": false,
		"http://10.1/b": false, "http://0xa000001/b": false, "http://167772161/b": false, "http://10。0。0。1/b": false,
		"http://LOCALHOST./b": false, "http://x.localhost:80/b": false,
	} {
		w.Script(302, map[string]string{"net/a": location})
		s, err := new(Hub).Open(context.Background(), "http://weights.example/a",
			source.Options{Env: env, Storage: map[string]string{"retries": "0"}})
		if ok != (err == nil) || !ok && !errors.Is(err, errs.ErrPermission) &&
			!strings.Contains(err.Error(), "valid Location") {
			t.Errorf("%s: %v", location, err)
		}
		if seen := strings.Join(w.Seen(), " "); !ok && strings.Contains(seen, "/b") {
			t.Errorf("%s: the proxy was asked: %s", location, seen)
		}
		if err == nil {
			s.Close()
		} else if strings.Contains(err.Error(), sourcetest.Planted) {
			t.Errorf("%v shows a secret", err)
		}
	}
	// These redirects are within a private network, as their URLs show. The second one leads from a server
	// behind a proxy to one without.
	w.Script(302, map[string]string{"net/a": "http://10.0.0.2/b"})
	if s, err := new(Hub).Open(context.Background(), "http://10.0.0.1/a", source.Options{Env: env}); err != nil {
		t.Error(err)
	} else {
		s.Close()
	}
	env["NO_PROXY"] = "127.0.0.0/8"
	w.Script(302, map[string]string{"net/a": "http://{net2}/b"})
	if _, err := new(Hub).Open(context.Background(), "http://weights.example/a",
		source.Options{Env: env}); !errors.Is(err, errs.ErrPermission) {
		t.Errorf("%v after %v", err, w.Seen())
	}
}

// Up to 5 redirects are followed. The caller's headers go only to the first server. An expired signed URL is
// requested again.
func TestRedirects(t *testing.T) {
	data := random(1 << 20)
	var leaked, expired, signed atomic.Int64
	store := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") != "" || r.Header.Get("X-Key") != "" {
			leaked.Add(1)
		}
		if r.URL.Query().Get("n") != fmt.Sprint(signed.Load()) {
			expired.Add(1)
			w.WriteHeader(403)
			return
		}
		w.Header().Set("ETag", `"e"`)
		http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(data))
	}))
	defer store.Close()
	var asked atomic.Int64
	hub := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") != "Bearer "+secret || r.Header.Get("X-Key") != secret {
			w.WriteHeader(401)
			return
		}
		asked.Add(1)
		var hops int
		fmt.Sscan(strings.TrimPrefix(r.URL.Path, "/"), &hops)
		if hops > 1 {
			http.Redirect(w, r, fmt.Sprintf("/%d", hops-1), http.StatusFound)
			return
		}
		http.Redirect(w, r, fmt.Sprintf("%s/blob?n=%d", store.URL, signed.Load()), http.StatusFound)
	}))
	defer hub.Close()
	storage := map[string]string{"token": secret, "header.X-Key": secret}
	src := opened(t, hub.URL+"/5", storage)
	p := make([]byte, 300_000)
	for range 3 {
		if err := src.ReadAt(context.Background(), p, 400_000); err != nil || !bytes.Equal(p, data[400_000:700_000]) {
			t.Fatal(err)
		}
	}
	if asked.Load() != 5 {
		t.Errorf("the first server was asked %d times", asked.Load())
	}
	signed.Add(1)
	if err := src.ReadAt(context.Background(), p, 400_000); err != nil || expired.Load() != 1 {
		t.Errorf("%v after %d responses with status 403", err, expired.Load())
	}
	if leaked.Load() != 0 {
		t.Error("credentials were sent to another server")
	}
	if _, err := new(Hub).Open(context.Background(), hub.URL+"/6", source.Options{Storage: storage}); err == nil {
		t.Error("no error after 6 redirects")
	}
}
