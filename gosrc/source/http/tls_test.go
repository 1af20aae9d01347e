package http

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"io"
	"log"
	"maps"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/serve"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/source/sourcetest"
)

// certs are the paths of a certificate authority and of certificates that share one key.
type certs struct{ ca, capath, key, good, expired, other, unknown string }

func makeCerts(t *testing.T) certs {
	t.Helper()
	dir := t.TempDir()
	file := func(name, kind string, b []byte) string {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: b}), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	out := certs{key: file("key.pem", "EC PRIVATE KEY", der)}
	authority := func(name string) *x509.Certificate {
		c := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name}, IsCA: true,
			BasicConstraintsValid: true,
			NotBefore:             time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
			KeyUsage: x509.KeyUsageCertSign}
		b, err := x509.CreateCertificate(rand.Reader, c, c, key.Public(), key)
		if err != nil {
			t.Fatal(err)
		}
		if name == "ours" {
			out.ca = file("ca/ca.pem", "CERTIFICATE", b)
			out.capath = filepath.Dir(out.ca)
		}
		return c
	}
	leaf := func(name string, ca *x509.Certificate, host []net.IP, until time.Duration) string {
		c := &x509.Certificate{SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: name}, IPAddresses: host,
			NotBefore: time.Now().Add(-2 * time.Hour), NotAfter: time.Now().Add(until)}
		b, err := x509.CreateCertificate(rand.Reader, c, ca, key.Public(), key)
		if err != nil {
			t.Fatal(err)
		}
		return file(name+".pem", "CERTIFICATE", b)
	}
	ours, theirs := authority("ours"), authority("theirs")
	here := []net.IP{net.IPv4(127, 0, 0, 1), net.ParseIP(sourcetest.Host())}
	out.good, out.expired = leaf("good", ours, here, time.Hour), leaf("expired", ours, here, -time.Hour)
	out.other, out.unknown = leaf("other", ours, []net.IP{net.IPv4(1, 2, 3, 4)}, time.Hour),
		leaf("unknown", theirs, here, time.Hour)
	return out
}

// An untrusted certificate is refused immediately as a permission error. The authority comes from the options
// or the environment, and only insecure=true disables the check.
func TestTLS(t *testing.T) {
	c := makeCerts(t)
	data := random(300_000)
	for _, x := range []struct {
		name, cert string
		opt        source.Options
		ok         bool
	}{
		{"cacert", c.good, source.Options{Storage: map[string]string{"cacert": c.ca}}, true},
		{"capath", c.good, source.Options{Storage: map[string]string{"capath": c.capath}}, true},
		{"SSL_CERT_FILE", c.good, source.Options{Env: map[string]string{"SSL_CERT_FILE": c.ca}}, true},
		{"REQUESTS_CA_BUNDLE", c.good, source.Options{Env: map[string]string{"REQUESTS_CA_BUNDLE": c.capath}}, true},
		{"AWS_CA_BUNDLE", c.good, source.Options{Env: map[string]string{"AWS_CA_BUNDLE": c.ca}}, true},
		{"one of several", c.good, source.Options{Env: map[string]string{"SSL_CERT_FILE": c.unknown,
			"CURL_CA_BUNDLE": c.ca}}, true},
		{"system", c.good, source.Options{}, false},
		{"expired", c.expired, source.Options{Storage: map[string]string{"cacert": c.ca}}, false},
		{"other host", c.other, source.Options{Storage: map[string]string{"cacert": c.ca}}, false},
		{"unknown authority", c.unknown, source.Options{Storage: map[string]string{"cacert": c.ca}}, false},
		{"insecure", c.expired, source.Options{Storage: map[string]string{"insecure": "true"}}, true},
		{"not insecure", c.expired, source.Options{Storage: map[string]string{"insecure": "false"}}, false},
	} {
		_, uri := started(t, data, serve.Options{Cert: x.cert, Key: c.key})
		// A refusal must not be retried: with this many retries, the deadline would expire first.
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		storage := map[string]string{"retries": "1000"}
		maps.Copy(storage, x.opt.Storage)
		x.opt.Storage = storage
		src, err := new(Hub).Open(ctx, uri, x.opt)
		cancel()
		switch {
		case err == nil && !x.ok:
			t.Errorf("%s: trusted", x.name)
		case err != nil && (x.ok || !errors.Is(err, errs.ErrPermission) ||
			!strings.Contains(err.Error(), "certificate")):
			t.Errorf("%s: %v", x.name, err)
		}
		if err == nil {
			if err := src.ReadAt(context.Background(), make([]byte, 10), 299_990); err != nil {
				t.Errorf("%s: %v", x.name, err)
			}
			src.Close()
		}
	}
	isSettled(t)
}

// TLS 1.1 is refused, and so is a redirect from TLS to plain HTTP.
func TestOldTLS(t *testing.T) {
	c := makeCerts(t)
	pair, err := tls.LoadX509KeyPair(c.good, c.key)
	if err != nil {
		t.Fatal(err)
	}
	for version, want := range map[uint16]error{tls.VersionTLS11: errs.ErrIO, tls.VersionTLS13: errs.ErrPermission} {
		s := httptest.NewUnstartedServer(http.RedirectHandler("http://127.0.0.1:1/x", http.StatusFound))
		s.Config.ErrorLog = log.New(io.Discard, "", 0)
		s.TLS = &tls.Config{Certificates: []tls.Certificate{pair}, MinVersion: tls.VersionTLS10, MaxVersion: version}
		s.StartTLS()
		_, err := new(Hub).Open(context.Background(), s.URL+"/x",
			source.Options{Storage: map[string]string{"cacert": c.ca}})
		if !errors.Is(err, want) || want == errs.ErrPermission && !strings.Contains(err.Error(), "https to http") {
			t.Errorf("%x: %v", version, err)
		}
		s.Close()
	}
}
