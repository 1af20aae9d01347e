package http

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/net/http/httpproxy"

	"github.com/overwire/overwire/gosrc/fault"
	"github.com/overwire/overwire/gosrc/source"
)

// A client is the connections of all sources that were opened with the same
// options: the shards of a model share them.
type client struct {
	key       string
	refs      int
	transport *http.Transport
}

var (
	clientsMu sync.Mutex
	clients   = map[string]*client{}
)

// hold finds the client of these options, or makes one.
func hold(opt source.Options) (*client, error) {
	key := opt.Key() + "\x00" + source.Options{Storage: opt.Env}.Key()
	clientsMu.Lock()
	defer clientsMu.Unlock()
	if c := clients[key]; c != nil {
		c.refs++
		return c, nil
	}
	t, err := transport(opt)
	if err != nil {
		return nil, err
	}
	c := &client{key: key, refs: 1, transport: t}
	clients[key] = c
	return c, nil
}

// drop closes the connections after the last source.
func (c *client) drop() {
	clientsMu.Lock()
	defer clientsMu.Unlock()
	if c.refs--; c.refs == 0 {
		delete(clients, c.key)
		c.transport.CloseIdleConnections()
	}
}

func transport(opt source.Options) (*http.Transport, error) {
	secure, err := tlsConfig(opt)
	if err != nil {
		return nil, err
	}
	dialer := &net.Dialer{Timeout: 10 * time.Second, KeepAlive: 15 * time.Second, ControlContext: allowed}
	return &http.Transport{
		Proxy:           proxies(opt.Env),
		DialContext:     dialer.DialContext,
		TLSClientConfig: secure,
		// HTTP/2 puts all ranges on one connection, through a flow control and a
		// buffer of its own; one connection a range reads straight into the
		// caller's memory.
		TLSNextProto:           map[string]func(string, *tls.Conn) http.RoundTripper{},
		TLSHandshakeTimeout:    15 * time.Second,
		DisableCompression:     true,
		MaxIdleConnsPerHost:    1024,
		IdleConnTimeout:        30 * time.Second,
		MaxResponseHeaderBytes: 256 << 10,
	}, nil
}

// proxies reads the variables as curl does: lower case wins, ALL_PROXY serves
// both schemes.
func proxies(env map[string]string) func(*http.Request) (*url.URL, error) {
	get := func(name string) string {
		if v, ok := env[strings.ToLower(name)]; ok {
			return v
		}
		return env[name]
	}
	all := get("ALL_PROXY")
	or := func(a, b string) string {
		if a != "" {
			return a
		}
		return b
	}
	c := httpproxy.Config{HTTPProxy: or(get("HTTP_PROXY"), all), HTTPSProxy: or(get("HTTPS_PROXY"), all), NoProxy: get("NO_PROXY")}
	find := c.ProxyFunc()
	return func(r *http.Request) (*url.URL, error) {
		u, err := find(r.URL)
		if err != nil { // its text has the proxy's URL, perhaps with a password
			return nil, fault.New(fault.ErrArgument, "the proxy's URL in the environment is not valid")
		}
		return u, nil
	}
}

// tlsConfig trusts the system's authorities, or only those that the caller, or
// else the environment, names.
func tlsConfig(opt source.Options) (*tls.Config, error) {
	insecure, err := opt.Flag("insecure")
	if err != nil {
		return nil, err
	}
	c := &tls.Config{MinVersion: tls.VersionTLS12, InsecureSkipVerify: insecure}
	file, dir := opt.Storage["cacert"], opt.Storage["capath"]
	if file == "" && dir == "" {
		for _, name := range []string{"SSL_CERT_FILE", "CURL_CA_BUNDLE", "REQUESTS_CA_BUNDLE"} {
			if v := opt.Env[name]; v != "" && file == "" {
				file = v
			}
		}
		dir = opt.Env["SSL_CERT_DIR"]
	}
	if file == "" && dir == "" {
		return c, nil
	}
	var files []string
	if file != "" {
		if st, err := os.Stat(file); err == nil && st.IsDir() { // REQUESTS_CA_BUNDLE may be one
			dir = strings.Trim(dir+":"+file, ":")
		} else {
			files = append(files, file)
		}
	}
	for _, d := range filepath.SplitList(dir) {
		entries, err := os.ReadDir(d)
		if err != nil {
			return nil, fault.FromOS(err)
		}
		for _, e := range entries {
			if path := filepath.Join(d, e.Name()); !e.IsDir() {
				files = append(files, path)
			}
		}
	}
	c.RootCAs = x509.NewCertPool()
	found := false
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			return nil, fault.FromOS(err)
		}
		found = c.RootCAs.AppendCertsFromPEM(b) || found
	}
	if !found {
		return nil, fault.New(fault.ErrArgument, "no certificate in %s", strings.Join(slices.DeleteFunc([]string{file, dir}, func(s string) bool { return s == "" }), ", "))
	}
	return c, nil
}

