package http

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/spawn"
	"github.com/overwire/overwire/gosrc/serve"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/source/retry"
	"github.com/overwire/overwire/gosrc/source/sourcetest"
)

var faults = flag.Int("faults", 100, "how many faults TestFaults injects")

const secret = "planted-s3cr3t"

func random(n int) []byte {
	b := make([]byte, n)
	_, _ = rand.NewChaCha8([32]byte{byte(n)}).Read(b)
	return b
}

// started serves data as /x with our own server.
func started(t *testing.T, data []byte, opt serve.Options) (*serve.Server, string) {
	t.Helper()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "x"), data, 0o600); err != nil {
		t.Fatal(err)
	}
	s, err := serve.New(dir, opt)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s, s.URL() + "x"
}

func opened(t *testing.T, uri string, storage map[string]string) *Source {
	t.Helper()
	s, err := new(Hub).Open(context.Background(), uri, source.Options{Storage: storage})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

func isSettled(t *testing.T) {
	t.Helper()
	for range 6000 {
		left := slices.DeleteFunc(spawn.Names(), func(n string) bool { return n == "serve" }) // these end with the test
		if len(left) == 0 && len(clients) == 0 {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Errorf("left over: goroutines %v, %d clients", spawn.Names(), len(clients))
}

// Servers with ranges, without ranges, and without a Content-Length pass the common suite.
func TestSuite(t *testing.T) {
	for name, opt := range map[string]serve.Options{"ranges": {}, "plain": {NoRanges: true},
		"chunked": {Chunked: true}} {
		t.Run(name, func(t *testing.T) {
			sourcetest.Suite(t, sourcetest.Is{Remote: true, InOrder: name != "ranges", Stepped: name == "ranges",
				Known: true}, func(t *testing.T, data []byte) source.Source {
				_, uri := started(t, data, opt)
				return opened(t, uri, nil)
			})
		})
	}
	isSettled(t)
}

// An HTTP/1.0 server works: it sends no length, and the body ends with the connection.
func TestOldServer(t *testing.T) {
	data := random(700_000)
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		c, b, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		defer c.Close()
		fmt.Fprint(b, "HTTP/1.0 200 OK\r\n\r\n")
		_, _ = b.Write(data)
		_ = b.Flush()
	}))
	defer s.Close()
	src := opened(t, s.URL+"/x", nil)
	p := make([]byte, len(data)-5)
	if src.Size() != int64(len(data)) || src.ReadAt(context.Background(), p, 5) != nil || !bytes.Equal(p, data[5:]) {
		t.Errorf("%d bytes of %d, or wrong bytes", src.Size(), len(data))
	}
}

