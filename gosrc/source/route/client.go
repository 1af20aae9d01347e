package route

// This file connects to servers: TLS, proxies and certificate authorities.

import (
	"cmp"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/net/http/httpproxy"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/regular"
)

// Settings configure New, in addition to the fields of http.Transport.
type Settings struct {
	// Env is the caller's environment, which may name proxies.
	Env map[string]string
	// Trust selects the trusted certificate authorities. The zero value means those of the system.
	Trust    Trust
	Insecure bool          // do not check certificates
	Dial     time.Duration // timeout for connecting
}

// Trust lists certificate authorities: those in Files (REQUESTS_CA_BUNDLE may be a folder), and those in all
// files of Folders, which is separated by colons.
type Trust struct {
	Files   []string
	Folders string
}

// Named returns the authorities that the caller configured, or else all those in the environment, including the
// variables of other programs.
func Named(file, folders string, env map[string]string) Trust {
	switch {
	case file != "":
		return Trust{[]string{file}, folders}
	case folders != "":
		return Trust{nil, folders}
	}
	t := Trust{Folders: env["SSL_CERT_DIR"]}
	for _, name := range []string{"SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "AWS_CA_BUNDLE"} {
		if file := env[name]; file != "" && !slices.Contains(t.Files, file) {
			t.Files = append(t.Files, file)
		}
	}
	return t
}

// A Client connects through the proxies of the environment. It uses HTTP/1.1 with one request at a time per connection.
// The transport's limits must be set before the first request. The client reads the certificate authorities before its
// first TLS connection, because a folder of hundreds of certificates takes longer to read than an object takes to open.
// If they cannot be read, https requests fail.
type Client struct {
	*http.Transport
	readRoots func() error // sets the transport's authorities; later calls return the error of the first
}

// New returns a client.
func New(s Settings) *Client {
	secure := &tls.Config{MinVersion: tls.VersionTLS12, InsecureSkipVerify: s.Insecure}
	one := new(http.Protocols)
	one.SetHTTP1(true)
	dialer := &net.Dialer{Timeout: s.Dial, KeepAlive: 15 * time.Second, ControlContext: checkDial}
	readRoots := sync.OnceValue(func() error {
		roots, err := s.Trust.Roots()
		if secure.RootCAs = roots; err != nil {
			secure.RootCAs = x509.NewCertPool() // rejects every certificate, including that of a proxy
		}
		return err
	})
	return &Client{readRoots: readRoots, Transport: &http.Transport{
		Proxy: proxiesOf(s.Env), DialContext: dialer.DialContext, TLSClientConfig: secure, Protocols: one,
		DisableCompression: true, IdleConnTimeout: 30 * time.Second,
	}}
}

// RoundTrip sends one request and does not follow redirects. An untrusted certificate of the server or of a proxy gives
// errs.ErrPermission.
func (c *Client) RoundTrip(r *http.Request) (*http.Response, error) {
	if err := c.prepareTLS(r); err != nil {
		return nil, err
	}
	resp, err := c.Transport.RoundTrip(r)
	if cert, ok := errors.AsType[*tls.CertificateVerificationError](err); ok {
		return nil, errs.New(errs.ErrPermission,
			"the server's certificate is not trusted: %v; set the option cacert, or SSL_CERT_FILE, to the certificate "+
				"file of its authority", cert.Err)
	}
	return resp, err
}

// prepareTLS reads the certificate authorities if the request needs TLS. If they cannot be read, an https request gets
// the error. An http request goes on, but no https proxy is trusted.
func (c *Client) prepareTLS(r *http.Request) error {
	if r.URL.Scheme == "https" {
		return c.readRoots()
	}
	if proxy, err := c.Proxy(r); err == nil && proxy != nil && proxy.Scheme == "https" {
		_ = c.readRoots()
	}
	return nil
}

// Do is RoundTrip for libraries that sign requests for one host: it returns a redirect like any other response.
func (c *Client) Do(r *http.Request) (*http.Response, error) { return c.RoundTrip(r) }

// noProxy stands for a proxy with an invalid URL.
const noProxy = "http://proxy.invalid"

// proxiesOf reads the variables as curl does: lower case takes precedence, and ALL_PROXY applies to both schemes. If a
// proxy's URL is invalid, requests through it fail, because a direct connection might violate the rules of the network.
func proxiesOf(env map[string]string) func(*http.Request) (*url.URL, error) {
	get := func(name string) string {
		if v, ok := env[strings.ToLower(name)]; ok {
			return v
		}
		return env[name]
	}
	all := get("ALL_PROXY")
	valid := func(text string) string { // httpproxy ignores an invalid URL, or parses it as a different proxy
		u, err := url.Parse(text)
		if (err != nil || u.Host == "") && !strings.Contains(text, "://") { // a host without a scheme
			u, err = url.Parse("http://" + text)
		}
		if text != "" && (err != nil || u.Host == "") {
			return noProxy
		}
		return text
	}
	c := httpproxy.Config{HTTPProxy: valid(cmp.Or(get("HTTP_PROXY"), all)),
		HTTPSProxy: valid(cmp.Or(get("HTTPS_PROXY"), all)), NoProxy: get("NO_PROXY")}
	find := c.ProxyFunc()
	return func(r *http.Request) (*url.URL, error) {
		u, err := find(r.URL)
		if err != nil || u != nil && u.String() == noProxy { // the parser's text might contain a password
			return nil, errs.New(errs.ErrArgument, "the proxy's URL in the environment is not valid")
		}
		return u, nil
	}
}

// Roots reads the configured certificate authorities. If there are none, it returns nil, which means those of the
// system.
func (t Trust) Roots() (*x509.CertPool, error) {
	if len(t.Files) == 0 && t.Folders == "" {
		return nil, nil
	}
	folders := filepath.SplitList(t.Folders)
	var files []string
	for _, f := range t.Files {
		if st, err := os.Stat(f); err == nil && st.IsDir() {
			folders = append(folders, f)
		} else {
			files = append(files, f)
		}
	}
	fileCount := len(files) // files must contain certificates; files in folders need not
	for _, d := range folders {
		entries, err := os.ReadDir(d)
		if err != nil {
			return nil, unreadFile(d, err)
		}
		for _, e := range entries {
			if !e.IsDir() {
				files = append(files, filepath.Join(d, e.Name()))
			}
		}
	}
	pool, hasAny := x509.NewCertPool(), false
	for i, f := range files {
		b, err := regular.Read(f, regular.MaxSetting)
		if err != nil && i < fileCount {
			return nil, unreadFile(f, err)
		}
		hasAny = err == nil && pool.AppendCertsFromPEM(b) || hasAny
	}
	if !hasAny {
		return nil, errs.New(errs.ErrArgument, "found no certificates in %s",
			strings.Join(slices.Concat(t.Files, filepath.SplitList(t.Folders)), ", "))
	}
	return pool, nil
}

func unreadFile(path string, err error) error {
	return errs.In("open", path, errs.FromOS(err))
}
