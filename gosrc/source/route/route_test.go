package route

import (
	"crypto/x509"
	"errors"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/overwire/overwire/gosrc/errs"
)

// No redirect leads into a more private network, in whatever form an IPv4 address is written.
func TestInward(t *testing.T) {
	const out = "93.184.216.34"
	for _, c := range []struct {
		from, to string
		ok       bool
	}{
		{out, "1.1.1.1", true}, {out, "127.0.0.1", false}, {out, "127.8.8.8", false}, {out, "10.0.0.1", false},
		{out, "172.16.0.1", false},
		{out, "172.15.0.1", true}, {out, "192.168.1.1", false}, {out, "100.64.0.1", false}, {out, "100.128.0.1", true},
		{out, "0.0.0.0", false},
		{out, "0.1.2.3", false}, {out, "169.254.169.254", false}, {out, "192.0.0.192", false},
		{out, "255.255.255.255", false}, {out, "224.0.0.1", false},
		{out, "168.63.129.16", false}, {out, "::ffff:192.168.1.1", false}, {out, "::ffff:8.8.8.8", true},
		{out, "fd00::1", false}, {out, "fec0::1", false},
		{out, "fe80::1%eth0", false}, {out, "::", false}, {"2606::1", "::1", false}, {"2606::1", "2606::2", true},
		{out, "64:ff9b::8.8.8.8", true}, {out, "64:ff9b::10.0.0.1", false}, {out, "64:ff9b::169.254.169.254", false},
		{out, "64:ff9b::127.0.0.1", false},
		{out, "64:ff9b:1::8.8.8.8", false}, {out, "64:ff9b:1:a00:0:100::", false},
		{"10.0.0.1", "64:ff9b:1::10.0.0.1", true},
		{"10.0.0.1", "64:ff9b:1::a9fe:a9fe", false}, {"10.0.0.1", "64:ff9b:1:a9fe:a9:fe00::", false},
		{out, "2002:0a00:0001::1", false}, {out, "2002:0808:0808::1", true}, {out, "2002:a9fe:a9fe::", false},
		{out, "2001:0:0a00:1::", false}, {out, "2001:0:808:808:0:0:f5ff:fffe", false},
		{out, "2001:0:808:808:0:0:f7f7:f7f7", true},
		{out, "::10.0.0.1", false}, {out, "::8.8.8.8", true}, {out, "::ffff:0:10.0.0.1", false},
		{out, "2606::5efe:10.0.0.1", false},
		{out, "2606::200:5efe:8.8.8.8", true},
		{"10.0.0.1", "127.0.0.1", true}, {"10.0.0.1", "192.168.0.1", true}, {"10.0.0.1", "169.254.169.254", false},
		{"127.0.0.1", "fe80::1", false},
		{"127.0.0.1", "8.8.8.8", true}, {"10.0.0.1", "fd00:ec2::254", false}, {"10.0.0.1", "100.100.100.200", false},
		{"169.254.169.254", "10.0.0.1", true},
		// An internet server behind an address translator does not belong to this network.
		{"64:ff9b:1::8.8.8.8", "10.0.0.1", false}, {"64:ff9b::10.0.0.1", "10.0.0.1", false},
		{"2002:0a00:0001::1", "127.0.0.1", false},
		{"64:ff9b:1::8.8.8.8", "64:ff9b:1::8.8.8.8", true}, {"::ffff:10.0.0.1", "10.0.0.2", true},
	} {
		err := refuseInward(netip.MustParseAddr(c.from), netip.MustParseAddr(c.to))
		if (err == nil) != c.ok || err != nil && !errors.Is(err, errs.ErrPermission) {
			t.Errorf("%s to %s: %v", c.from, c.to, err)
		}
	}
	if refuseInward(netip.Addr{}, netip.MustParseAddr("10.0.0.1")) == nil {
		t.Error("permitted a redirect from an unknown address into a private network")
	}
	for host, want := range map[string]bool{"localhost": true, "LOCALHOST.": true, "x.localhost": true,
		"10.0.0.1": true, "::1": true,
		"8.8.8.8": false, "example.com": false, "64:ff9b:1::8.8.8.8": false, "": false} {
		if Inside(host) != want {
			t.Errorf("Inside(%q) = %v", host, !want)
		}
	}
}

