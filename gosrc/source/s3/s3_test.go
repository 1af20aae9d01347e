package s3

import (
	"bytes"
	"context"
	"crypto/md5"
	"encoding/base64"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/source/sourcetest"
)

var bg = context.Background()

// noSecret checks that an error's texts contain no secret.
func noSecret(t *testing.T, err error) {
	t.Helper()
	if err == nil {
		t.Fatal("no error")
	}
	for _, text := range []string{err.Error(), errs.Text(err)} {
		for _, s := range []string{sourcetest.S3Key, sourcetest.S3Secret, "planted", "X-Amz-Signature", "Credential="} {
			if strings.Contains(text, s) {
				t.Errorf("%q shows %q", text, s)
			}
		}
	}
}

func random(n int) []byte {
	b := make([]byte, n)
	r := rand.NewChaCha8([32]byte{7})
	_, _ = r.Read(b)
	return b
}

// with returns options that reach the server. changes are pairs of a name and a value; an empty value removes
// the option.
func with(s *sourcetest.S3, changes ...string) source.Options {
	m := s.Options()
	for i := 0; i < len(changes); i += 2 {
		if changes[i+1] == "" {
			delete(m, changes[i])
			continue
		}
		m[changes[i]] = changes[i+1]
	}
	return source.Options{Storage: m}
}

func put(t testing.TB, opt source.Options, uri string, data []byte) {
	t.Helper()
	d, err := Create(bg, uri, opt, int64(len(data)))
	if err != nil {
		t.Fatal(err)
	}
	defer d.Drop()
	for off := 0; off < len(data); off += 1 << 20 {
		if err := d.Write(data[off:min(len(data), off+1<<20)], int64(off)); err != nil {
			t.Fatal(err)
		}
	}
	if err := d.Finish(int64(len(data))); err != nil {
		t.Fatal(err)
	}
	if err := d.Publish(); err != nil {
		t.Fatal(err)
	}
}

func get(uri string, opt source.Options) ([]byte, error) {
	o, err := Open(bg, uri, opt)
	if err != nil {
		return nil, err
	}
	defer o.Close()
	p := make([]byte, o.Size())
	return p, o.ReadAt(bg, p, 0)
}

// The common suite passes, and objects of many sizes, small and in parts, are written and read back, with and
// without TLS.
func TestServer(t *testing.T) {
	t.Parallel()
	for _, tls := range []bool{false, true} {
		s := sourcetest.StartS3(t, tls)
		sourcetest.Suite(t, sourcetest.Is{Remote: true, Stepped: true, Known: true},
			func(t *testing.T, data []byte) source.Source {
				put(t, with(s), "s3://models/suite", data)
				o, err := Open(bg, "s3://models/suite", with(s))
				if err != nil {
					t.Fatal(err)
				}
				return o
			})
		sizes := []int{0, 1, source.HeadBytes, source.HeadBytes + 1, minPart, minPart + 1, 2*minPart + 12345}
		if tls || testing.Short() {
			sizes = []int{0, source.HeadBytes + 1, minPart + 1}
		}
		for _, n := range sizes {
			data := random(n)
			put(t, with(s), "s3://models/a/b c+ü@1.bin", data)
			back, err := get("s3://models/a/b c+ü@1.bin", with(s))
			if err != nil || !bytes.Equal(back, data) {
				t.Fatalf("tls %v, %d bytes: read %d: %v", tls, n, len(back), err)
			}
		}
		if tls {
			_, err := get("s3://models/suite", with(s, "cacert", ""))
			if !errors.Is(err, errs.ErrPermission) || !strings.Contains(err.Error(), "certificate") {
				t.Errorf("unknown authority: %v", err)
			}
			noSecret(t, err)
		}
	}
}