// With any combination of server and network faults, the bytes are correct and a broken transfer resumes where
// it broke. At most 1 % more bytes than requested come over the network, whether they are read or not. The
// reads are like those of loads: ranges in steps, and smaller reads. With -faults 10000 this is the soak test.
func TestFaults(t *testing.T) {
	if testing.Short() {
		*faults = min(*faults, 40)
	}
	seed := uint64(time.Now().UnixNano())
	kinds := map[string]float64{"reset": 0.03, "short": 0.03, "stall": 0.005, "trickle": 0.005, "range": 0.015,
		"whole":  0.005,
		"length": 0.015, "gzip": 0.01, "loop": 0.005, "500": 0.015, "503": 0.01, "429": 0.01}
	data := random(32 << 20)
	for _, mode := range []string{"http", "https"} {
		opt := serve.Options{Faults: kinds, Seed: seed}
		storage := map[string]string{"timeout": "1", "retries": "60"}
		if mode == "https" {
			c := makeCerts(t)
			opt.Cert, opt.Key, storage["cacert"] = c.good, c.key, c.ca
		}
		s, uri := started(t, data, opt)
		wire := watch(t, source.Options{Storage: storage})
		src, err := new(Hub).Open(context.Background(), uri, source.Options{Storage: storage})
		for range 50 { // opening retries less often than reading
			if err == nil && src.Facts().Ranges != nil {
				break
			}
			if err == nil { // the first response was the whole file, as from a server without ranges
				_ = src.Close()
			}
			src, err = new(Hub).Open(context.Background(), uri, source.Options{Storage: storage})
		}
		if err != nil {
			t.Fatal(err)
		}
		begun := time.Now()
		var reads, wanted, wrong atomic.Int64
		var wg sync.WaitGroup
		injected := func() (n int64) {
			for _, v := range s.Faults() {
				n += v
			}
			return n
		}
		read := func(r *rand.Rand, p []byte, off int64) error {
			if r.IntN(4) == 0 {
				return src.ReadAt(context.Background(), p, off)
			}
			g, err := sourcetest.Begin(context.Background(), src.Facts().Ranges, off, int64(len(p)))
			if err != nil {
				return err
			}
			defer g.Close()
			for at := 0; at < len(p) && err == nil; at += 1 << 20 {
				err = g.Next(p[at:min(at+1<<20, len(p))])
			}
			return err
		}
		for g := range 8 {
			wg.Add(1)
			go func() {
				defer wg.Done()
				r := rand.New(rand.NewPCG(seed, uint64(g)))
				p := make([]byte, 8<<20)
				for injected() < int64(*faults)/2 {
					n := 1 + r.IntN(len(p))
					off := r.Int64N(int64(len(data) - n))
					if err := read(r, p[:n], off); err != nil {
						t.Errorf("seed %d: %v", seed, err)
						return
					}
					reads.Add(1)
					wanted.Add(int64(n))
					if !bytes.Equal(p[:n], data[off:off+int64(n)]) {
						wrong.Add(1)
					}
				}
			}()
		}
		wg.Wait()
		src.Close()
		came := wire.close(t)
		extra := 100 * (float64(came)/float64(wanted.Load()) - 1)
		t.Logf("%s, seed %d: %d reads, %d faults %v, %d wrong, %d bytes requested, %.2f%% more received, %.1f s",
			mode, seed, reads.Load(), injected(), s.Faults(), wrong.Load(), wanted.Load(), extra,
			time.Since(begun).Seconds())
		if wrong.Load() != 0 {
			t.Errorf("%d reads gave wrong bytes", wrong.Load())
		}
		most := 1.0
		if mode == "https" {
			most += 0.2 // TLS records and handshakes
		}
		if *faults < 2000 { // a few refused responses matter: each has about 1 MB in flight
			most = 4
		}
		if extra > most || extra < 0 {
			t.Errorf("received %.2f%% more bytes than requested", extra)
		}
		s.Close()
	}
	isSettled(t)
}

// On servers without ranges, a broken GET is restarted, and bytes received twice are compared.
func TestSpoolFaults(t *testing.T) {
	t.Cleanup(func() { isSettled(t) })
	data := random(2 << 20)
	for seed := range uint64(2) {
		_, uri := started(t, data, serve.Options{NoRanges: true, Seed: seed,
			Faults: map[string]float64{"reset": 0.3, "short": 0.3, "503": 0.1}})
		src := opened(t, uri, map[string]string{"timeout": "1", "retries": "50"})
		p := make([]byte, len(data))
		if err := src.ReadAt(context.Background(), p, 0); err != nil || !bytes.Equal(p, data) {
			t.Errorf("seed %d: %v, or wrong bytes", seed, err)
		}
	}
}

