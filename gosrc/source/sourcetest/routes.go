package sourcetest

// Tests which redirects each client follows and which secrets it sends.

import (
	"bytes"
	"crypto/tls"
	"errors"
	"io"
	"log"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/source/route"
)

// Planted is part of every secret that Routes passes to a client.
const Planted = "planted-s3cr3t"

// A World has servers on this machine that represent other hosts:
//
// pub, pub2, tls, tls2 on the internet; tls with certificates
// net, net2 in a private network
// link link-local, like cloud metadata services
//
// A server responds as its script prescribes, or else with the data.
type World struct {
	CA   string // for tls and tls2
	Data []byte

	hosts map[string]string
	mu    sync.Mutex
	steps map[string]string // from a path such as "pub/a" to a Location
	code  int
	seen  []string
}

var stand = map[string]string{"pub": "127.0.0.1", "tls": "127.0.0.1", "pub2": "127.0.0.5", "tls2": "127.0.0.5", "net": "127.0.0.2", "net2": "127.0.0.3", "link": "127.0.0.4"}

// NewWorld starts the servers. They end with the test.
func NewWorld(t testing.TB) *World {
	t.Helper()
	w := &World{Data: make([]byte, 700_000), hosts: map[string]string{}}
	_, _ = rand.NewChaCha8([32]byte{14}).Read(w.Data)
	w.CA = filepath.Join(t.TempDir(), "ca.pem")
	var all []byte
	for name, ip := range stand {
		l, err := net.Listen("tcp", ip+":0")
		if err != nil {
			t.Skipf("no server at %s: %v", ip, err)
		}
		s := httptest.NewUnstartedServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
			w.answer(name, rw, r)
		}))
		_ = s.Listener.Close()
		s.Listener, s.Config.ErrorLog = l, log.New(io.Discard, "", 0)
		if strings.HasPrefix(name, "tls") {
			cert, key := Certificate(t, t.TempDir(), ip)
			pair, err := tls.LoadX509KeyPair(cert, key)
			if err != nil {
				t.Fatal(err)
			}
			pem, _ := os.ReadFile(cert)
			all = append(all, pem...)
			s.TLS = &tls.Config{Certificates: []tls.Certificate{pair}}
			s.StartTLS()
		} else {
			s.Start()
		}
		t.Cleanup(s.Close)
		w.hosts[name] = l.Addr().String()
	}
	if err := os.WriteFile(w.CA, all, 0o600); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(route.Pretend(func(a netip.Addr) (int, bool) {
		switch a.String() {
		case "127.0.0.1", "127.0.0.5":
			return 0, true
		case "127.0.0.2", "127.0.0.3":
			return 1, true
		case "127.0.0.4":
			return 2, true
		}
		return 0, false
	}))
	return w
}

// URL replaces server names in braces with their hosts.
func (w *World) URL(text string) string {
	for name, host := range w.hosts {
		text = strings.ReplaceAll(text, "{"+name+"}", host)
		_, port, _ := net.SplitHostPort(host)
		text = strings.ReplaceAll(text, "{"+name+":}", port)
	}
	return text
}

// Script sets the responses of the servers and clears Seen. "pub/a" is the path /a on pub, and its value is the
// Location of a redirect. With "@later", it applies only to ranges after the one that opens an object.
func (w *World) Script(code int, steps map[string]string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.steps, w.code, w.seen = map[string]string{}, code, nil
	for at, to := range steps {
		w.steps[at] = w.URL(to)
	}
}

// Seen lists the requested servers and paths, in order and without adjacent repeats. A + marks a request that
// contained a secret of the caller.
func (w *World) Seen() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Compact(slices.Clone(w.seen))
}

func (w *World) answer(name string, rw http.ResponseWriter, r *http.Request) {
	at := name + r.URL.Path
	mark := ""
	for _, values := range r.Header {
		for _, v := range values {
			if strings.Contains(v, Planted) {
				mark = "+"
			}
		}
	}
	if r.Header.Get("Authorization") != "" || r.Header.Get("Cookie") != "" {
		mark = "+"
	}
	if r.Header.Get("Referer") != "" {
		mark += " with a referer"
	}
	if strings.Contains(r.URL.RawQuery, Planted) {
		mark += "?"
	}
	if r.Host != w.hosts[name] && !strings.Contains(r.Host, "ffff") {
		mark += " as " + r.Host
	}
	w.mu.Lock()
	w.seen = append(w.seen, at+mark)
	to, ok := w.steps[at]
	if g := r.Header.Get("Range"); !ok && g != "" && g != "bytes=0-262143" {
		to, ok = w.steps[at+"@later"]
	}
	code := w.code
	w.mu.Unlock()
	if ok {
		rw.Header().Set("Location", to)
		rw.Header().Set("Set-Cookie", "session="+Planted)
		rw.WriteHeader(code)
		return
	}
	rw.Header().Set("ETag", `"e"`)
	http.ServeContent(rw, r, "", time.Time{}, bytes.NewReader(w.Data))
}