// A refusal gives a typed error that names bucket, key, status and request.
func TestRefusals(t *testing.T) {
	t.Parallel()
	s := sourcetest.StartS3(t, false)
	put(t, with(s), "s3://models/m", random(1000))
	for _, c := range []struct {
		what, uri string
		opt       source.Options
		class     error
		says      []string
	}{
		{"wrong secret", "s3://models/m", with(s, "secret", "planted-wrong"), errs.ErrPermission,
			[]string{"SignatureDoesNotMatch", "403", "request "}},
		{"unknown key", "s3://models/m", with(s, "key", "AKIAPLANTEDUNKNOWN00"), errs.ErrPermission,
			[]string{"InvalidAccessKeyId", "403"}},
		{"unsigned", "s3://models/m", with(s, "key", "", "secret", "", "anon", "true"), errs.ErrPermission,
			[]string{"AccessDenied", "403"}},
		{"no object", "s3://models/none", with(s), errs.ErrNotFound, []string{"NoSuchKey", "404", "s3://models/none"}},
		{"no bucket", "s3://nothere/m", with(s), errs.ErrNotFound, []string{"NoSuchBucket", "404", "s3://nothere/m"}},
		{"no server", "s3://models/m", with(s, "endpoint_url", "http://127.0.0.1:1"), errs.ErrIO, []string{"refused"}},
		{"a folder", "s3://models/", with(s), errs.ErrArgument, []string{"folder"}},
		{"no bucket's name", "s3:///m", with(s), errs.ErrArgument, nil},
		{"a password in the URI", "s3://planted:planted@models/m", with(s), errs.ErrArgument,
			[]string{"storage_options"}},
		{"half a key", "s3://models/m", with(s, "secret", ""), errs.ErrArgument, []string{"set together"}},
		{"an unknown option", "s3://models/m", with(s, "secrt", "planted"), errs.ErrArgument,
			[]string{"secrt", "endpoint_url"}},
		{"a bad endpoint", "s3://models/m", with(s, "endpoint_url", "ftp://planted@x"), errs.ErrArgument,
			[]string{"endpoint"}},
		{"a bad region", "s3://models/m", with(s, "region", "x.evil.example/"), errs.ErrArgument, []string{"region"}},
		{"a short customer key", "s3://models/m", with(s, "sse_customer_key", "planted"), errs.ErrArgument,
			[]string{"32 bytes"}},
		{"no such profile", "s3://models/m", with(s, "profile", "missing-profile"), errs.ErrArgument,
			[]string{"missing-profile"}},
		{"no file of certificates", "s3://models/m", with(s, "cacert", "/none.pem", "endpoint_url",
			"https://127.0.0.1:1"), errs.ErrNotFound, []string{"/none.pem"}},
	} {
		_, err := get(c.uri, c.opt)
		if !errors.Is(err, c.class) {
			t.Errorf("%s: %v", c.what, err)
			continue
		}
		for _, text := range c.says {
			if !strings.Contains(err.Error(), text) {
				t.Errorf("%s: %q does not say %q", c.what, err, text)
			}
		}
		noSecret(t, err)
	}
	// The same applies to writing, and nothing is stored.
	d, err := Create(bg, "s3://models/w", with(s, "secret", "planted-wrong"), 1)
	if err != nil {
		t.Fatal(err)
	}
	_ = d.Write([]byte("x"), 0)
	_ = d.Finish(1)
	err = d.Publish()
	d.Drop()
	if !errors.Is(err, errs.ErrPermission) {
		t.Error(err)
	}
	noSecret(t, err)
}

// If an object is replaced or deleted while it is open, reads fail with errs.ErrCorrupt and never mix old and
// new bytes. Writing the same bytes again does not count as a change.
func TestPinned(t *testing.T) {
	t.Parallel()
	s := sourcetest.StartS3(t, false)
	data := random(source.HeadBytes * 3)
	put(t, with(s), "s3://models/p", data)
	o, err := Open(bg, "s3://models/p", with(s))
	if err != nil {
		t.Fatal(err)
	}
	defer o.Close()
	p := make([]byte, 100)
	put(t, with(s), "s3://models/p", data)
	if err := o.ReadAt(bg, p, source.HeadBytes*2); err != nil {
		t.Fatal(err)
	}
	data[0]++
	put(t, with(s), "s3://models/p", data)
	if err := o.ReadAt(bg, p, source.HeadBytes*2); !errors.Is(err, errs.ErrCorrupt) ||
		!strings.Contains(err.Error(), "changed") {
		t.Error(err)
	}
	if err := Remove(bg, "s3://models/p", with(s)); err != nil {
		t.Fatal(err)
	}
	if err := o.ReadAt(bg, p, source.HeadBytes*2); !errors.Is(err, errs.ErrCorrupt) {
		t.Error(err)
	}
	if err := Remove(bg, "s3://models/p", with(s)); err != nil {
		t.Error("removing a missing object fails:", err)
	}
}

