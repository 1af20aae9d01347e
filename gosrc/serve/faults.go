package serve

// This file makes the server fail in the ways that real servers do.

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"crypto/tls"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/overwire/overwire/gosrc/fault"
	"github.com/overwire/overwire/gosrc/internal/spawn"
)

// Kinds maps each fault to what the client sees.
var Kinds = map[string]string{
	"reset":   "the connection is reset within the body",
	"short":   "the connection ends within the body",
	"stall":   "the body stops, the connection stays",
	"trickle": "the body goes on with a byte now and then",
	"range":   "206 with another range than was asked for",
	"whole":   "200 with the whole file for a range",
	"length":  "a Content-Length that is not that of the range",
	"etag":    "the right bytes under another ETag",
	"gzip":    "a body encoded with gzip, though identity was asked for",
	"loop":    "a redirect to the same address",
	"500":     "500 Internal Server Error",
	"503":     "503 with Retry-After",
	"429":     "429 with Retry-After",
}

// dice chooses the faults.
type dice struct {
	mu    sync.Mutex
	r     *rand.Rand
	names []string
	p     map[string]float64
	seen  map[string]int64
}

func newDice(p map[string]float64, seed uint64) (*dice, error) {
	sum := 0.0
	for name, v := range p {
		if _, ok := Kinds[name]; !ok {
			return nil, fault.New(fault.ErrArgument, "no fault is called %q; there are %s", name, strings.Join(slices.Sorted(maps.Keys(Kinds)), ", "))
		}
		if sum += v; v < 0 || sum > 1 {
			return nil, fault.New(fault.ErrArgument, "faults: probabilities from 0 to 1, together at most 1")
		}
	}
	return &dice{r: rand.New(rand.NewPCG(seed, 0)), names: slices.Sorted(maps.Keys(p)), p: p, seen: map[string]int64{}}, nil
}

// roll returns the fault of one response, "" for none.
func (d *dice) roll() string {
	d.mu.Lock()
	defer d.mu.Unlock()
	at := d.r.Float64()
	for _, name := range d.names {
		if at -= d.p[name]; at < 0 {
			return name
		}
	}
	return ""
}

func (d *dice) below(n int64) int64 {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.r.Int64N(max(1, n))
}

func (d *dice) count(kind string) {
	d.mu.Lock()
	d.seen[kind]++
	d.mu.Unlock()
}

func (d *dice) counts() map[string]int64 {
	d.mu.Lock()
	defer d.mu.Unlock()
	return maps.Clone(d.seen)
}

// fail sends a response with a fault, or returns false if the fault does not suit
// the request.
func (s *Server) fail(kind string, w http.ResponseWriter, r *http.Request, f *os.File, size int64, tag string) bool {
	from, to, ranged := int64(0), size-1, false
	if _, err := fmt.Sscanf(r.Header.Get("Range"), "bytes=%d-%d", &from, &to); err == nil && from <= to && from < size && !s.opt.NoRanges && !s.opt.Chunked {
		to, ranged = min(to, size-1), true
	} else {
		from, to = 0, size-1
	}
	n := to - from + 1
	switch kind {
	case "500":
		http.Error(w, "a fault that was asked for", http.StatusInternalServerError)
		return true
	case "503", "429":
		w.Header().Set("Retry-After", fmt.Sprint(int(s.opt.RetryAfter.Seconds())))
		code := http.StatusServiceUnavailable
		if kind == "429" {
			code = http.StatusTooManyRequests
		}
		http.Error(w, "a fault that was asked for", code)
		return true
	case "loop":
		http.Redirect(w, r, r.URL.Path, http.StatusFound)
		return true
	case "gzip":
		var b bytes.Buffer
		z := gzip.NewWriter(&b)
		_, _ = io.Copy(z, io.NewSectionReader(f, from, min(n, 64<<10)))
		_ = z.Close()
		w.Header().Set("Content-Encoding", "gzip")
		_, _ = w.Write(b.Bytes())
		return true
	case "whole":
		if !ranged {
			return false
		}
		w.Header().Set("Content-Length", fmt.Sprint(size))
		_, _ = io.Copy(w, f)
		return true
	}
	if n < 2 || !ranged && (kind == "range" || kind == "length" || kind == "etag") {
		return false
	}
	c, _, err := http.NewResponseController(w).Hijack()
	if err != nil {
		return false
	}
	defer c.Close()
	length, at := n, from
	switch kind {
	case "range":
		if at = from + 1; at+n > size {
			at = max(0, from-1)
		}
		if at == from {
			at, length = from, n-1
		}
	case "length":
		length = n + 1 + s.dice.below(1000)
	case "etag":
		tag = `"another"`
	}
	b := bufio.NewWriter(c)
	if ranged {
		fmt.Fprintf(b, "HTTP/1.1 206 Partial Content\r\nContent-Range: bytes %d-%d/%d\r\n", at, at+min(length, n)-1, size)
	} else {
		fmt.Fprint(b, "HTTP/1.1 200 OK\r\n")
	}
	fmt.Fprintf(b, "Content-Length: %d\r\nETag: %s\r\nConnection: close\r\n\r\n", length, tag)
	cut := n
	if kind == "reset" || kind == "short" || kind == "stall" || kind == "trickle" {
		cut = s.dice.below(n)
	}
	_, _ = io.Copy(b, io.NewSectionReader(f, at, cut))
	_ = b.Flush()
	switch kind {
	case "reset":
		reset(c)
	case "stall":
		s.linger(c, time.Hour, nil)
	case "trickle":
		rest := io.NewSectionReader(f, at+cut, n-cut)
		s.linger(c, 20*time.Millisecond, func() bool {
			_, err := io.CopyN(c, rest, 1)
			return err == nil
		})
	}
	return true
}

// linger calls fn at each tick until fn returns false, the client disconnects or
// the server closes.
func (s *Server) linger(c net.Conn, tick time.Duration, fn func() bool) {
	gone := make(chan struct{})
	t := time.NewTicker(tick)
	defer t.Stop()
	spawn.Go("serve watch", func() {
		defer close(gone)
		_, _ = c.Read(make([]byte, 1))
	})
	defer func() {
		_ = c.Close()
		<-gone
	}()
	for {
		select {
		case <-gone:
			return
		case <-s.end:
			return
		case <-t.C:
			if fn != nil && !fn() {
				return
			}
		}
	}
}

// reset closes a connection with RST instead of FIN, below TLS if there is TLS:
// the client sees a cut TLS stream.
func reset(c net.Conn) {
	if t, ok := c.(*tls.Conn); ok {
		c = t.NetConn()
	}
	if t, ok := c.(*conn); ok {
		_ = t.SetLinger(0)
	}
	_ = c.Close()
}