// An origin is scheme, host and port, however they are written.
func TestOrigin(t *testing.T) {
	same := [][2]string{{"http://h/a", "HTTP://H:80/b"}, {"https://h", "https://h:443"}, {"http://u:p@h/", "http://h/"},
		{"http://[::1]/", "http://[::1]:80/"}}
	other := [][2]string{{"http://h", "https://h"}, {"http://h", "http://h:81"}, {"http://h", "http://h."},
		{"http://h", "http://x.h"},
		{"http://h:80", "https://h:80"}, {"http://h@e/", "http://h/"}}
	origin := func(s string) string {
		u, err := url.Parse(s)
		if err != nil {
			t.Fatal(err)
		}
		return Origin(u)
	}
	for _, p := range same {
		if origin(p[0]) != origin(p[1]) {
			t.Errorf("%s and %s have different origins", p[0], p[1])
		}
	}
	for _, p := range other {
		if origin(p[0]) == origin(p[1]) {
			t.Errorf("%s and %s have the same origin", p[0], p[1])
		}
	}
}

// Any Location gives an HTTP URL without a user, or an error that does not contain the server's text.
func FuzzNext(f *testing.F) {
	for _, s := range []string{"/a", "//h/b", "http://u:p@h/b#c", "HTTPS://H", "file:///x", "http:x", "?q", "", "\x00",
		"http://h\\@e/", "http://[::1%25eth0]/", "javascript:x"} {
		f.Add(s, true)
	}
	f.Fuzz(func(t *testing.T, location string, secure bool) {
		scheme := map[bool]string{true: "https", false: "http"}[secure]
		start := Start(&url.URL{Scheme: scheme, Host: "origin.example", User: url.UserPassword("u", "p"), Path: "/x"})
		h, err := start.Next(location)
		if err != nil {
			if len(location) > 20 && strings.Contains(err.Error(), location) {
				t.Errorf("%v", err)
			}
			return
		}
		home := h.URL.Scheme == scheme && strings.EqualFold(h.URL.Hostname(), "origin.example") &&
			Origin(h.URL) == Origin(start.URL)
		if h.URL.User != nil || h.URL.Scheme != "https" && (secure || h.URL.Scheme != "http") ||
			h.URL.Hostname() == "" || h.Home != home {
			t.Errorf("%q leads to %v, home %v", location, h.URL, h.Home)
		}
		if back, err := h.Next(scheme + "://origin.example/"); err == nil && !h.Home && back.Home {
			t.Errorf("credentials are sent after a redirect to %q and back", location)
		}
	})
}

// Certificate authorities come from a file or a folder. The error names an unreadable path.
func TestAuthorities(t *testing.T) {
	dir := t.TempDir()
	empty := filepath.Join(dir, "empty")
	if err := os.WriteFile(empty, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		file, path string
		class      error
	}{{"", "", nil}, {"/none.pem", "", errs.ErrNotFound}, {"", "/none", errs.ErrNotFound},
		{empty, "", errs.ErrArgument}, {dir, "", errs.ErrArgument}, {"", dir, errs.ErrArgument}} {
		_, err := Named(c.file, c.path, nil).Roots()
		if !errors.Is(err, c.class) || c.class == nil && err != nil ||
			err != nil && !strings.Contains(err.Error(), max(c.file, c.path)) {
			t.Errorf("%q %q: %v", c.file, c.path, err)
		}
	}
}

// Authorities are read before the first request that needs TLS, to the server or to a proxy. If they cannot be read, an
// https request fails, and no proxy is trusted.
func TestAuthoritiesAreReadForTLS(t *testing.T) {
	for _, c := range []struct {
		proxy, to           string
		isRead, isUntrusted bool
	}{{"", "http://far.example/x", false, false}, {"http://near:1", "http://far.example/x", false, false},
		{"https://near:1", "http://far.example/x", true, false}, {"", "https://far.example/x", true, true},
		{"http://not valid", "http://far.example/x", false, false}} {
		to, err := url.Parse(c.to)
		if err != nil {
			t.Fatal(err)
		}
		client := New(Settings{Env: map[string]string{"http_proxy": c.proxy}, Trust: Trust{Files: []string{"/none.pem"}}})
		for range 2 {
			err = client.prepareTLS(&http.Request{URL: to})
			roots := client.TLSClientConfig.RootCAs
			if errors.Is(err, errs.ErrNotFound) != c.isUntrusted || err != nil && !c.isUntrusted ||
				(roots != nil) != c.isRead || roots != nil && !roots.Equal(x509.NewCertPool()) {
				t.Errorf("%+v: %v, %v", c, err, roots)
			}
		}
	}
}

