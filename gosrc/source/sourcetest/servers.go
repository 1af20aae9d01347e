package sourcetest

// Runs real servers for tests: S3, Redis, certificates.

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"io"
	"log"
	"math/big"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"sync"
	"syscall"
	"testing"
	"time"
)

// The keys of the S3 server, which checks them. They look like real keys, so that tests can detect texts that
// reveal them.
const (
	S3Key    = "AKIAOVERWIRETESTKEY1"
	S3Secret = "planted/Secret+OfTheS3Server0123456789ab"
)

// An S3 is a running server with one bucket, "models".
type S3 struct {
	URL  string
	Data string // folder with the bucket's files
	CA   string // certificate file, with TLS
}

// StartS3 starts versitygw, or skips the test if `make test` has not installed it.
func StartS3(t testing.TB, tls bool) *S3 {
	program := find(t, "versitygw", "`make test` builds it into build/bin")
	root := storeFolder(t)
	s := &S3{Data: filepath.Join(root, "data", "models")}
	for _, dir := range []string{s.Data, filepath.Join(root, "iam")} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	port := FreePort(t)
	args := []string{"--port", port, "--health", "/healthz", "--keep-alive", "--iam-dir", filepath.Join(root, "iam"), "--quiet"}
	scheme := "http"
	if tls {
		scheme = "https"
		var key string
		s.CA, key = Certificate(t, root, Host())
		args = append(args, "--cert", s.CA, "--key", key)
	}
	cmd := exec.Command(program, append(args, "posix", filepath.Join(root, "data"))...)
	cmd.Env = append(cmd.Environ(), "ROOT_ACCESS_KEY="+S3Key, "ROOT_SECRET_KEY="+S3Secret)
	start(t, cmd, port)
	s.URL = scheme + "://" + port
	if !tls {
		eventually(t, "versitygw", func() bool {
			r, err := http.Get(s.URL + "/healthz")
			if err != nil {
				return false
			}
			_ = r.Body.Close()
			return r.StatusCode == http.StatusOK
		})
	}
	return s
}

// Options returns the options that reach the server.
func (s *S3) Options() map[string]string {
	m := map[string]string{"endpoint_url": s.URL, "key": S3Key, "secret": S3Secret, "retries": "0"}
	if s.CA != "" {
		m["cacert"] = s.CA
	}
	return m
}

// InOrder returns a proxy to the server. It forwards deletions only when the server has answered all uploads before
// them, even if their clients are gone. A busy server could otherwise store a part after its upload was removed.
func (s *S3) InOrder() http.Handler {
	to, _ := url.Parse(s.URL)
	p := &httputil.ReverseProxy{Rewrite: func(r *httputil.ProxyRequest) { r.SetURL(to); r.Out.Host = r.In.Host },
		ErrorLog: log.New(io.Discard, "", 0)}
	var uploads sync.RWMutex
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.Method {
		case http.MethodPut, http.MethodPost:
			uploads.RLock()
			defer uploads.RUnlock()
		case http.MethodDelete:
			uploads.Lock()
			defer uploads.Unlock()
		}
		p.ServeHTTP(w, r.WithContext(context.WithoutCancel(r.Context())))
	})
}

// RedisPassword is the password of the Redis server.
const RedisPassword = "planted-Redis-Password-0123456789"

// A Redis is a running server.
type Redis struct {
	Addr string // host:port
	CA   string // certificate file, with TLS
}

// StartRedis starts redis-server, or skips the test if it is not installed.
func StartRedis(t testing.TB, tls bool, more ...string) *Redis {
	program := find(t, "redis-server", "install it with the system's package manager (Debian: redis-server)")
	dir := t.TempDir()
	s := &Redis{Addr: FreePort(t)}
	host, port, _ := net.SplitHostPort(s.Addr)
	args := []string{"--bind", host, "--save", "", "--appendonly", "no", "--dir", dir, "--requirepass", RedisPassword}
	if tls {
		var key string
		s.CA, key = Certificate(t, dir, host)
		args = append(args, "--port", "0", "--tls-port", port, "--tls-cert-file", s.CA, "--tls-key-file", key, "--tls-ca-cert-file", s.CA,
			"--tls-auth-clients", "no")
	} else {
		args = append(args, "--port", port)
	}
	start(t, exec.Command(program, append(args, more...)...), s.Addr)
	return s
}