// An object that changes after it was opened gives errs.ErrCorrupt, however the server reports the change.
func TestChanged(t *testing.T) {
	data := random(1 << 20)
	ctx := context.Background()
	t.Run("file replaced", func(t *testing.T) {
		dir := t.TempDir()
		path := filepath.Join(dir, "x")
		if err := os.WriteFile(path, data, 0o600); err != nil {
			t.Fatal(err)
		}
		var asked atomic.Int64
		s, err := serve.New(dir, serve.Options{Header: func(http.Header) bool { asked.Add(1); return true }})
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		src := opened(t, s.URL()+"x", nil)
		if err := os.WriteFile(path+"2", random(1<<20), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(path+"2", path); err != nil {
			t.Fatal(err)
		}
		err = src.ReadAt(ctx, make([]byte, 100), 500_000)
		if !errors.Is(err, errs.ErrCorrupt) || !strings.Contains(err.Error(), "changed while it was read") {
			t.Errorf("%v", err)
		}
		if n := asked.Load(); n != 2 {
			t.Errorf("%d requests, want 2: opening and one read", n)
		}
	})
	t.Run("another ETag", func(t *testing.T) {
		var n atomic.Int64
		s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("ETag", fmt.Sprintf(`"%d"`, n.Add(1)))
			r.Header.Del("If-Match") // such a server ignores it
			http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(data))
		}))
		defer s.Close()
		src := opened(t, s.URL+"/x", nil)
		if err := src.ReadAt(ctx, make([]byte, 100), 500_000); !errors.Is(err, errs.ErrCorrupt) {
			t.Errorf("%v", err)
		}
	})
	// Without an ETag and a date, versions cannot be distinguished: one response is read to its end, and all
	// reads use its bytes.
	t.Run("no reliable identity", func(t *testing.T) {
		for name, c := range map[string][2]string{"no date": {}, "a date of now": {"now"},
			"an invalid date": {"yesterday"}, "a weak ETag": {"now", `W/"x"`}, "an ETag of date and size": {"now", "dated"},
		} {
			date, etag := c[0], c[1]
			var n atomic.Int64
			other := random(1<<20 + 1)[:len(data)]
			s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if w.Header().Set("Last-Modified", date); date == "" {
					w.Header().Del("Last-Modified")
				} else if date == "now" {
					now := time.Now().UTC().Format(http.TimeFormat)
					w.Header().Set("Last-Modified", now)
					w.Header().Set("Date", now)
				}
				switch at := time.Now().UTC().Unix(); etag {
				case "":
				case "dated":
					w.Header().Set("ETag", fmt.Sprintf(`"%x-%x"`, at, len(data)))
				default:
					w.Header().Set("ETag", etag)
				}
				d := data
				if n.Add(1) > 2 {
					d = other
				}
				http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(d))
			}))
			src, err := new(Hub).Open(ctx, s.URL+"/x", source.Options{})
			if err != nil {
				t.Fatal(err)
			}
			p := make([]byte, 300_000)
			for _, off := range []int64{0, 300_000, 700_000, 100_000} {
				if err := src.ReadAt(ctx, p, off); err != nil || !bytes.Equal(p, data[off:off+int64(len(p))]) {
					t.Errorf("%s: at %d: %v, or bytes of two versions", name, off, err)
				}
			}
			if src.pin() != "" {
				t.Errorf("%s: %q", name, src.pin())
			}
			src.Close()
			s.Close()
		}
	})
	t.Run("by its date", func(t *testing.T) {
		var n atomic.Int64
		s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			changed := time.Unix(1_700_000_000, 0)
			if n.Add(1) > 2 {
				changed = changed.Add(time.Hour)
				r.Header.Del("If-Unmodified-Since") // such a server ignores it
			}
			http.ServeContent(w, r, "", changed, bytes.NewReader(data))
		}))
		defer s.Close()
		src := opened(t, s.URL+"/x?version=1", nil)
		if id := opened(t, s.URL+"/x?version=2", nil).pin(); id == src.pin() || id == "" {
			t.Errorf("two objects with the same date have the same pin %q", id)
		}
		if err := src.ReadAt(ctx, make([]byte, 100), 500_000); !errors.Is(err, errs.ErrCorrupt) {
			t.Errorf("%v", err)
		}
	})
	t.Run("by a weak ETag and its date", func(t *testing.T) {
		var n atomic.Int64
		s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("ETag", `W/"same"`)
			http.ServeContent(w, r, "", time.Unix(1_700_000_000+n.Add(1)/3, 0), bytes.NewReader(data))
		}))
		defer s.Close()
		src := opened(t, s.URL+"/x", nil)
		if err := src.ReadAt(ctx, make([]byte, 100), 500_000); err != nil {
			t.Error(err)
		}
		if err := src.ReadAt(ctx, make([]byte, 100), 600_000); !errors.Is(err, errs.ErrCorrupt) {
			t.Errorf("%v", err)
		}
	})
}