type locations = map[string]string

// redirects are the test cases: the redirects that a client encounters, the requests that it may send, and the
// error with which it ends.
var redirects = []struct {
	name, start string
	steps       locations
	seen        string // in order
	refused     error
}{
	{"no redirect", "http://{pub}/a", nil, "pub/a+", nil},
	{"a query is only sent to its server", "http://{pub}/a?sig=" + Planted, locations{"pub/a": "http://{pub2}/b"}, "pub/a+? pub2/b", nil},
	{"user and password are only sent to their server", "http://user:" + Planted + "@{pub}/a", locations{"pub/a": "http://{pub2}/b"}, "pub/a+ pub2/b", nil},
	{"within the origin", "http://{pub}/a", locations{"pub/a": "/b"}, "pub/a+ pub/b+", nil},
	{"only a query", "http://{pub}/a?sig=" + Planted, locations{"pub/a": "b?x=1"}, "pub/a+? pub/b+", nil},
	{"the scheme in upper case", "http://{pub}/a", locations{"pub/a": "HTTP://{pub}/b#part"}, "pub/a+ pub/b+", nil},
	{"another port", "http://{pub}/a", locations{"pub/a": "http://127.0.0.1:{tls:}/b"}, "pub/a+", errs.ErrIO},
	{"the same host, upgraded", "http://{pub}/a", locations{"pub/a": "https://{tls}/b"}, "pub/a+ tls/b", nil},
	{"another host", "http://{pub}/a", locations{"pub/a": "http://{pub2}/b"}, "pub/a+ pub2/b", nil},
	{"another host without a scheme", "http://{pub}/a", locations{"pub/a": "//{pub2}/b"}, "pub/a+ pub2/b", nil},
	{"there and back", "http://{pub}/a", locations{"pub/a": "http://{pub2}/b", "pub2/b": "http://{pub}/c"}, "pub/a+ pub2/b pub/c", nil},
	{"a user in the Location", "http://{pub}/a", locations{"pub/a": "http://u:p@{pub2}/b"}, "pub/a+ pub2/b", nil},
	{"TLS to TLS", "https://{tls}/a", locations{"tls/a": "https://{tls2}/b"}, "tls/a+ tls2/b", nil},
	{"out of TLS", "https://{tls}/a", locations{"tls/a": "http://{pub2}/b"}, "tls/a+", errs.ErrPermission},
	{"into TLS and out", "http://{pub}/a", locations{"pub/a": "https://{tls2}/b", "tls2/b": "http://{pub}/c"}, "pub/a+ tls2/b", errs.ErrPermission},
	{"into a private network", "http://{pub}/a", locations{"pub/a": "http://{net}/b"}, "pub/a+", errs.ErrPermission},
	{"into a private network over another host", "http://{pub}/a", locations{"pub/a": "http://{pub2}/b", "pub2/b": "http://{net}/c"}, "pub/a+ pub2/b", errs.ErrPermission},
	{"IPv4 in IPv6 form", "http://{pub}/a", locations{"pub/a": "http://[::ffff:127.0.0.2]:{net:}/b"}, "pub/a+", errs.ErrPermission},
	{"an address in one number", "http://{pub}/a", locations{"pub/a": "http://2130706434:{net:}/b"}, "pub/a+", errs.ErrIO},
	{"an address in two numbers", "http://{net}/a", locations{"net/a": "http://127.2:{net:}/b"}, "net/a+", errs.ErrIO},
	{"an address in hex", "http://{net}/a", locations{"net/a": "http://0x7f000002:{net:}/b"}, "net/a+", errs.ErrIO},
	{"an address with non-ASCII characters", "http://{net}/a", locations{"net/a": "http://127。0。0。２:{net:}/b"}, "net/a+", errs.ErrIO},
	{"an address with a dot", "http://{net}/a", locations{"net/a": "http://127.0.0.2.:{net:}/b"}, "net/a+", errs.ErrIO},
	{"this machine", "http://{pub}/a", locations{"pub/a": "http://[::1]:{pub:}/b"}, "pub/a+", errs.ErrPermission},
	{"metadata", "http://{pub}/a", locations{"pub/a": "http://{link}/latest"}, "pub/a+", errs.ErrPermission},
	{"metadata, from a private network", "http://{net}/a", locations{"net/a": "http://{link}/latest"}, "net/a+", errs.ErrPermission},
	{"within a private network", "http://{net}/a", locations{"net/a": "http://{net2}/b"}, "net/a+ net2/b", nil},
	{"out of a private network", "http://{net}/a", locations{"net/a": "http://{pub}/b"}, "net/a+ pub/b", nil},
	{"out and back", "http://{net}/a", locations{"net/a": "http://{pub}/b", "pub/b": "http://{net2}/c"}, "net/a+ pub/b net2/c", nil},
	{"a later range", "http://{pub}/a", locations{"pub/a@later": "http://{pub2}/b"}, "pub/a+ pub2/b", nil},
	{"a later range, inwards", "http://{pub}/a", locations{"pub/a@later": "http://{net}/b"}, "pub/a+", errs.ErrPermission},
	{"a file", "http://{pub}/a", locations{"pub/a": "file:///etc/passwd"}, "pub/a+", errs.ErrPermission},
	{"ftp", "http://{pub}/a", locations{"pub/a": "ftp://{pub2}/b"}, "pub/a+", errs.ErrPermission},
	{"s3", "http://{pub}/a", locations{"pub/a": "s3://bucket/key"}, "pub/a+", errs.ErrPermission},
	{"nowhere", "http://{pub}/a", locations{"pub/a": ""}, "pub/a+", errs.ErrIO},
	{"no host", "http://{pub}/a", locations{"pub/a": "http:///b"}, "pub/a+", errs.ErrIO},
	{"no path either", "http://{pub}/a", locations{"pub/a": "http:b"}, "pub/a+", errs.ErrIO},
	{"no URL", "http://{pub}/a", locations{"pub/a": "http://[/" + Planted}, "pub/a+", errs.ErrIO},
	{"five", "http://{pub}/0", locations{"pub/0": "/1", "pub/1": "/2", "pub/2": "/3", "pub/3": "/4", "pub/4": "/5", "pub/6": "/7"}, "pub/0+ pub/1+ pub/2+ pub/3+ pub/4+ pub/5+", nil},
	{"six", "http://{pub}/0", locations{"pub/0": "/1", "pub/1": "/2", "pub/2": "/3", "pub/3": "/4", "pub/4": "/5", "pub/5": "/6"},
		"pub/0+ pub/1+ pub/2+ pub/3+ pub/4+ pub/5+", errs.ErrIO},
}