// A draft that is dropped, at any stage, leaves neither an object nor parts of an upload, and preserves an
// existing object.
func TestDropped(t *testing.T) {
	t.Parallel()
	s := sourcetest.StartS3(t, false)
	front := httptest.NewServer(s.InOrder())
	t.Cleanup(front.Close)
	put(t, with(s), "s3://models/d", []byte("old"))
	data := random(3 * minPart)
	for stage := range 3 {
		ctx, cancel := context.WithCancelCause(bg)
		d, err := Create(ctx, "s3://models/d", with(s, "endpoint_url", front.URL), int64(len(data)))
		if err != nil {
			t.Fatal(err)
		}
		if err := d.Write(data, 0); err != nil {
			t.Fatal(err)
		}
		if stage > 0 {
			if err := d.Finish(int64(len(data))); err != nil {
				t.Fatal(err)
			}
		}
		parts := func() []string {
			found, _ := filepath.Glob(filepath.Join(s.Data, ".sgwtmp", "multipart", "*", "*"))
			return found
		}
		if stage > 0 && len(parts()) != 1 {
			t.Fatalf("versitygw stores these parts: %v", parts())
		}
		if stage > 1 {
			cancel(errs.ErrCancelled)
			if err := d.Publish(); !errors.Is(err, errs.ErrCancelled) {
				t.Fatal(err)
			}
		}
		d.Drop()
		d.Drop()
		cancel(nil)
		if back, err := get("s3://models/d", with(s)); err != nil || string(back) != "old" {
			t.Fatalf("stage %d: %q %v", stage, back, err)
		}
		if left := parts(); len(left) != 0 {
			t.Fatalf("stage %d: parts remain in the store: %v", stage, left)
		}
	}
}

// The customer's key, set as text or as base64, is sent with every request that transfers content and with no
// other request. Only a store that confirms the use of the key receives an object: versitygw stores the bytes
// unencrypted and does not confirm it.
func TestCustomerKey(t *testing.T) {
	t.Parallel()
	s := sourcetest.StartS3(t, false)
	const key = "0123456789abcdef0123456789abcdef"
	const text = "MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY="
	const head = "X-Amz-Server-Side-Encryption-Customer-"
	h := md5.Sum([]byte(key))
	sum := base64.StdEncoding.EncodeToString(h[:])
	var sent, without []string
	var confirms, echoes atomic.Bool
	var mu sync.Mutex
	front, certificate := frontedTLS(t, s, func(r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		if r.Header.Get(head+"Key") == text && r.Header.Get(head+"Algorithm") == "AES256" &&
			r.Header.Get(head+"Key-Md5") == sum {
			sent = append(sent, r.Method)
		} else {
			without = append(without, r.Method)
		}
	}, func(r *http.Response) error {
		if confirms.Load() {
			r.Header.Set(head+"Algorithm", "AES256")
			r.Header.Set(head+"Key-Md5", sum)
		}
		if echoes.Load() {
			r.Header.Set(head+"Key", text)
		}
		return nil
	})
	put(t, with(s), "s3://models/sse", []byte("old"))
	for _, k := range []string{key, text} {
		confirms.Store(false)
		opt := with(s, "endpoint_url", front, "sse_customer_key", k)
		opt.Env = map[string]string{"AWS_CA_BUNDLE": certificate}
		for name, data := range map[string][]byte{"sse": []byte("x"), "large": random(minPart + 1), "empty": nil} {
			if err := publish(t, opt, name, data); !errors.Is(err, errs.ErrNotSupported) ||
				!strings.Contains(err.Error(), "does not confirm") {
				t.Errorf("%s: %v", name, err)
			}
			if had, err := get("s3://models/"+name, with(s)); name == "sse" && string(had) != "old" ||
				name != "sse" && !errors.Is(err, errs.ErrNotFound) {
				t.Errorf("%s: the store has %d bytes: %v", name, len(had), err)
			}
		}
		confirms.Store(true)
		echoes.Store(true)
		if err := publish(t, opt, "echo", []byte("x")); !errors.Is(err, errs.ErrNotSupported) {
			t.Errorf("accepted a store that repeats the headers: %v", err)
		}
		echoes.Store(false)
		sent, without = nil, nil
		err := publish(t, opt, "with "+k, []byte("x"))
		_, getErr := get("s3://models/with "+k, opt)
		mu.Lock()
		if fmt.Sprint(sent, without) != "[POST PUT POST GET] []" || err != nil || getErr != nil {
			t.Errorf("requests with the key %v, without it %v: %v, %v", sent, without, err, getErr)
		}
		mu.Unlock()
	}
}

