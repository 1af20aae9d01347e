package http

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	stdhttp "net/http"
	"sync/atomic"
	"testing"
	"time"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/spawn"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/source/retry"
)

// A server without ranges that becomes silent, or that sends single bytes, is abandoned after as many attempts
// as a server that never responds. Each attempt lasts as long as the timeout. On a slow host, an attempt may
// end before its request reaches the server and is then not counted; the test repeats with longer timeouts
// until all are counted.
func TestSilentSpool(t *testing.T) {
	for name, body := range map[string]func(io.Writer){
		"silent after the first answer": nil,
		"trickles": func(w io.Writer) {
			fmt.Fprint(w, "HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
			for {
				if _, err := w.Write([]byte{0}); err != nil {
					return
				}
				time.Sleep(5 * time.Millisecond)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			for _, timeout := range []string{"0.1", "0.5", "2.5", "12.5"} {
				asked, want, err := silent(t, body, timeout)
				if !errors.Is(err, errs.ErrTimeout) || asked > want {
					t.Fatalf("asked %d times, want %d: %v", asked, want, err)
				}
				if asked == want {
					return
				}
				t.Logf("timeout %s s: %d of %d tries reached the server", timeout, asked, want)
			}
			t.Error("too few attempts reached the server")
		})
	}
}

// silent reads from a server that responds to a GET of the whole object with body, or not at all. It returns
// the number of these GETs, the expected number, and the error.
func silent(t *testing.T, body func(io.Writer), timeout string) (asked, want int64, err error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	var whole atomic.Int64
	spawn.Go("server", func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			spawn.Go("connection", func() {
				defer c.Close()
				in := bufio.NewReader(c)
				for {
					req, err := stdhttp.ReadRequest(in)
					if err != nil {
						return
					}
					if req.Header.Get("Range") != "" {
						fmt.Fprint(c, "HTTP/1.1 200 OK\r\nContent-Length: 1\r\nConnection: close\r\n\r\nx")
						return
					}
					whole.Add(1)
					if body != nil {
						body(c)
						return
					}
				}
			})
		}
	})
	s, err := new(Hub).Open(t.Context(), "http://"+l.Addr().String()+"/m",
		source.Options{Storage: map[string]string{"timeout": timeout, "retries": "4"}})
	want = retry.OpenTries
	if err == nil { // the size is known
		want = 5
		err = s.ReadAt(t.Context(), make([]byte, 1000), 900_000)
		_ = s.Close()
	}
	return whole.Load(), want, err
}