// Routes runs an HTTP client through the table of redirects. read opens a URL with these options and returns
// all its bytes, read in several requests.
func Routes(t *testing.T, read func(uri string, opt source.Options) ([]byte, error)) {
	w := NewWorld(t)
	given := map[string]string{"header.Authorization": "Bearer " + Planted, "header.X-Key": Planted, "header.Cookie": "id=" + Planted,
		"header.User-Agent": Planted, "cacert": w.CA, "retries": "0"}
	for _, c := range redirects {
		for _, code := range []int{301, 302, 303, 307, 308} {
			w.Script(code, c.steps)
			opt := source.Options{Storage: given}
			if strings.Contains(c.start, "@") {
				opt.Storage = map[string]string{"retries": "0"}
			}
			got, err := read(w.URL(c.start), opt)
			seen := unique(w.Seen())
			switch {
			case seen != c.seen:
				t.Errorf("%s, %d: asked %q, want %q: %v", c.name, code, seen, c.seen, err)
			case c.refused == nil && (err != nil || !bytes.Equal(got, w.Data)):
				t.Errorf("%s, %d: %v, or wrong bytes", c.name, code, err)
			case c.refused != nil && !errors.Is(err, c.refused):
				t.Errorf("%s, %d: %v, want %v", c.name, code, err, c.refused)
			case err != nil && strings.Contains(err.Error()+errs.Text(err), Planted):
				t.Errorf("%s, %d: %v shows a secret", c.name, code, err)
			}
			if c.name == "five" || c.name == "six" { // run long chains only once
				break
			}
		}
	}
	for _, code := range []int{300, 304, 305, 306} {
		w.Script(code, locations{"pub/a": "http://{pub2}/b"})
		if _, err := read(w.URL("http://{pub}/a"), source.Options{Storage: given}); err == nil || unique(w.Seen()) != "pub/a+" {
			t.Errorf("%d: %v after %v", code, err, w.Seen())
		}
	}
}

// unique returns Seen without repeats, because retries and later ranges request a path again.
func unique(seen []string) string {
	var out []string
	for _, s := range seen {
		if !slices.Contains(out, s) {
			out = append(out, s)
		}
	}
	return strings.Join(out, " ")
}