// Each request uses the right proxy. A proxy with an invalid URL is not bypassed, and its password is not
// shown. Names in NO_PROXY, this machine, and the other scheme do not use the proxy.
func TestProxies(t *testing.T) {
	const wrong = "not valid"
	for _, c := range []struct{ http, https, none, to, want string }{
		{"", "", "", "http://far.example/x", ""},
		{"http://u:secret@near:3128", "", "", "http://far.example/x", "http://u:secret@near:3128"},
		{"near:3128", "", "", "http://far.example/x", "http://near:3128"},
		{"near", "", "", "https://far.example/x", ""},
		{"http://u:secret@[bad", "", "", "http://far.example/x", wrong},
		{"http://u:secret%zz@near", "", "", "http://far.example/x", wrong},
		{"http://u:secret@near:port", "", "", "http://far.example/x", wrong},
		{"\x00secret", "", "", "http://far.example/x", wrong},
		{"http://u:secret@[bad", "http://near:1", "", "https://far.example/x", "http://near:1"},
		{"http://near:1", "http://u:secret@[bad", "", "https://far.example/x", wrong},
		{"http://u:secret@[bad", "", "far.example", "http://far.example/x", ""},
		{"http://u:secret@[bad", "", "", "http://127.0.0.1/x", ""},
	} {
		to, err := url.Parse(c.to)
		if err != nil {
			t.Fatal(err)
		}
		got, err := proxiesOf(map[string]string{"HTTP_PROXY": c.http, "https_proxy": c.https, "NO_PROXY": c.none})(
			&http.Request{URL: to})
		switch {
		case c.want == wrong:
			if !errors.Is(err, errs.ErrArgument) || !strings.Contains(err.Error(), wrong) ||
				strings.Contains(err.Error(), "secret") {
				t.Errorf("%+v: %v, %v", c, got, err)
			}
		case err != nil || got == nil && c.want != "" || got != nil && got.String() != c.want:
			t.Errorf("%+v: %v, %v", c, got, err)
		}
	}
}

// A content encoding is found in any line and position of its header, in any case. Labels that do not change
// the bytes are ignored.
func TestEncoding(t *testing.T) {
	for _, c := range []struct {
		lines []string
		want  string
	}{
		{nil, ""}, {[]string{""}, ""}, {[]string{"identity"}, ""}, {[]string{"aws-chunked"}, ""},
		{[]string{"AWS-Chunked,"}, ""},
		{[]string{" Identity , aws-chunked"}, ""}, {[]string{"aws-chunked", "identity"}, ""},
		{[]string{"gzip"}, "gzip"}, {[]string{"aws-chunked,GZIP"}, "GZIP"}, {[]string{"aws-chunked", "zstd"}, "zstd"},
		{[]string{"x\x1b[31m" + strings.Repeat("y", 99)}, "x[31m" + strings.Repeat("y", 34)},
	} {
		if got := Encoding(http.Header{"Content-Encoding": c.lines}); got != c.want {
			t.Errorf("%q: %q", c.lines, got)
		}
	}
}

// The wait comes from Retry-After, or from the end of a RateLimit window without remaining requests. An
// unreadable value means no wait, and the wait is at most an hour.
func TestWaitAsked(t *testing.T) {
	for _, c := range []struct {
		header http.Header
		want   time.Duration
	}{
		{nil, 0},
		{http.Header{"Retry-After": {"25"}}, 25 * time.Second},
		{http.Header{"Retry-After": {"-1"}}, 0},
		{http.Header{"Retry-After": {"99999999"}}, time.Hour},
		{http.Header{"Retry-After": {"Mon, 02 Jan 2006 15:04:05 GMT"}}, 0},
		{http.Header{"Ratelimit": {`"resolvers";r=0;t=25`}}, 25 * time.Second},
		{http.Header{"Ratelimit": {`"resolvers"; r=0; t=25`}, "Retry-After": {"3"}}, 3 * time.Second},
		{http.Header{"Ratelimit": {`"a";r=5;t=250, "b";r=0;t=7`, `"c";r=0;t=9`}}, 9 * time.Second},
		{http.Header{"Ratelimit": {`"resolvers";r=12;t=25`}}, 0},
		{http.Header{"Ratelimit": {`"resolvers";r=0;t=-25`}}, 0},
		{http.Header{"Ratelimit": {`"resolvers";r=0`}}, 0},
		{http.Header{"Ratelimit": {`";,=;r=0;t=99999999999999999999`}}, 0},
	} {
		if got := WaitAsked(c.header); got != c.want {
			t.Errorf("%v: %v, want %v", c.header, got, c.want)
		}
	}
}
