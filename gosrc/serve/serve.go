// Package serve is a small HTTP server for the files in one folder. It lists folders and supports ranges,
// strong ETags and If-Match. It simulates links of any speed and latency, and faults of networks and stores, by
// probability and seed. It is meant for tests and experiments, not for the internet: it has no passwords, and
// listens only on this machine unless Options name another address.
//
// A client may hold a connection as long as it makes progress. Options.Patience limits each step of a body, a
// handshake, a request's header and body, and the pause before the next request. The number of connections is
// limited; further clients wait until another connection ends.
package serve

import (
	"cmp"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"html"
	"io"
	"io/fs"
	"log"
	"maps"
	"net"
	"net/http"
	"net/url"
	"os"
	"path"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unicode/utf8"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/regular"
	"github.com/overwire/overwire/gosrc/internal/spawn"
	"golang.org/x/sys/unix"
)

// Options configure New. The zero value serves at full speed, without faults, on a free port of 127.0.0.1.
type Options struct {
	Address string        // default "127.0.0.1:0"
	Rate    int64         // bytes per second over all connections; 0 means no limit
	Each    int64         // bytes per second of one connection; 0 means no limit
	Latency time.Duration // before every response
	// NoRanges ignores Range headers, as HTTP/1.0 servers do. Chunked omits the Content-Length.
	NoRanges, Chunked bool
	Cert, Key         string // PEM files; both are required for TLS
	// Faults are the probabilities of the faults in Kinds, per response.
	Faults map[string]float64
	Seed   uint64
	// RetryAfter is the value of Retry-After in responses with status 429 and 503.
	RetryAfter time.Duration
	// Header, if not nil, is called before each response. If it returns false, the response has status 401.
	Header func(http.Header) bool
	// Patience is how long a client may take for one step, 256 KiB of a body; 0 means a minute.
	Patience time.Duration
	// Connections limits simultaneous connections; 0 means 1,024.
	Connections int
}

// maxHeader limits a request's header; net/http adds 4 KiB.
const maxHeader = 32 << 10

// A Server is a running server.
type Server struct {
	opt  Options
	root *os.Root
	http *http.Server
	link link
	dice *dice
	addr string
	done chan struct{}
	end  chan struct{} // closed by Close; ends stalled responses
	open chan struct{} // has one element per connection

	once sync.Once
	Sent atomic.Int64 // bytes of bodies and headers that the kernel accepted
}

// New starts a server for a folder.
func New(dir string, opt Options) (*Server, error) {
	opt.Address = cmp.Or(opt.Address, "127.0.0.1:0")
	opt.Patience = cmp.Or(opt.Patience, time.Minute)
	opt.Connections = cmp.Or(opt.Connections, 1024)
	dice, err := newDice(opt.Faults, opt.Seed)
	if err != nil {
		return nil, err
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, errs.In("serve", dir, errs.FromOS(err))
	}
	s := &Server{opt: opt, root: root, dice: dice, done: make(chan struct{}), end: make(chan struct{}),
		open: make(chan struct{}, opt.Connections), link: link{rate: opt.Rate}}
	l, err := net.Listen("tcp", opt.Address)
	if err != nil {
		_ = root.Close()
		return nil, errs.New(errs.ErrIO, "serve: %v", err)
	}
	s.addr = l.Addr().String()
	l = &listener{l, s}
	if opt.Cert != "" || opt.Key != "" {
		pair, err := tls.LoadX509KeyPair(opt.Cert, opt.Key)
		if err != nil {
			_, _ = l.Close(), root.Close()
			return nil, errs.New(errs.ErrArgument, "serve: certificate: %v", err)
		}
		l = tls.NewListener(l, &tls.Config{Certificates: []tls.Certificate{pair}, MinVersion: tls.VersionTLS12,
			NextProtos: []string{"http/1.1"}})
	}
	s.http = &http.Server{Handler: http.HandlerFunc(s.answerRequest), ReadHeaderTimeout: opt.Patience,
		IdleTimeout: opt.Patience, MaxHeaderBytes: maxHeader, ErrorLog: log.New(io.Discard, "", 0)}
	spawn.Go("serve", func() {
		defer close(s.done)
		_ = s.http.Serve(l) // until Close
	})
	return s, nil
}

// URL returns the address of the folder, with a trailing slash.
func (s *Server) URL() string {
	if s.opt.Cert != "" {
		return "https://" + s.addr + "/"
	}
	return "http://" + s.addr + "/"
}

// Faults returns the number of faults so far, by kind.
func (s *Server) Faults() map[string]int64 {
	s.dice.mu.Lock()
	defer s.dice.mu.Unlock()
	return maps.Clone(s.dice.seen)
}

