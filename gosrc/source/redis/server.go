package redis

// This file connects to Redis servers, limits the lengths in their responses, and classifies their errors.

import (
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"net/url"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/source/retry"
	"github.com/overwire/overwire/gosrc/source/route"
	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"
)

// options are the storage options of redis:// and rediss://.
var options = []string{"username", "password", "db", "cacert", "timeout", "connections", "retries"}

type name struct {
	uri, scheme, host, key string
	user, password         string // from the URI
}

// parseURI splits redis://user:password@host:port/key. Everything except host and key is optional.
func parseURI(uri string) (name, error) {
	scheme, rest, _ := strings.Cut(uri, "://")
	n := name{uri: uri, scheme: strings.ToLower(scheme)}
	var ok bool
	n.host, n.key, ok = strings.Cut(rest, "/")
	at := strings.LastIndexByte(n.host, '@')
	user, password, _ := strings.Cut(n.host[:max(0, at)], ":")
	n.host = n.host[at+1:]
	var err, passwordErr error
	n.user, err = url.PathUnescape(user)
	n.password, passwordErr = url.PathUnescape(password)
	if err != nil || passwordErr != nil || strings.ContainsAny(n.host, "?# \\") {
		return n, n.placeError("open", -1, errs.New(errs.ErrArgument, "expected redis://user:password@host:port/key; "+
			"in user and password, write %%25, %%2F and %%40 for %%, / and @, or use storage_options"))
	}
	if _, port, err := net.SplitHostPort(n.host); err != nil {
		n.host = net.JoinHostPort(strings.Trim(n.host, "[]"), "6379")
	} else if strings.Trim(port, "0123456789") != "" { // part of a password with an unescaped slash
		ok = false
	}
	if host, _, _ := net.SplitHostPort(n.host); !ok || n.key == "" || host == "" ||
		(n.scheme != "redis" && n.scheme != "rediss") {
		return n, n.placeError("open", -1, errs.New(errs.ErrArgument, "expected redis://host:port/key"))
	}
	return n, nil
}

// URI returns the file's name as the user wrote it.
func (n name) URI() string { return n.uri }

func (n name) placeError(verb string, off int64, err error) error {
	return errs.Place(verb, n.uri, "", off, err)
}

// A server creates and caches connections to one Redis server. A connection can be closed in the middle of a
// response. This is necessary because the library only checks its context between responses and otherwise keeps
// writing to the caller's memory.
type server struct {
	opt   redis.Options
	retry retry.Options
	heard atomic.Bool // the server has responded at least once

	mu   sync.Mutex
	idle []*connection
	shut bool
}

type connection struct {
	client *redis.Client
	mu     sync.Mutex
	conn   net.Conn
}

// cutOff closes the connection, which aborts the current command.
func (l *connection) cutOff() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.conn != nil {
		_ = l.conn.Close()
	}
}

var quiet sync.Once

type silence struct{}

func (silence) Printf(context.Context, string, ...interface{}) {}

// newServer checks the options. It does not connect yet.
func newServer(n name, opt source.Options) (*server, error) {
	if err := opt.Check(n.scheme, options...); err != nil {
		return nil, err
	}
	db, err := opt.Number("db", 0, 0, 1<<20)
	if err != nil || db != float64(int(db)) {
		return nil, errs.New(errs.ErrArgument, "storage_options: db: expected an integer")
	}
	s := &server{}
	if s.retry, err = retry.Parse(opt); err != nil {
		return nil, err
	}
	user := cmp.Or(opt.Storage["username"], n.user)
	password, isGiven := opt.Storage["password"]
	if !isGiven {
		password = cmp.Or(n.password, opt.Env["REDISCLI_AUTH"])
	}
	quiet.Do(func() { redis.SetLogger(silence{}) }) // the library would write to stderr
	s.opt = redis.Options{
		Addr: n.host, Username: user, Password: password, DB: int(db),
		Protocol: 2, MaxRetries: -1, DialerRetries: 1, PoolSize: 1, DisableIdentity: true, ContextTimeoutEnabled: true,
		DialTimeout: min(s.retry.Timeout, 15*time.Second), ReadTimeout: s.retry.Timeout, WriteTimeout: s.retry.Timeout,
		ReadBufferSize: 256 << 10, WriteBufferSize: 64 << 10,
		// Without an endpoint type, the library determines one by a DNS query.
		MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled,
			EndpointType: maintnotifications.EndpointTypeNone},
	}
	if n.scheme == "rediss" {
		host, _, _ := net.SplitHostPort(n.host)
		s.opt.TLSConfig = &tls.Config{ServerName: host, MinVersion: tls.VersionTLS12}
		if s.opt.TLSConfig.RootCAs, err = route.Named(opt.Storage["cacert"], "", opt.Env).Roots(); err != nil {
			return nil, err
		}
	}
	return s, nil
}