// Objects with a Content-Encoding that does not change the bytes can be read, with and without ranges.
func TestLabels(t *testing.T) {
	data := random(500_000)
	for _, ranges := range []bool{true, false} {
		s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			w.Header()["Content-Encoding"] = []string{"aws-chunked,", "Identity"}
			if !ranges {
				_, _ = w.Write(data)
				return
			}
			w.Header().Set("ETag", `"x"`)
			http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(data))
		}))
		src, err := new(Hub).Open(context.Background(), s.URL+"/x", source.Options{})
		if err != nil {
			t.Fatal(err)
		}
		p := make([]byte, len(data))
		if err := src.ReadAt(context.Background(), p, 0); err != nil || !bytes.Equal(p, data) {
			t.Errorf("ranges %v: %v", ranges, err)
		}
		src.Close()
		s.Close()
	}
}

// A response becomes an error of the documented class, and no text contains a secret of the caller.
func TestClasses(t *testing.T) {
	var requests atomic.Int64
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		requests.Add(1)
		var code int
		switch path := strings.TrimPrefix(r.URL.Path, "/"); path {
		case "gzip":
			w.Header().Set("Content-Encoding", "gzip")
			_, _ = w.Write(make([]byte, 1000))
		case "shifted":
			w.Header().Set("Content-Range", "bytes 1-5/1000")
			w.WriteHeader(206)
			_, _ = w.Write(make([]byte, 5))
		case "huge":
			w.Header().Set("Content-Range", "bytes 0-262143/9223372036854775808")
			w.WriteHeader(206)
		case "endless":
			w.Header().Set("Content-Range", "bytes 0-9/10")
			w.WriteHeader(206)
			_, _ = w.Write(make([]byte, 100))
		case "scheme":
			w.Header().Set("Location", "file:///etc/passwd")
			w.WriteHeader(302)
		case "link":
			w.Header().Set("Location", "http://169.254.169.254/latest/meta-data/")
			w.WriteHeader(302)
		case "loop":
			http.Redirect(w, r, "/loop", http.StatusTemporaryRedirect)
		default:
			fmt.Sscan(path, &code)
			w.WriteHeader(code)
		}
	}))
	defer s.Close()
	for path, c := range map[string]struct {
		class error
		most  int64
	}{
		"404": {errs.ErrNotFound, 1}, "410": {errs.ErrNotFound, 1}, "401": {errs.ErrPermission, 1},
		"403": {errs.ErrPermission, 1},
		"400": {errs.ErrIO, 1}, "501": {errs.ErrIO, 1}, "500": {errs.ErrIO, 3}, "429": {errs.ErrIO, 3},
		"gzip": {errs.ErrNotSupported, 1}, "shifted": {errs.ErrIO, 3}, "huge": {errs.ErrIO, 3},
		"endless": {errs.ErrIO, 3},
		"scheme":  {errs.ErrPermission, 1}, "link": {errs.ErrPermission, 1}, "loop": {errs.ErrIO, 18},
	} {
		requests.Store(0)
		uri := strings.Replace(s.URL, "://", "://user:"+secret+"@", 1) + "/" + path + "?sig=" + secret
		_, err := new(Hub).Open(context.Background(), uri,
			source.Options{Storage: map[string]string{"token": secret, "header.X-Key": secret, "retries": "2"}})
		if !errors.Is(err, c.class) {
			t.Errorf("%s: %v, want %v", path, err, c.class)
			continue
		}
		if strings.Contains(err.Error(), secret) || !strings.Contains(err.Error(), path) {
			t.Errorf("%s: %v", path, err)
		}
		if n := requests.Load(); n > c.most {
			t.Errorf("%s: %d requests", path, n)
		}
	}
	for uri, class := range map[string]error{
		"http://": errs.ErrArgument, "http://[::1": errs.ErrArgument, "hf://x": errs.ErrArgument,
		"hf://user:word/name/file": errs.ErrArgument, "hf://a/b/../c": errs.ErrArgument,
		"http://127.0.0.1:1/x": errs.ErrIO, "http://no.such.host.invalid/": errs.ErrIO,
	} {
		if _, err := new(Hub).Open(context.Background(), uri, source.Options{}); !errors.Is(err, class) {
			t.Errorf("%s: %v, want %v", uri, err, class)
		}
	}
	for _, storage := range []map[string]string{
		{"key": secret}, {"timeout": secret}, {"connections": "0"}, {"insecure": "perhaps"}, {"header.a b": "x"},
		{"header.X": "a\nb"},
		{"header.Range": "bytes=0-1"}, {"token": "a\nb"}, {"header.proxy-authorization": secret},
		{"header.if-none-match": "x"},
		{"cacert": "/dev/null"},
	} {
		_, err := new(Hub).Open(context.Background(), strings.Replace(s.URL, "http:", "https:", 1),
			source.Options{Storage: storage})
		if !errors.Is(err, errs.ErrArgument) || strings.Contains(err.Error(), secret) {
			t.Errorf("%v: %v", storage, err)
		}
	}
	isSettled(t)
}