// Close ends the server and every connection.
func (s *Server) Close() error {
	var err error
	s.once.Do(func() {
		close(s.end)
		err = errors.Join(s.http.Close(), s.root.Close())
		<-s.done
	})
	return err
}

// Wait serves until ctx ends.
func (s *Server) Wait(ctx context.Context) error {
	<-ctx.Done()
	return s.Close()
}

func (s *Server) answerRequest(w http.ResponseWriter, r *http.Request) {
	if s.opt.Latency > 0 {
		time.Sleep(s.opt.Latency)
	}
	if r.ContentLength != 0 { // bodies are unused, but net/http reads them before it responds
		w.Header().Set("Connection", "close")
		_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(s.opt.Patience))
	}
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
		http.Error(w, "only GET and HEAD", http.StatusMethodNotAllowed)
		return
	}
	if s.opt.Header != nil && !s.opt.Header(r.Header) {
		http.Error(w, "no", http.StatusUnauthorized)
		return
	}
	name := cmp.Or(strings.Trim(r.URL.Path, "/"), ".")
	if name != "." && isHidden(name) {
		http.NotFound(w, r)
		return
	}
	// os.Root confines paths and links to the folder. Opening a pipe must not wait for its writer.
	f, err := s.root.OpenFile(name, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	switch {
	case errors.Is(err, syscall.EMFILE) || errors.Is(err, syscall.ENFILE):
		http.Error(w, "too many open files", http.StatusServiceUnavailable)
		return
	case err != nil:
		http.NotFound(w, r)
		return
	}
	defer f.Close()
	switch st, err := f.Stat(); {
	case err == nil && st.IsDir():
		s.answerFolder(w, r, name, f)
	case err != nil || !st.Mode().IsRegular() || strings.HasSuffix(r.URL.Path, "/"):
		http.NotFound(w, r)
	default:
		s.answerFile(w, r, f)
	}
}

// answerFile responds with bytes of an open regular file.
func (s *Server) answerFile(w http.ResponseWriter, r *http.Request, f *os.File) {
	now, isSettled, err := settledState(f)
	if err != nil {
		http.Error(w, "cannot read the file", http.StatusInternalServerError)
		return
	}
	tag := now.entityTag(isSettled)
	w.Header().Set("ETag", tag)
	w.Header().Set("Content-Type", "application/octet-stream")
	body := &content{File: f, opened: now}
	defer body.endSpoiled()
	if kind := s.dice.nextFault(); kind != "" && r.Method == http.MethodGet {
		if s.sendFault(kind, w, r, body, now.size, tag) {
			s.dice.countFault(kind)
			return
		}
	}
	switch {
	case s.opt.Chunked:
		w.Header().Set("Accept-Ranges", "none")
		_ = http.NewResponseController(w).Flush() // send the header without a length
		_, _ = io.Copy(struct{ io.Writer }{w}, struct{ io.Reader }{body})
	case s.opt.NoRanges:
		w.Header().Set("Accept-Ranges", "none")
		w.Header().Set("Content-Length", fmt.Sprint(now.size))
		if r.Method == http.MethodGet {
			_, _ = io.Copy(w, struct{ io.Reader }{body})
		}
	default:
		http.ServeContent(w, r, "", time.Unix(0, now.modified), struct{ io.ReadSeeker }{body})
	}
}

// entriesOf lists an open folder, sorted: its subfolders, and its regular files, including links to files below
// the served folder. Links to folders are omitted because they could form a loop. Hidden names are omitted.
func (s *Server) entriesOf(name string, dir *os.File) (all []entry, err error) {
	list, err := dir.ReadDir(-1)
	if err != nil {
		return nil, err
	}
	for _, e := range list {
		if isHidden(e.Name()) {
			continue
		}
		info, err := e.Info()
		if err == nil && info.Mode().Type() == fs.ModeSymlink {
			if info, err = s.root.Stat(path.Join(name, e.Name())); err == nil && info.IsDir() {
				continue
			}
		}
		if err != nil || !info.IsDir() && !info.Mode().IsRegular() {
			continue
		}
		one := entry{e.Name(), "file", info.ModTime().UTC().Format(http.TimeFormat), info.Size()}
		if info.IsDir() {
			one.Type, one.Size = "directory", 0
		}
		all = append(all, one)
	}
	slices.SortFunc(all, func(a, b entry) int { return strings.Compare(a.Name, b.Name) })
	return all, nil
}

