package route

import (
	"crypto/tls"
	"crypto/x509"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/net/http/httpproxy"

	"github.com/overwire/overwire/gosrc/fault"
	"github.com/overwire/overwire/gosrc/internal/regular"
)

// Settings of New, besides those of the transport.
type Settings struct {
	// Env is the environment as the caller has it: proxies.
	Env map[string]string
	// CAFile and CAPath name the authorities to trust: a file, a list of
	// folders. Both "": the system's own.
	CAFile, CAPath string
	Insecure       bool          // certificates are not checked
	Dial           time.Duration // a connection stands by then
}

// A Client makes connections: HTTP/1.1 only, one stream a connection, through
// the proxies of the environment. Its caller sets limits of the transport
// before the first request. Authorities that cannot be read fail what needs
// them, which is https.
type Client struct {
	*http.Transport
	untrusted error
}

// New makes a client.
func New(s Settings) *Client {
	secure := &tls.Config{MinVersion: tls.VersionTLS12, InsecureSkipVerify: s.Insecure}
	roots, err := authorities(s.CAFile, s.CAPath)
	if secure.RootCAs = roots; err != nil {
		secure.RootCAs = x509.NewCertPool() // of a proxy, too, nothing is trusted
	}
	one := new(http.Protocols)
	one.SetHTTP1(true)
	dialer := &net.Dialer{Timeout: s.Dial, KeepAlive: 15 * time.Second, ControlContext: control}
	return &Client{untrusted: err, Transport: &http.Transport{
		Proxy: proxies(s.Env), DialContext: dialer.DialContext, TLSClientConfig: secure, Protocols: one,
		DisableCompression: true, IdleConnTimeout: 30 * time.Second,
	}}
}

// RoundTrip sends one request; it follows nothing.
func (c *Client) RoundTrip(r *http.Request) (*http.Response, error) {
	if c.untrusted != nil && r.URL.Scheme == "https" {
		return nil, c.untrusted
	}
	return c.Transport.RoundTrip(r)
}

// Do is RoundTrip for libraries that sign requests for one host: a redirect is
// an answer like any other.
func (c *Client) Do(r *http.Request) (*http.Response, error) { return c.RoundTrip(r) }

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

// authorities are those in a file, or in the files of folders; nil, the
// system's own, where neither is named.
func authorities(file, dir string) (*x509.CertPool, error) {
	if file == "" && dir == "" {
		return nil, nil
	}
	var files []string
	if st, err := os.Stat(file); err == nil && st.IsDir() { // REQUESTS_CA_BUNDLE may be one
		dir = strings.Trim(dir+":"+file, ":")
	} else if file != "" {
		files = append(files, file)
	}
	for _, d := range filepath.SplitList(dir) {
		entries, err := os.ReadDir(d)
		if err != nil {
			return nil, unread(d, err)
		}
		for _, e := range entries {
			if !e.IsDir() {
				files = append(files, filepath.Join(d, e.Name()))
			}
		}
	}
	pool, found := x509.NewCertPool(), false
	for _, f := range files {
		b, err := regular.Read(f, regular.MaxSetting)
		if err != nil && f == file {
			return nil, unread(f, err)
		}
		found = err == nil && pool.AppendCertsFromPEM(b) || found
	}
	if !found {
		named := slices.DeleteFunc([]string{file, dir}, func(s string) bool { return s == "" })
		return nil, fault.New(fault.ErrArgument, "no certificate in %s", strings.Join(named, ", "))
	}
	return pool, nil
}

func unread(path string, err error) error {
	return &fault.At{Verb: "open", Source: path, Chunk: -1, Offset: -1, Err: fault.FromOS(err)}
}