// with runs fn with exclusive use of a connection, which it closes when ctx ends. Once with returns, fn's
// memory is no longer in use. The error has a class.
func (s *server) with(ctx context.Context, fn func(context.Context, *redis.Client) error) error {
	l, err := s.takeConnection()
	if err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, l.cutOff)
	err = fn(ctx, l.client)
	_, response := errors.AsType[redis.Error](err)
	if !stop() || err != nil && !response && !errs.Classed(err) {
		l.dropConnection() // closed, or in an unknown state
	} else {
		s.putConnection(l)
	}
	return classifyError(ctx, err)
}

func (s *server) takeConnection() (*connection, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.shut {
		return nil, errs.New(errs.ErrArgument, "the source is closed")
	}
	if n := len(s.idle); n > 0 {
		l := s.idle[n-1]
		s.idle = s.idle[:n-1]
		return l, nil
	}
	l := &connection{}
	opt := s.opt
	dial := redis.NewDialer(&opt)
	opt.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
		c, err := dial(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		l.mu.Lock()
		l.conn = c
		l.mu.Unlock()
		return checkAnswers(c), nil
	}
	l.client = redis.NewClient(&opt)
	return l, nil
}

func (s *server) putConnection(l *connection) {
	s.mu.Lock()
	if !s.shut {
		s.idle = append(s.idle, l)
		l = nil
	}
	s.mu.Unlock()
	if l != nil {
		l.dropConnection()
	}
}

func (l *connection) dropConnection() {
	l.cutOff()
	_ = l.client.Close()
}

// closeIdle closes idle connections immediately and busy connections after use.
func (s *server) closeIdle() {
	s.mu.Lock()
	idle := s.idle
	s.idle, s.shut = nil, true
	s.mu.Unlock()
	for _, l := range idle {
		l.dropConnection()
	}
}

// says classifies error responses by their first word.
var says = map[string]struct {
	class error
	text  string
}{
	"NOAUTH":    {errs.ErrPermission, "the server requires a password"},
	"WRONGPASS": {errs.ErrPermission, "wrong user or password"},
	"NOPERM":    {errs.ErrPermission, "the user has no permission to do this"},
	"READONLY":  {errs.ErrPermission, "the server is a read-only replica"},
	"WRONGTYPE": {errs.ErrFormat, "the key holds a value that is not a string"},
	"OOM":       {errs.ErrIO, "the server's memory is full"},
	"MOVED":     {errs.ErrNotSupported, "the server is part of a cluster, and this key is on another server"},
	"ASK":       {errs.ErrNotSupported, "the server is part of a cluster and is moving this key to another server"},
	"CROSSSLOT": {errs.ErrNotSupported,
		"the server is part of a cluster, and the keys of this file are on several servers"},
	"LOADING":     {errs.ErrIO, "the server is starting"},
	"BUSY":        {errs.ErrIO, "the server is busy"},
	"MASTERDOWN":  {errs.ErrIO, "the server has lost its master"},
	"TRYAGAIN":    {errs.ErrIO, "the server is busy"},
	"CLUSTERDOWN": {errs.ErrIO, "the cluster is down"},
	"EXECABORT":   {errs.ErrIO, "the transaction was refused"},
}

// classifyError returns an error of the library with its class and a text that does not contain request data.
func classifyError(ctx context.Context, err error) error {
	var r redis.Error
	var cert *tls.CertificateVerificationError
	var op *net.OpError
	var dns *net.DNSError
	var ne net.Error
	switch {
	case err == nil || errs.Classed(err) && ctx.Err() == nil:
		return err
	case ctx.Err() != nil:
		return errs.FromOS(context.Cause(ctx))
	case errors.As(err, &r):
		word, _, _ := strings.Cut(r.Error(), " ")
		if s, ok := says[word]; ok {
			if f := strings.Fields(r.Error()); word == "MOVED" && len(f) == 3 {
				s.text += ", " + strconv.Quote(f[2])
			}
			return &answer{s.class, word, s.text}
		}
		if strings.Contains(r.Error(), "AUTH") || strings.Contains(r.Error(), "password") {
			return &answer{errs.ErrPermission, "ERR", "the server rejected the user or password"}
		}
		for _, words := range []string{"bulk length", "maximum allowed size", "request size"} {
			if strings.Contains(r.Error(), words) {
				return errLarge
			}
		}
		if strings.Contains(r.Error(), "DB index") {
			return &answer{errs.ErrArgument, "ERR", "the server does not have this db"}
		}
		return &answer{errs.ErrIO, "ERR", "the server refused the command"}
	case errors.As(err, &cert):
		return errs.New(errs.ErrPermission, "the server's certificate is not trusted: %v", cert.Err)
	case errors.As(err, &ne) && ne.Timeout(), errors.Is(err, os.ErrDeadlineExceeded):
		return errs.New(errs.ErrTimeout, "the server did not respond in time")
	case errors.As(err, &dns):
		return errs.New(errs.ErrIO, "the server's name %s cannot be resolved", strconv.Quote(dns.Name))
	case errors.As(err, &op):
		return errs.New(errs.ErrIO, "%s: %v", op.Op, op.Err)
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, net.ErrClosed):
		return errs.New(errs.ErrIO, "the connection was closed")
	}
	return errs.New(errs.ErrIO, "%v", err)
}