// A customer's key is only sent over TLS.
func TestCustomerKeyNeedsTLS(t *testing.T) {
	t.Parallel()
	for endpoint, isRefused := range map[string]bool{"http://10.1.2.3:9000": true, "http://store.example": true,
		"http://127.0.0.1.example": true, "http://127.0.0.1:9000": true, "http://[::1]:9000": true,
		"http://localhost": true, "https://store.example": false, "store.example": false, "": false} {
		for _, opt := range []source.Options{
			{Storage: map[string]string{"endpoint_url": endpoint}}, {Env: map[string]string{"AWS_ENDPOINT_URL_S3": endpoint}},
		} {
			if opt.Storage == nil {
				opt.Storage = map[string]string{}
			}
			opt.Storage["sse_customer_key"] = strings.Repeat("k", 32)
			_, err := resolveSettings(bg, opt)
			if isRefused != (err != nil) || err != nil && (!errors.Is(err, errs.ErrArgument) ||
				!strings.Contains(err.Error(), "sse_customer_key")) {
				t.Errorf("%s: %v", endpoint, err)
			}
		}
	}
}

// fronted starts a proxy to the server, for tests of a failing store. It preserves the Host header, which is
// signed.
func fronted(t *testing.T, s *sourcetest.S3, see func(*http.Request), change func(*http.Response) error) string {
	t.Helper()
	h := httptest.NewServer(watched(forwarder(s, change), see))
	t.Cleanup(h.Close)
	return h.URL
}

// frontedTLS is fronted with TLS. certificate is a file with its certificate.
func frontedTLS(t *testing.T, s *sourcetest.S3, see func(*http.Request), change func(*http.Response) error) (
	url, certificate string) {
	t.Helper()
	h := httptest.NewTLSServer(watched(forwarder(s, change), see))
	t.Cleanup(h.Close)
	certificate = filepath.Join(t.TempDir(), "ca.pem")
	block := &pem.Block{Type: "CERTIFICATE", Bytes: h.Certificate().Raw}
	if err := os.WriteFile(certificate, pem.EncodeToMemory(block), 0o600); err != nil {
		t.Fatal(err)
	}
	return h.URL, certificate
}

func watched(next http.Handler, see func(*http.Request)) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if see != nil {
			see(r)
		}
		next.ServeHTTP(w, r)
	})
}

// A store that is overloaded, cuts bodies and closes connections only costs time: reads resume, and writes are
// sent again.
func TestFailingStore(t *testing.T) {
	t.Parallel()
	s := sourcetest.StartS3(t, false)
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 3))
	dice := make(chan int)
	go func() {
		for {
			select {
			case dice <- r.IntN(6):
			case <-t.Context().Done():
				return
			}
		}
	}()
	var faults atomic.Int64
	front := fronted(t, s, nil, func(resp *http.Response) error {
		switch <-dice {
		case 0:
			if resp.Request.Method != http.MethodGet { // only the response is lost
				return nil
			}
			faults.Add(1)
			resp.StatusCode, resp.Body = http.StatusServiceUnavailable,
				io.NopCloser(strings.NewReader("<Error><Code>SlowDown</Code></Error>"))
			resp.ContentLength = -1
			resp.Header.Del("Content-Length")
		case 1:
			if resp.Request.Method == http.MethodGet && resp.ContentLength > 100_000 {
				faults.Add(1)
				resp.Body = io.NopCloser(io.MultiReader(io.LimitReader(resp.Body, resp.ContentLength/2), failing{}))
			}
		case 2:
			faults.Add(1)
			return errors.New("lost")
		}
		return nil
	})
	data := random(3*minPart + 17)
	opt := with(s, "endpoint_url", front, "retries", "30")
	put(t, opt, "s3://models/f", data)
	o, err := Open(bg, "s3://models/f", opt)
	if err != nil {
		t.Fatal(err)
	}
	defer o.Close()
	p := make([]byte, 1<<20)
	for off := 0; off < len(data); off += len(p) {
		q := p[:min(len(p), len(data)-off)]
		if err := o.ReadAt(bg, q, int64(off)); err != nil || !bytes.Equal(q, data[off:off+len(q)]) {
			t.Fatalf("at %d: %v", off, err)
		}
	}
	if faults.Load() == 0 {
		t.Fatal("no fault was injected")
	}
	t.Logf("%d faults", faults.Load())
}

type failing struct{}

func (failing) Read([]byte) (int, error) { return 0, errors.New("cut") }