// answerFolder responds with the listing of an open folder, as a page if the client accepts HTML, as browsers do.
func (s *Server) answerFolder(w http.ResponseWriter, r *http.Request, name string, dir *os.File) {
	isPage := strings.Contains(r.Header.Get("Accept"), "text/html")
	if !strings.HasSuffix(r.URL.Path, "/") {
		if !isPage { // a program would mistake the listing for a file
			http.NotFound(w, r)
			return
		}
		to := url.URL{Path: "/" + strings.Trim(r.URL.Path, "/") + "/"} // //NAME/ would be a host
		http.Redirect(w, r, to.EscapedPath(), http.StatusMovedPermanently)
		return
	}
	all, err := s.entriesOf(name, dir)
	if err != nil {
		http.Error(w, "cannot read the folder", http.StatusInternalServerError)
		return
	}
	_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(s.opt.Patience))
	h := w.Header()
	h.Set("Cache-Control", "no-store")
	h.Set("Vary", "Accept")
	h.Set("X-Content-Type-Options", "nosniff")
	if isPage {
		h.Set("Content-Type", "text/html; charset=utf-8")
		h.Set("Content-Security-Policy", "default-src 'none'")
		_, _ = w.Write(pageOf(r.URL.Path, all))
		return
	}
	h.Set("Content-Type", "application/json")
	all = slices.DeleteFunc(all, func(e entry) bool { return !utf8.ValidString(e.Name) }) // not valid in JSON
	text, _ := json.Marshal(append([]entry{}, all...))                                    // cannot fail
	_, _ = w.Write(text)
}

// A link limits the rate of one connection, or of all connections together.
type link struct {
	rate int64
	mu   sync.Mutex
	free time.Time // when all accepted bytes will have been sent
}

// step is the largest number of bytes that a limited link accepts in one call.
const step = 256 << 10

// waitForLink waits until the link can send n bytes.
func (l *link) waitForLink(n int) {
	if l.rate <= 0 {
		return
	}
	l.mu.Lock()
	now := time.Now()
	if l.free.Before(now) {
		l.free = now
	}
	l.free = l.free.Add(time.Duration(float64(n) / float64(l.rate) * 1e9))
	wait := l.free.Sub(now)
	l.mu.Unlock()
	if wait > 2*time.Millisecond { // shorter sleeps take longer than requested
		time.Sleep(wait - time.Millisecond)
	}
}

type listener struct {
	net.Listener
	s *Server
}

// The pauses after a connection could not be accepted.
const minPause, maxPause = 5 * time.Millisecond, time.Second

// Accept retries after errors of single connections, and while the machine is short of memory or descriptors,
// because net/http would end the server for some of these errors.
func (l *listener) Accept() (net.Conn, error) {
	select {
	case l.s.open <- struct{}{}:
	case <-l.s.end:
		return nil, net.ErrClosed
	}
	c, err := l.Listener.Accept()
	for pause := minPause; err != nil && !errors.Is(err, net.ErrClosed); pause = min(2*pause, maxPause) {
		select {
		case <-time.After(pause):
			c, err = l.Listener.Accept()
		case <-l.s.end:
			err = net.ErrClosed
		}
	}
	if err != nil {
		<-l.s.open
		return nil, err
	}
	return &conn{TCPConn: c.(*net.TCPConn), s: l.s, own: link{rate: l.s.opt.Each}}, nil
}

// A conn counts, delays and limits writes.
type conn struct {
	*net.TCPConn
	s    *Server
	own  link
	once sync.Once
}

func (c *conn) Close() error {
	c.once.Do(func() { <-c.s.open })
	return c.TCPConn.Close()
}

// beginStep waits until n bytes may be sent, and sets the client's deadline for receiving them.
func (c *conn) beginStep(n int) error {
	c.waitForLinks(n)
	return c.SetWriteDeadline(time.Now().Add(c.s.opt.Patience))
}

// waitForLinks waits until both links can send n bytes.
func (c *conn) waitForLinks(n int) {
	c.own.waitForLink(n)
	c.s.link.waitForLink(n)
}

func (c *conn) Write(p []byte) (done int, err error) {
	for len(p) > 0 && err == nil {
		part := p[:min(len(p), step)]
		if err = c.beginStep(len(part)); err != nil {
			break
		}
		var n int
		n, err = c.TCPConn.Write(part)
		c.s.Sent.Add(int64(n))
		done, p = done+n, p[n:]
	}
	return done, err
}

// ReadFrom copies through a buffer. With sendfile, a change of the file would affect pages that the client has
// not received yet.
func (c *conn) ReadFrom(r io.Reader) (int64, error) {
	return io.CopyBuffer(struct{ io.Writer }{c}, struct{ io.Reader }{r}, make([]byte, step))
}