// The proxy from the environment is used with its password, and NO_PROXY is respected.
func TestProxy(t *testing.T) {
	data := random(1000)
	var through atomic.Int64
	proxy := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Proxy-Authorization") == "" || r.URL.Host != "weights.example" {
			w.WriteHeader(407)
			return
		}
		through.Add(1)
		w.Header().Set("ETag", `"e"`)
		http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(data))
	}))
	defer proxy.Close()
	address := strings.Replace(proxy.URL, "://", "://user:"+secret+"@", 1)
	for _, env := range []map[string]string{{"http_proxy": address}, {"HTTP_PROXY": address}, {"ALL_PROXY": address}} {
		src, err := new(Hub).Open(context.Background(), "http://weights.example/x", source.Options{Env: env})
		if err != nil {
			t.Fatal(err)
		}
		src.Close()
	}
	if through.Load() != 3 {
		t.Errorf("%d requests through the proxy", through.Load())
	}
	_, err := new(Hub).Open(context.Background(), "http://weights.invalid/x",
		source.Options{Env: map[string]string{"http_proxy": address, "NO_PROXY": "weights.invalid"}})
	if err == nil || through.Load() != 3 || strings.Contains(err.Error(), secret) {
		t.Errorf("NO_PROXY: %v", err)
	}
	_, err = new(Hub).Open(context.Background(), "http://x.example/",
		source.Options{Env: map[string]string{"http_proxy": "http://user:" + secret + "@[bad"}})
	if !errors.Is(err, errs.ErrArgument) || strings.Contains(err.Error(), secret) {
		t.Errorf("%v", err)
	}
}

// A cancelled read that hangs ends soon and leaves nothing behind.
func TestCancel(t *testing.T) {
	data := random(1 << 20)
	var n atomic.Int64
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if n.Add(1) > 1 {
			<-r.Context().Done()
			return
		}
		w.Header().Set("ETag", `"e"`)
		http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(data))
	}))
	defer s.Close()
	src := opened(t, s.URL+"/x", nil)
	ctx, cancel := context.WithCancelCause(context.Background())
	time.AfterFunc(50*time.Millisecond, func() { cancel(errs.ErrCancelled) })
	// Without the cancellation it would end with a timeout.
	if err := src.ReadAt(ctx, make([]byte, 500_000), 300_000); !errors.Is(err, errs.ErrCancelled) {
		t.Error(err)
	}
	src.Close()
}

// Shards of one model share their connections.
func TestShared(t *testing.T) {
	_, uri := started(t, random(1000), serve.Options{})
	a, b := opened(t, uri, nil), opened(t, uri, nil)
	if len(clients) != 1 {
		t.Errorf("%d clients", len(clients))
	}
	c := opened(t, uri, map[string]string{"token": "x"})
	if len(clients) != 2 {
		t.Errorf("%d clients", len(clients))
	}
	for _, s := range []*Source{a, b, c} {
		s.Close()
	}
	isSettled(t)
}

func TestNames(t *testing.T) {
	for _, n := range retry.Names {
		if !slices.Contains(options, n) {
			t.Errorf("%s is not an option", n)
		}
	}
}