// A route is what the dialer knows of the request that it dials for: how near
// the server was that the user named, and whether this is another one, to
// which that server has sent us.
type route struct {
	mu         sync.Mutex
	redirected bool
	origin     netip.Addr
}

type routeKey struct{}

// allowed refuses to connect to where a redirect may not lead.
func allowed(ctx context.Context, _, address string, _ syscall.RawConn) error {
	r, _ := ctx.Value(routeKey{}).(*route)
	if r == nil {
		return nil
	}
	at, err := netip.ParseAddrPort(address)
	if err != nil {
		return nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.redirected {
		return nil
	}
	return inward(r.origin, at.Addr())
}

// inward refuses the way from a server further out to one further in: from the
// internet to this network or machine, from anywhere to the link (where clouds
// keep their credentials).
func inward(from, to netip.Addr) error {
	depth := func(a netip.Addr) int {
		a = a.Unmap()
		switch {
		case a.IsLinkLocalUnicast(), a.IsLinkLocalMulticast(), a.IsMulticast():
			return 2
		case a.IsLoopback(), a.IsPrivate(), a.IsUnspecified(), netip.MustParsePrefix("100.64.0.0/10").Contains(a), netip.MustParsePrefix("0.0.0.0/8").Contains(a):
			return 1
		}
		return 0
	}
	if depth(to) > depth(from) {
		return &refused{"a redirect into a private network"}
	}
	return nil
}

// refused is a redirect that is not followed.
type refused struct{ what string }

func (r *refused) Error() string {
	return fmt.Sprintf("%v: %s is refused", fault.ErrPermission, r.what)
}
func (r *refused) Unwrap() error { return fault.ErrPermission }

// headers are the caller's own, with the token. They go to the server that the
// user named and to no other.
func headers(opt source.Options) (http.Header, error) {
	h := http.Header{}
	for _, k := range slices.Sorted(maps.Keys(opt.Storage)) {
		name, ok := strings.CutPrefix(k, source.HeaderPrefix)
		if !ok {
			continue
		}
		if !token(name) || strings.ContainsAny(opt.Storage[k], "\r\n\x00") {
			return nil, fault.New(fault.ErrArgument, "storage_options: headers: %q cannot be sent", name)
		}
		switch http.CanonicalHeaderKey(name) {
		case "Range", "If-Match", "If-Range", "If-Unmodified-Since", "Accept-Encoding", "Content-Length", "Transfer-Encoding", "Connection":
			return nil, fault.New(fault.ErrArgument, "storage_options: headers: %q is set by the reader itself", name)
		}
		h.Set(name, opt.Storage[k])
	}
	if t := opt.Storage["token"]; t != "" && h.Get("Authorization") == "" {
		if strings.ContainsAny(t, "\r\n\x00") {
			return nil, fault.New(fault.ErrArgument, "storage_options: token: it has a line break")
		}
		h.Set("Authorization", "Bearer "+t)
	}
	return h, nil
}

// token reports whether a name may stand before the colon of a header.
func token(name string) bool {
	return name != "" && !strings.ContainsFunc(name, func(r rune) bool {
		return r <= ' ' || r >= 0x7f || strings.ContainsRune(`()<>@,;:\"/[]?={}`, r)
	})
}