// An entry is a file or a folder in a listing.
type entry struct {
	Name string `json:"name"`
	Type string `json:"type"` // "file" or "directory"
	Time string `json:"mtime"`
	Size int64  `json:"size,omitempty"` // only set for files
}

// isHidden reports whether a path has a hidden element.
func isHidden(name string) bool { return strings.HasPrefix(name, ".") || strings.Contains(name, "/.") }

// pageOf renders a listing as HTML. Names are untrusted: they are escaped, and each link begins with ./, so it
// cannot lead to another scheme or host.
func pageOf(at string, all []entry) []byte {
	var b strings.Builder
	title := html.EscapeString(strings.ToValidUTF8(at, "\ufffd"))
	fmt.Fprintf(&b, "<!doctype html><html><head><meta charset=\"utf-8\"><title>%s</title></head>", title)
	fmt.Fprintf(&b, "<body><h1>%s</h1><ul>\n", title)
	if strings.Trim(at, "/") != "" {
		b.WriteString("<li><a href=\"../\">..</a></li>\n")
	}
	for _, e := range all {
		tail, size := "", fmt.Sprintf(" (%d bytes)", e.Size)
		if e.Type == "directory" {
			tail, size = "/", ""
		}
		fmt.Fprintf(&b, "<li><a href=\"./%s%s\">%s%s</a>%s</li>\n", html.EscapeString(url.PathEscape(e.Name)), tail,
			html.EscapeString(strings.ToValidUTF8(e.Name, "\ufffd")), tail, size)
	}
	b.WriteString("</ul></body></html>\n")
	return []byte(b.String())
}

// A state identifies the bytes of a file. A program can set size and modification time to those of another
// file, but not both the inode and the change time.
type state struct {
	device, inode uint64
	size          int64
	modified      int64 // ns since 1970
	changed       int64 // ns since 1970
	mode          uint32
}

func stateOf(f *os.File) (state, error) {
	var st unix.Stat_t
	if err := regular.Again(func() error { return unix.Fstat(int(f.Fd()), &st) }); err != nil {
		return state{}, err
	}
	return state{uint64(st.Dev), st.Ino, st.Size, st.Mtim.Nano(), st.Ctim.Nano(), st.Mode & unix.S_IFMT}, nil
}

// The clock resolution of file systems: two changes within one tick have the same time. The kernel's ticks last
// some milliseconds. Those of servers, and of formats like FAT, last up to two seconds.
const fineTick, coarseTick = 50 * time.Millisecond, 3 * time.Second

// settledState returns the state of a file, and whether every later change will alter it. It waits if one tick
// of the kernel's clock is enough to ensure that.
func settledState(f *os.File) (s state, settled bool, err error) {
	tick := coarseTick
	kind, kindErr := regular.IdentifyFile(int(f.Fd()))
	for waited := false; ; waited = true {
		if s, err = stateOf(f); err != nil {
			return s, false, err
		}
		isLocal := kindErr == nil && (kind.Kind == regular.Disk || kind.Kind == regular.InMemory)
		if isLocal && s.changed%int64(time.Second) != 0 {
			tick = fineTick
		}
		age := time.Since(time.Unix(0, s.changed))
		if age >= tick || age < 0 || waited || tick != fineTick {
			return s, age >= tick, nil
		}
		time.Sleep(tick - age)
	}
}

// entityTag returns the ETag of a state. It is weak if the file could change without a change of its state.
func (s state) entityTag(settled bool) string {
	tag := fmt.Sprintf(`"%x-%x-%x-%x-%x"`, s.size, s.modified, s.changed, s.inode, s.device)
	if !settled {
		tag = "W/" + tag
	}
	return tag
}

var errChanged = errors.New("the file has changed since its ETag was sent")

// A content reads a file in one state. Its reads fail once the state has changed.
type content struct {
	*os.File
	opened state
	err    error // error of the first read that failed
}

func (c *content) Read(p []byte) (int, error) {
	n, err := c.File.Read(p)
	return c.checkRead(n, err)
}

// ReadAt is like Read, at an offset.
func (c *content) ReadAt(p []byte, off int64) (int, error) {
	n, err := c.File.ReadAt(p, off)
	return c.checkRead(n, err)
}

func (c *content) checkRead(n int, err error) (int, error) {
	if now, stateErr := stateOf(c.File); stateErr != nil || now != c.opened {
		err = errChanged
	}
	if err != nil && err != io.EOF {
		c.err, n = err, 0
	}
	return n, err
}

// endSpoiled closes the connection if the response cannot be completed. Otherwise the client of a chunked
// response would not notice that bytes are missing.
func (c *content) endSpoiled() {
	if c.err != nil {
		panic(http.ErrAbortHandler) // net/http recovers it and closes the connection
	}
}
