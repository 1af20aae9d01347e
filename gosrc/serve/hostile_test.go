package serve

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/overwire/overwire/gosrc/internal/spawn/spawntest"
)

// served starts a server with a file x of the given size.
func served(t *testing.T, size int64, opt Options) *Server {
	t.Helper()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "x"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(filepath.Join(dir, "x"), size); err != nil {
		t.Fatal(err)
	}
	s, err := New(dir, opt)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return s
}

// refuseLeft fails a test if its closed servers have left goroutines.
func refuseLeft(t *testing.T) {
	t.Cleanup(func() {
		if n := spawntest.Left(); len(n) != 0 {
			t.Errorf("left: %v", n)
		}
	})
}

// dial connects and writes text.
func dial(t *testing.T, s *Server, text string) *net.TCPConn {
	t.Helper()
	c, err := net.Dial("tcp", s.addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	tcp := c.(*net.TCPConn)
	if _, err := io.WriteString(c, text); err != nil {
		t.Fatal(err)
	}
	return tcp
}

const request = "GET /x HTTP/1.1\r\nHost: h\r\n"

// A client that stops reading or sending, or that only transfers single bytes, is disconnected: during a body,
// a header, a request's body, and between requests, with and without ranges, lengths and faults. The next
// waiting client is then served.
func TestStalledClient(t *testing.T) {
	refuseLeft(t)
	const size = 64 << 20 // more than the kernel's buffers hold
	drip := func(c *net.TCPConn, stop <-chan struct{}, step func() error) {
		for step() == nil {
			select {
			case <-stop:
				return
			case <-time.After(20 * time.Millisecond):
			}
		}
	}
	reads := func(c *net.TCPConn) error { _, err := c.Read(make([]byte, 1)); return err }
	writes := func(c *net.TCPConn) error { _, err := c.Write([]byte("a")); return err }
	for name, c := range map[string]struct {
		text string
		opt  Options
		step func(*net.TCPConn) error // called repeatedly; nil means nothing
	}{
		"reads nothing":                     {request + "\r\n", Options{}, nil},
		"reads a byte":                      {request + "\r\n", Options{}, reads},
		"reads nothing of a range":          {request + "Range: bytes=5-\r\n\r\n", Options{}, nil},
		"without a length":                  {request + "\r\n", Options{Chunked: true}, reads},
		"without ranges":                    {request + "\r\n", Options{NoRanges: true}, reads},
		"reads nothing after a fault":       {request + "\r\n", Options{Faults: map[string]float64{"length": 1}}, nil},
		"reads nothing after another fault": {request + "Range: bytes=5-\r\n\r\n", Options{Faults: map[string]float64{"whole": 1}}, nil},
		"no request":                        {"", Options{}, nil},
		"half a header":                     {request, Options{}, writes},
		"sends a body":                      {request + "Content-Length: 200000\r\n\r\n", Options{}, writes},
		"sends chunks":                      {request + "Transfer-Encoding: chunked\r\n\r\n30000\r\n", Options{}, writes},
		"no second request":                 {"HEAD /x HTTP/1.1\r\nHost: h\r\n\r\n", Options{}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c.opt.Patience, c.opt.Connections = 300*time.Millisecond, 1
			s := served(t, size, c.opt)
			first := dial(t, s, c.text)
			stop := make(chan struct{})
			defer close(stop)
			if c.step != nil {
				go drip(first, stop, func() error { return c.step(first) })
			}
			for try := 0; ; try++ { // a busy machine may take longer than the server's patience
				second := dial(t, s, "HEAD /x HTTP/1.1\r\nHost: h\r\n\r\n")
				r, err := http.ReadResponse(bufio.NewReader(second), nil)
				_ = second.Close()
				if err == nil && r.StatusCode == 200 {
					break
				}
				if try == 20 {
					t.Fatalf("the waiting client: %v", err)
				}
			}
		})
	}
}

// A slow client that makes progress receives everything, even if it takes several times the server's patience.
func TestSlowClient(t *testing.T) {
	refuseLeft(t)
	const size = 24 << 20
	for _, opt := range []Options{{}, {Chunked: true}, {Each: 16 << 20}} {
		opt.Patience = time.Second
		s := served(t, size, opt)
		r, err := http.ReadResponse(bufio.NewReader(dial(t, s, request+"\r\n")), nil)
		if err != nil {
			t.Fatal(err)
		}
		n := int64(0)
		for err == nil {
			var m int64
			m, err = io.CopyN(io.Discard, r.Body, 512<<10)
			n += m
			time.Sleep(60 * time.Millisecond)
		}
		if n != size || err != io.EOF {
			t.Errorf("%+v: %d bytes, %v", opt, n, err)
		}
	}
}

// Headers of any length, thousands of ranges and pipelined requests get bounded responses.
func TestHeaders(t *testing.T) {
	refuseLeft(t)
	s := served(t, 1<<20, Options{})
	for _, c := range []struct {
		header string
		status int
		most   int64
	}{
		{"X: " + strings.Repeat("x", 10<<20) + "\r\n", 431, 1000},
		{strings.Repeat("Range: bytes=0-0\r\n", 1<<20), 431, 1000},
		{"Range: bytes=" + strings.Repeat("0-0,", 5000) + "1-1\r\n", 206, 2 << 20},
		{"Range: bytes=" + strings.Repeat("0-,", 5000) + "1-1\r\n", 200, 1 << 20}, // more bytes than the file: ranges are ignored
		{"Range: bytes=0-" + strings.Repeat("9", 10000) + "\r\n", 416, 1000},
	} {
		tcp := dial(t, s, "")
		go func() { _, _ = io.WriteString(tcp, request+c.header+"\r\n") }()
		r, err := http.ReadResponse(bufio.NewReader(tcp), nil)
		if err != nil {
			t.Fatal(err)
		}
		n, _ := io.Copy(io.Discard, r.Body)
		if r.StatusCode != c.status || n > c.most {
			t.Errorf("%.40q: %d, %d bytes", c.header, r.StatusCode, n)
		}
	}
	const ahead = 500
	in := bufio.NewReader(dial(t, s, strings.Repeat(request+"Range: bytes=7-8\r\n\r\n", ahead)))
	for i := range ahead {
		r, err := http.ReadResponse(in, nil)
		if err != nil || r.StatusCode != 206 || r.ContentLength != 2 {
			t.Fatal(i, err)
		}
		if _, err := io.Copy(io.Discard, r.Body); err != nil {
			t.Fatal(err)
		}
	}
}

// If more clients connect than connections are allowed, all are served eventually.
func TestManyClients(t *testing.T) {
	refuseLeft(t)
	s := served(t, 1000, Options{Connections: 3})
	errs := make(chan error, 100)
	for range 50 {
		go func() {
			if code, body := get(t, s.URL()+"x", "bytes=0-999"); code != 206 || len(body) != 1000 {
				errs <- fmt.Errorf("%d, %d bytes", code, len(body))
			}
			errs <- nil
		}()
	}
	for range 50 {
		if err := <-errs; err != nil {
			t.Error(err)
		}
	}
	if n := len(s.open); n > 3 {
		t.Errorf("%d connections", n)
	}
}