// A store that never responds to a request is abandoned after the permitted number of attempts.
func TestSilentStore(t *testing.T) {
	done := make(chan struct{})
	var asked atomic.Int64
	h := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		asked.Add(1)
		select {
		case <-r.Context().Done():
		case <-done:
		}
	}))
	t.Cleanup(h.Close)
	t.Cleanup(func() { close(done) })
	_, err := get("s3://models/x", source.Options{Storage: map[string]string{"endpoint_url": h.URL, "anon": "true",
		"timeout": "0.1", "retries": "1"}})
	if !errors.Is(err, errs.ErrTimeout) || asked.Load() > 2 {
		t.Fatalf("%v after %d requests", err, asked.Load())
	}
}

// A presigned URL can be read without credentials, unless it was changed or has expired.
func TestPresign(t *testing.T) {
	t.Parallel()
	s := sourcetest.StartS3(t, false)
	put(t, with(s), "s3://models/x/y z", []byte("hello"))
	fetch := func(u string) (int, string) {
		r, err := http.Get(u)
		if err != nil {
			t.Fatal(err)
		}
		defer r.Body.Close()
		b, _ := io.ReadAll(r.Body)
		return r.StatusCode, string(b)
	}
	u, err := Presign(bg, "s3://models/x/y z", with(s), time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	if status, text := fetch(u); status != 200 || text != "hello" {
		t.Errorf("%d %s", status, text)
	}
	last := u[len(u)-8:]
	flip := strings.Map(func(r rune) rune {
		if r == 'a' {
			return 'b'
		}
		return 'a'
	}, last)
	at := strings.Index(u, "X-Amz-Signature=") + len("X-Amz-Signature=")
	if status, _ := fetch(u[:at] + flip + u[at+8:]); status != 403 {
		t.Error("a changed signature, status:", status)
	}
	if strings.Contains(u, sourcetest.S3Secret) || strings.Contains(errs.Redact(u), "Signature") {
		t.Error("the URL contains the secret, or the redacted URL contains the signature")
	}
	u, err = Presign(bg, "s3://models/x/y z", with(s), time.Second)
	if err != nil {
		t.Fatal(err)
	}
	time.Sleep(2100 * time.Millisecond)
	if status, _ := fetch(u); status != 403 {
		t.Error("an expired URL, status:", status)
	}
	if _, err := Presign(bg, "s3://models/x", with(s), 8*24*time.Hour); !errors.Is(err, errs.ErrArgument) {
		t.Error(err)
	}
}

// Walk lists the objects of a folder, with or without those in its subfolders, sorted and with their sizes, for
// any number of objects.
func TestWalk(t *testing.T) {
	t.Parallel()
	s := sourcetest.StartS3(t, false)
	for _, k := range []string{"m/b", "m/a", "m/sub/c", "mm"} {
		put(t, with(s), "s3://models/"+k, []byte("x"))
	}
	for i := range 1005 {
		if err := os.MkdirAll(filepath.Join(s.Data, "many"), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(s.Data, "many", string(rune('a'+i%26))+strings.Repeat("x", i/26)), nil,
			0o644); err != nil {
			t.Fatal(err)
		}
	}
	for _, uri := range []string{"s3://models/m", "s3://models/m/"} {
		for below, want := range map[bool]string{false: "[{a 1} {b 1}]", true: "[{a 1} {b 1} {sub/c 1}]"} {
			if got, err := Walk(bg, uri, with(s), below); err != nil || fmt.Sprint(got) != want {
				t.Errorf("%v %v", got, err)
			}
		}
	}
	if got, err := Walk(bg, "s3://models/many/", with(s), true); err != nil || len(got) != 1005 {
		t.Errorf("%d %v", len(got), err)
	}
	if _, err := Walk(bg, "s3://models/none/", with(s), false); !errors.Is(err, errs.ErrNotFound) {
		t.Error(err)
	}
}

// forwarder forwards requests to the server and may change its responses.
func forwarder(s *sourcetest.S3, change func(*http.Response) error) http.Handler {
	u, _ := url.Parse(s.URL)
	return &httputil.ReverseProxy{Rewrite: func(r *httputil.ProxyRequest) {
		r.SetURL(u)
		r.Out.Host = r.In.Host
	}, ModifyResponse: change,
		ErrorHandler: func(w http.ResponseWriter, _ *http.Request, _ error) { w.WriteHeader(http.StatusBadGateway) }}
}