// find looks for a server's program in build/bin and on PATH.
func find(t testing.TB, name, how string) string {
	t.Helper()
	_, here, _, _ := runtime.Caller(0)
	own := filepath.Join(filepath.Dir(here), "..", "..", "..", "build", "bin", name)
	if _, err := os.Stat(own); err == nil {
		return own
	}
	p, err := exec.LookPath(name)
	if err != nil {
		t.Skipf("no %s: %s", name, how)
	}
	return p
}

// start runs a server until the test ends, and waits until it listens.
func start(t testing.TB, cmd *exec.Cmd, addr string) {
	t.Helper()
	log, err := os.Create(filepath.Join(t.TempDir(), "server.log"))
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	runtime.LockOSThread() // Pdeathsig follows this thread
	t.Cleanup(runtime.UnlockOSThread)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		if t.Failed() {
			b, _ := os.ReadFile(log.Name())
			t.Logf("log of %s:\n%s", filepath.Base(cmd.Path), b)
		}
		_ = log.Close()
	})
	eventually(t, cmd.Path, func() bool {
		c, err := net.DialTimeout("tcp", addr, time.Second)
		if err != nil {
			return false
		}
		_ = c.Close()
		return true
	})
}

func eventually(t testing.TB, what string, ready func() bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	for !ready() {
		if ctx.Err() != nil {
			t.Fatalf("%s did not start", what)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// Host returns an address of this machine that no other test process uses, so that a free port on it stays
// free.
func Host() string {
	pid := os.Getpid()
	return fmt.Sprintf("127.%d.%d.%d", 64+pid>>16&63, pid>>8&255, pid&255)
}

// FreePort returns an address on which no process listens, now or later.
func FreePort(t testing.TB) string {
	l, err := net.Listen("tcp", Host()+":0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

// storeFolder returns a folder that supports user attributes of files, which versitygw requires.
func storeFolder(t testing.TB) string {
	for _, parent := range []string{os.TempDir(), "/dev/shm"} {
		dir, err := os.MkdirTemp(parent, "overwire-s3-")
		if err != nil {
			continue
		}
		if syscall.Setxattr(dir, "user.overwire", []byte("x"), 0) == nil {
			t.Cleanup(func() { _ = os.RemoveAll(dir) })
			return dir
		}
		_ = os.RemoveAll(dir)
	}
	t.Skip("found no folder with extended attributes, which versitygw requires")
	return ""
}

// Certificate creates a self-signed certificate for a host, valid for an hour, and returns the paths of the
// certificate and the key.
func Certificate(t testing.TB, dir, host string) (cert, key string) {
	t.Helper()
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	c := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: host}, IsCA: true,
		BasicConstraintsValid: true,
		NotBefore:             time.Now().Add(-time.Minute), NotAfter: time.Now().Add(time.Hour),
		KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign}
	if ip := net.ParseIP(host); ip != nil {
		c.IPAddresses = []net.IP{ip}
	} else {
		c.DNSNames = []string{host}
	}
	der, err := x509.CreateCertificate(rand.Reader, c, c, &k.PublicKey, k)
	if err != nil {
		t.Fatal(err)
	}
	pk, err := x509.MarshalPKCS8PrivateKey(k)
	if err != nil {
		t.Fatal(err)
	}
	cert, key = filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	for path, block := range map[string]*pem.Block{cert: {Type: "CERTIFICATE", Bytes: der}, key: {Type: "PRIVATE KEY", Bytes: pk}} {
		if err := os.WriteFile(path, pem.EncodeToMemory(block), 0o600); err != nil {
			t.Fatal(fmt.Errorf("%s: %w", path, err))
		}
	}
	return cert, key
}
