package route

// This file makes connections to servers: TLS, proxies and certificate authorities.

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
	"time"

	"golang.org/x/net/http/httpproxy"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/regular"
)

// Settings of New, besides those of the transport.
type Settings struct {
	// Env is the caller's environment, which names proxies.
	Env map[string]string
	// CAFile and CAPath name the authorities to trust: a file, a list of folders.
	// Both "": the system's.
	CAFile, CAPath string
	Insecure       bool          // certificates are not checked
	Dial           time.Duration // bounds the wait for a connection
}

// A Client makes connections: HTTP/1.1 only, one request a connection at a time,
// through the proxies of the environment. Limits of the transport must be set
// before the first request. If the authorities cannot be read, https requests fail.
type Client struct {
	*http.Transport
	untrusted error
}

// New makes a client.
func New(s Settings) *Client {
	secure := &tls.Config{MinVersion: tls.VersionTLS12, InsecureSkipVerify: s.Insecure}
	roots, err := authorities(s.CAFile, s.CAPath)
	if secure.RootCAs = roots; err != nil {
		secure.RootCAs = x509.NewCertPool() // a proxy may not choose the certificate either
	}
	one := new(http.Protocols)
	one.SetHTTP1(true)
	dialer := &net.Dialer{Timeout: s.Dial, KeepAlive: 15 * time.Second, ControlContext: control}
	return &Client{untrusted: err, Transport: &http.Transport{
		Proxy: proxies(s.Env), DialContext: dialer.DialContext, TLSClientConfig: secure, Protocols: one,
		DisableCompression: true, IdleConnTimeout: 30 * time.Second,
	}}
}

// RoundTrip sends one request and follows no redirect. A certificate that is not
// trusted, of the server or of a proxy, is errs.ErrPermission.
func (c *Client) RoundTrip(r *http.Request) (*http.Response, error) {
	if c.untrusted != nil && r.URL.Scheme == "https" {
		return nil, c.untrusted
	}
	resp, err := c.Transport.RoundTrip(r)
	var cert *tls.CertificateVerificationError
	if errors.As(err, &cert) {
		return nil, errs.New(errs.ErrPermission, "the server's certificate is not trusted: %v", cert.Err)
	}
	return resp, err
}

// Do is RoundTrip for libraries that sign requests for one host: it returns a
// redirect like any other response.
func (c *Client) Do(r *http.Request) (*http.Response, error) { return c.RoundTrip(r) }

// noProxy stands for a proxy whose URL is not valid.
const noProxy = "http://proxy.invalid"

// proxies reads the variables as curl does: lower case wins, ALL_PROXY serves
// both schemes. Where the URL of a proxy is not valid, requests that are for it are
// refused: to go past it might lead where the network forbids.
func proxies(env map[string]string) func(*http.Request) (*url.URL, error) {
	get := func(name string) string {
		if v, ok := env[strings.ToLower(name)]; ok {
			return v
		}
		return env[name]
	}
	all := get("ALL_PROXY")
	valid := func(text string) string { // httpproxy takes what is not valid for no proxy, or for another
		u, err := url.Parse(text)
		if (err != nil || u.Host == "") && !strings.Contains(text, "://") { // a host alone
			u, err = url.Parse("http://" + text)
		}
		if text != "" && (err != nil || u.Host == "") {
			return noProxy
		}
		return text
	}
	c := httpproxy.Config{HTTPProxy: valid(cmp.Or(get("HTTP_PROXY"), all)), HTTPSProxy: valid(cmp.Or(get("HTTPS_PROXY"), all)), NoProxy: get("NO_PROXY")}
	find := c.ProxyFunc()
	return func(r *http.Request) (*url.URL, error) {
		u, err := find(r.URL)
		if err != nil || u != nil && u.String() == noProxy { // a text of it might have a password
			return nil, errs.New(errs.ErrArgument, "the proxy's URL in the environment is not valid")
		}
		return u, nil
	}
}

// authorities are read from a file, or from the files of folders; nil, the
// system's, where neither is named.
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
		return nil, errs.New(errs.ErrArgument, "no certificate in %s", strings.Join(named, ", "))
	}
	return pool, nil
}

func unread(path string, err error) error {
	return errs.In("open", path, errs.FromOS(err))
}
