package serve

// This file simulates the failures of real servers.

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
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/spawn"
)

type fault struct {
	says   string // the effect that the client observes
	ranged bool   // only applies to range responses
	// send responds through net/http. If it is nil, the response is written to the connection directly: head changes
	// its first lines, cut ends the body at a random byte, and rest continues from there. head and rest may be nil.
	send func(*reply)
	head func(*reply)
	cut  bool
	rest func(p *reply, c net.Conn, body io.Reader)
}

var faults = map[string]fault{
	"reset": {says: "the connection is reset within the body", cut: true,
		rest: func(_ *reply, c net.Conn, _ io.Reader) {
			resetConnection(c)
		}},
	"short":   {says: "the connection is closed within the body", cut: true},
	"stall":   {says: "the body stops, and the connection remains open", cut: true, rest: stallBody},
	"trickle": {says: "the body continues slowly with single bytes", cut: true, rest: trickleBody},
	"range":   {says: "206 with a different range than requested", ranged: true, head: sendOtherRange},
	"whole":   {says: "200 with the whole file for a range", ranged: true, send: sendWhole},
	"length":  {says: "a Content-Length that differs from the range's length", ranged: true, head: claimOtherLength},
	"etag": {says: "the right bytes with a different ETag", ranged: true,
		head: func(p *reply) { p.tag = `"another"` }},
	"gzip": {says: "a body encoded with gzip, although identity was requested", send: sendZipped},
	"loop": {says: "a redirect to the same address", send: func(p *reply) {
		http.Redirect(p.w, p.r, p.r.URL.Path, http.StatusFound)
	}},
	"500": {says: "500 Internal Server Error", send: sendInternalError},
	"503": {says: "503 with Retry-After", send: func(p *reply) { p.askForRetry(http.StatusServiceUnavailable) }},
	"429": {says: "429 with Retry-After", send: func(p *reply) { p.askForRetry(http.StatusTooManyRequests) }},
}

// Kinds returns the effect of each fault, as the client observes it.
func Kinds() map[string]string {
	says := map[string]string{}
	for name, f := range faults {
		says[name] = f.says
	}
	return says
}

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
		if _, ok := faults[name]; !ok {
			return nil, errs.New(errs.ErrArgument, "unknown fault %q: expected one of %s", name,
				strings.Join(slices.Sorted(maps.Keys(faults)), ", "))
		}
		if sum += v; v < 0 || sum > 1 {
			return nil, errs.New(errs.ErrArgument, "faults: expected probabilities from 0 to 1 that sum to at most 1")
		}
	}
	return &dice{r: rand.New(rand.NewPCG(seed, 0)), names: slices.Sorted(maps.Keys(p)), p: p, seen: map[string]int64{}},
		nil
}