// An answer is an error response of a server.
type answer struct {
	class      error
	word, text string
}

func (a *answer) Error() string { return a.class.Error() + ": " + a.word + ": " + a.text }
func (a *answer) Unwrap() error { return a.class }

func judgeError(err error) (retry.Verdict, time.Duration) {
	if a, ok := errors.AsType[*answer](err); ok {
		switch a.word {
		case "LOADING", "BUSY", "MASTERDOWN", "TRYAGAIN", "CLUSTERDOWN":
			return retry.Busy, 200 * time.Millisecond
		}
		return retry.Never, 0
	}
	switch {
	case errors.Is(err, errs.ErrIO), errors.Is(err, errs.ErrTimeout):
		return retry.Again, 0
	case errors.Is(err, errs.ErrCorrupt):
		return retry.Changed, 0
	}
	return retry.Never, 0
}

// The limits of one response. Requests ask for lengths, for at most `step` bytes of a value, for a few thousand
// keys, or for the results of a transaction's commands.
const (
	mostLine     = 64 << 10 // bytes of a status, an error, a number or a header
	mostBulk     = step
	mostBytes    = 64 << 20 // sum of all bulk strings
	mostElements = 1 << 20  // sum of all arrays
	mostDepth    = 4
)

// answers is a connection that checks the lengths in a server's responses (protocol version 2), because the library
// allocates the announced length before the first byte arrives. It does not inspect the contents.
type answers struct {
	net.Conn
	line            []byte // the header that is being read
	skip            int64  // remaining bytes of a bulk string, including its line end
	left            []int  // remaining elements of each open array
	bytes, elements int64  // in the current response
}

// checkAnswers returns a connection that checks its responses. It preserves access to the system's connection,
// with which the library tests whether an idle connection is still alive.
func checkAnswers(c net.Conn) net.Conn {
	if s, ok := c.(syscall.Conn); ok {
		return struct {
			*answers
			syscall.Conn
		}{&answers{Conn: c}, s}
	}
	return &answers{Conn: c}
}

// Read returns checked bytes, or an error that describes the invalid length.
func (a *answers) Read(p []byte) (int, error) {
	n, err := a.Conn.Read(p)
	if bad := a.checkBytes(p[:n]); bad != nil {
		return 0, bad
	}
	return n, err
}

func (a *answers) checkBytes(b []byte) error {
	for len(b) > 0 {
		if a.skip > 0 {
			n := min(a.skip, int64(len(b)))
			a.skip -= n
			b = b[n:]
			continue
		}
		n := bytes.IndexByte(b, '\n') + 1
		whole := n > 0
		if !whole {
			n = len(b)
		}
		if len(a.line)+n > mostLine {
			return notRedis("a line has more than %d bytes", mostLine)
		}
		a.line = append(a.line, b[:n]...)
		b = b[n:]
		if whole {
			if err := a.takeLine(); err != nil {
				return err
			}
			a.line = a.line[:0]
		}
	}
	return nil
}

func (a *answers) takeLine() error {
	kind := a.line[0]
	switch kind {
	case '+', '-', ':':
		a.countElement()
		return nil
	case '$', '*':
	default:
		return notRedis("it begins with %q", kind)
	}
	n, err := strconv.ParseInt(string(bytes.TrimSpace(a.line[1:])), 10, 64)
	switch {
	case err != nil || n < -1:
		return notRedis("invalid length %q", a.line[1:min(len(a.line), 32)])
	case kind == '$' && n >= 0:
		if a.bytes += min(n, mostBytes); n > mostBulk || a.bytes > mostBytes {
			return notRedis("got a value of %d bytes: expected at most %d, and at most %d in all", n, mostBulk,
				mostBytes)
		}
		a.skip = n + 2
	case kind == '*' && n > 0:
		if a.elements += min(n, mostElements+1); a.elements > mostElements || len(a.left) == mostDepth {
			return notRedis(
				"got an array of %d elements at depth %d: expected at most %d elements in all, and depth %d",
				n, len(a.left)+1, mostElements, mostDepth)
		}
		a.left = append(a.left, int(n))
		return nil
	}
	a.countElement()
	return nil
}

// countElement counts a complete element. After the last element of an array, it also counts the array.
func (a *answers) countElement() {
	for k := len(a.left) - 1; k >= 0; k-- {
		if a.left[k]--; a.left[k] > 0 {
			return
		}
		a.left = a.left[:k]
	}
	a.bytes, a.elements = 0, 0
}

func notRedis(format string, args ...any) error {
	return errs.New(errs.ErrFormat, "invalid response from a Redis server: "+format, args...)
}