// nextFault returns the fault for the next response, or "" for none.
func (d *dice) nextFault() string {
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

func (d *dice) randomBelow(n int64) int64 {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.r.Int64N(max(1, n))
}

func (d *dice) countFault(kind string) {
	d.mu.Lock()
	d.seen[kind]++
	d.mu.Unlock()
}

// A reply is a response to which a fault is applied. It consists of length bytes of f from the offset from.
type reply struct {
	s            *Server
	w            http.ResponseWriter
	r            *http.Request
	f            *content
	size         int64
	from, length int64
	ranged       bool // the request asks for a range
	tag          string
}

// sendFault sends a response with a fault. It returns false if the fault does not apply to the request.
func (s *Server) sendFault(kind string, w http.ResponseWriter, r *http.Request, f *content, size int64,
	tag string) bool {
	p := &reply{s: s, w: w, r: r, f: f, size: size, length: size, tag: tag}
	var from, to int64
	if _, err := fmt.Sscanf(r.Header.Get("Range"), "bytes=%d-%d", &from, &to); err == nil && from <= to &&
		from < size && !s.opt.NoRanges && !s.opt.Chunked {
		p.from, p.length, p.ranged = from, min(to, size-1)-from+1, true
	}
	how := faults[kind]
	switch {
	case how.ranged && !p.ranged:
		return false
	case how.send != nil:
		how.send(p)
		return true
	default:
		return p.length >= 2 && p.spoilConnection(how)
	}
}

// spoilConnection writes the response directly to the connection.
func (p *reply) spoilConnection(how fault) bool {
	c, _, err := http.NewResponseController(p.w).Hijack()
	if err != nil {
		return false
	}
	defer c.Close()
	n := p.length
	if how.head != nil {
		how.head(p)
	}
	b := bufio.NewWriter(c)
	if p.ranged {
		fmt.Fprintf(b, "HTTP/1.1 206 Partial Content\r\nContent-Range: bytes %d-%d/%d\r\n", p.from,
			p.from+min(p.length, n)-1, p.size)
	} else {
		fmt.Fprint(b, "HTTP/1.1 200 OK\r\n")
	}
	fmt.Fprintf(b, "Content-Length: %d\r\nETag: %s\r\nConnection: close\r\n\r\n", p.length, p.tag)
	cut := n
	if how.cut {
		cut = p.s.dice.randomBelow(n)
	}
	_, _ = io.Copy(b, io.NewSectionReader(p.f, p.from, cut))
	_ = b.Flush()
	if how.rest != nil {
		how.rest(p, c, io.NewSectionReader(p.f, p.from+cut, n-cut))
	}
	return true
}

func claimOtherLength(p *reply) { p.length += 1 + p.s.dice.randomBelow(1000) }

func sendInternalError(p *reply) { p.sendStatus(http.StatusInternalServerError) }

func (p *reply) sendStatus(code int) { http.Error(p.w, "a requested fault", code) }

func (p *reply) askForRetry(code int) {
	p.w.Header().Set("Retry-After", fmt.Sprint(int(p.s.opt.RetryAfter.Seconds())))
	p.sendStatus(code)
}

func sendWhole(p *reply) {
	p.w.Header().Set("Content-Length", fmt.Sprint(p.size))
	_, _ = io.Copy(p.w, io.NewSectionReader(p.f, 0, p.size))
}

func sendZipped(p *reply) {
	var b bytes.Buffer
	z := gzip.NewWriter(&b)
	_, _ = io.Copy(z, io.NewSectionReader(p.f, p.from, min(p.length, 64<<10)))
	_ = z.Close()
	p.w.Header().Set("Content-Encoding", "gzip")
	_, _ = p.w.Write(b.Bytes())
}

// sendOtherRange shifts the range by a byte, or shortens it if it is the whole file.
func sendOtherRange(p *reply) {
	switch {
	case p.from+1+p.length <= p.size:
		p.from++
	case p.from > 0:
		p.from--
	default:
		p.length--
	}
}

func stallBody(p *reply, c net.Conn, _ io.Reader) { p.s.tickUntil(c, time.Hour, nil) }

func trickleBody(p *reply, c net.Conn, body io.Reader) {
	p.s.tickUntil(c, 20*time.Millisecond, func() bool {
		_, err := io.CopyN(c, body, 1)
		return err == nil
	})
}

// tickUntil calls fn at each tick until fn returns false, the client disconnects or the server closes.
func (s *Server) tickUntil(c net.Conn, tick time.Duration, fn func() bool) {
	end := make(chan struct{})
	t := time.NewTicker(tick)
	defer t.Stop()
	spawn.Go("serve watch", func() {
		defer close(end)
		_, _ = c.Read(make([]byte, 1))
	})
	defer func() {
		_ = c.Close()
		<-end
	}()
	for {
		select {
		case <-end:
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

// resetConnection closes a connection with RST instead of FIN, below TLS if there is TLS: the client sees a
// truncated TLS stream.
func resetConnection(c net.Conn) {
	if t, ok := c.(*tls.Conn); ok {
		c = t.NetConn()
	}
	if t, ok := c.(*conn); ok {
		_ = t.SetLinger(0)
	}
	_ = c.Close()
}
