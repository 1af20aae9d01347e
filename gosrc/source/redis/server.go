package redis

// This file connects to Redis servers, and classifies their errors.

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/regular"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/source/retry"
)

// options are the storage options of redis:// and rediss://.
var options = []string{"username", "password", "db", "cacert", "timeout", "connections", "retries"}

// A name says where a file is.
type name struct{ uri, scheme, host, key string }

func parse(uri string) (name, error) {
	scheme, rest, _ := strings.Cut(uri, "://")
	n := name{uri: uri, scheme: strings.ToLower(scheme)}
	var ok bool
	n.host, n.key, ok = strings.Cut(rest, "/")
	if strings.Contains(n.host, "@") || strings.ContainsAny(n.host, "?# \\") {
		return n, n.at("open", -1, errs.New(errs.ErrArgument, "expected redis://host:port/key; credentials go into storage_options"))
	}
	if _, _, err := net.SplitHostPort(n.host); err != nil {
		n.host = net.JoinHostPort(strings.Trim(n.host, "[]"), "6379")
	}
	if host, _, _ := net.SplitHostPort(n.host); !ok || n.key == "" || host == "" || (n.scheme != "redis" && n.scheme != "rediss") {
		return n, n.at("open", -1, errs.New(errs.ErrArgument, "expected redis://host:port/key"))
	}
	return n, nil
}

// URI names the file as the user wrote it.
func (n name) URI() string { return n.uri }

func (n name) at(verb string, off int64, err error) error {
	if err == nil {
		return nil
	}
	var at *errs.At
	if errors.As(err, &at) {
		return err
	}
	return &errs.At{Verb: verb, Source: n.uri, Chunk: -1, Offset: off, Err: err}
}

// A server makes and keeps connections to one Redis. One that has to end is cut in the
// middle of a response: until then the caller's memory is written.
type server struct {
	host               string
	username, password string // password "": none
	db                 int
	tls                *tls.Config // nil: none
	retry              retry.Options
	heard              atomic.Bool // the server has responded once

	mu   sync.Mutex
	idle []*connection
	shut bool
}

// connect checks the options. Connections are made when they are needed.
func connect(n name, opt source.Options) (*server, error) {
	if err := opt.Check(n.scheme, options...); err != nil {
		return nil, err
	}
	db, err := opt.Number("db", 0, 0, 1<<20)
	if err != nil || db != float64(int(db)) {
		return nil, errs.New(errs.ErrArgument, "storage_options: db: expected a whole number")
	}
	s := &server{host: n.host, username: opt.Storage["username"], db: int(db)}
	if s.retry, err = retry.Parse(opt); err != nil {
		return nil, err
	}
	var given bool
	if s.password, given = opt.Storage["password"]; !given {
		s.password = opt.Env["REDISCLI_AUTH"]
	}
	if n.scheme == "rediss" {
		host, _, _ := net.SplitHostPort(n.host)
		s.tls = &tls.Config{ServerName: host, MinVersion: tls.VersionTLS12}
		file := opt.Storage["cacert"]
		if file == "" {
			file = opt.Env["SSL_CERT_FILE"]
		}
		if file != "" {
			pem, err := regular.Read(file, regular.MaxSetting)
			if err != nil {
				return nil, &errs.At{Verb: "open", Source: file, Chunk: -1, Offset: -1, Err: err}
			}
			s.tls.RootCAs = x509.NewCertPool()
			if !s.tls.RootCAs.AppendCertsFromPEM(pem) {
				return nil, errs.New(errs.ErrArgument, "no certificate in %s", file)
			}
		}
	}
	return s, nil
}

func (s *server) tries() int { return max(0, s.retry.Retries) + 1 }

// with runs fn on a connection of its own, and cuts it when ctx ends: when with
// returns, no memory of fn's is in use. The error has a class.
func (s *server) with(ctx context.Context, fn func(*connection) error) error {
	c, err := s.take(ctx)
	if err != nil {
		return classify(ctx, err)
	}
	stop := context.AfterFunc(ctx, c.cut)
	err = fn(c)
	if !stop() || err != nil {
		c.cut() // by ctx, too; or replies may be left
	} else {
		s.put(c)
	}
	return classify(ctx, err)
}

// take is an idle connection, or a new one.
func (s *server) take(ctx context.Context) (*connection, error) {
	for {
		s.mu.Lock()
		shut, n := s.shut, len(s.idle)
		var c *connection
		if n > 0 {
			c = s.idle[n-1]
			s.idle = s.idle[:n-1]
		}
		s.mu.Unlock()
		switch {
		case shut:
			return nil, errs.New(errs.ErrArgument, "the source is closed")
		case c == nil:
			return s.dial(ctx)
		case c.alive():
			return c, nil
		}
		c.cut()
	}
}

// dial makes a connection that the server takes requests from.
func (s *server) dial(ctx context.Context) (*connection, error) {
	ctx, cancel := context.WithTimeout(ctx, min(s.retry.Timeout, 15*time.Second))
	defer cancel()
	conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", s.host)
	if err != nil {
		return nil, err
	}
	if s.tls != nil {
		t := tls.Client(conn, s.tls)
		if err := t.HandshakeContext(ctx); err != nil {
			_ = conn.Close()
			return nil, err
		}
		conn = t
	}
	c := newConnection(conn, s.retry.Timeout)
	stop := context.AfterFunc(ctx, c.cut)
	err = s.greet(c)
	if !stop() { // then err is that of a closed connection
		err = ctx.Err()
	}
	if err != nil {
		c.cut()
		return nil, err
	}
	return c, nil
}

// greet gives the password and chooses the db.
func (s *server) greet(c *connection) error {
	if s.password != "" {
		err := c.do("auth", cmp.Or(s.username, "default"), s.password)
		if refused(err) && s.username == "" && !strings.HasPrefix(err.Error(), "WRONGPASS") {
			err = c.do("auth", s.password) // before Redis 6, which has users
		}
		if err != nil {
			return err
		}
	}
	if s.db == 0 {
		return nil
	}
	return c.do("select", strconv.Itoa(s.db))
}

func (s *server) put(c *connection) {
	s.mu.Lock()
	if !s.shut {
		s.idle = append(s.idle, c)
		c = nil
	}
	s.mu.Unlock()
	if c != nil {
		c.cut()
	}
}

// close closes idle connections; those in use are closed after it.
func (s *server) close() {
	s.mu.Lock()
	idle := s.idle
	s.idle, s.shut = nil, true
	s.mu.Unlock()
	for _, c := range idle {
		c.cut()
	}
}

// says classifies responses of servers by their first word.
var says = map[string]struct {
	class error
	text  string
}{
	"NOAUTH":      {errs.ErrPermission, "the server asks for a password"},
	"WRONGPASS":   {errs.ErrPermission, "wrong user or password"},
	"NOPERM":      {errs.ErrPermission, "the user may not do this"},
	"READONLY":    {errs.ErrPermission, "the server is a replica that cannot be written"},
	"WRONGTYPE":   {errs.ErrFormat, "the key holds something else than a string"},
	"OOM":         {errs.ErrIO, "the server's memory is full"},
	"MOVED":       {errs.ErrNotSupported, "the server is part of a cluster and does not hold this key"},
	"ASK":         {errs.ErrNotSupported, "the server is part of a cluster and is giving this key away"},
	"CROSSSLOT":   {errs.ErrNotSupported, "the server is part of a cluster"},
	"LOADING":     {errs.ErrIO, "the server is starting"},
	"BUSY":        {errs.ErrIO, "the server is busy"},
	"MASTERDOWN":  {errs.ErrIO, "the server has lost its master"},
	"TRYAGAIN":    {errs.ErrIO, "the server is busy"},
	"CLUSTERDOWN": {errs.ErrIO, "the cluster is down"},
	"EXECABORT":   {errs.ErrIO, "the transaction was refused"},
}

// classify gives an error its class, and a text without what was
// sent.
func classify(ctx context.Context, err error) error {
	var r fault
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
				s.text += "; " + strconv.Quote(f[2]) + " does"
			}
			return &answer{s.class, word, s.text}
		}
		if strings.Contains(r.Error(), "AUTH") || strings.Contains(r.Error(), "password") {
			return &answer{errs.ErrPermission, "ERR", "the server takes no such user or password"}
		}
		if strings.Contains(r.Error(), "DB index") {
			return &answer{errs.ErrArgument, "ERR", "the server has no such db"}
		}
		return &answer{errs.ErrIO, "ERR", "the server refused"}
	case errors.As(err, &cert):
		return errs.New(errs.ErrPermission, "the server's certificate is not trusted: %v", cert.Err)
	case errors.As(err, &ne) && ne.Timeout(), errors.Is(err, os.ErrDeadlineExceeded):
		return errs.New(errs.ErrTimeout, "the server did not answer in time")
	case errors.As(err, &dns):
		return errs.New(errs.ErrIO, "the server's name %s is not known to DNS", strconv.Quote(dns.Name))
	case errors.As(err, &op):
		return errs.New(errs.ErrIO, "%s: %v", op.Op, op.Err)
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, net.ErrClosed):
		return errs.New(errs.ErrIO, "the connection was closed")
	}
	return errs.New(errs.ErrIO, "%v", err)
}

// An answer is a server's refusal.
type answer struct {
	class      error
	word, text string
}

func (a *answer) Error() string { return a.class.Error() + ": " + a.word + ": " + a.text }
func (a *answer) Unwrap() error { return a.class }

// judge says what an error means for a retry.
func judge(err error) (retry.Verdict, time.Duration) {
	var a *answer
	if errors.As(err, &a) {
		switch a.word {
		case "LOADING", "BUSY", "MASTERDOWN", "TRYAGAIN", "CLUSTERDOWN":
			return retry.Busy, 200 * time.Millisecond
		}
		return retry.Never, 0
	}
	if errors.Is(err, errs.ErrIO) || errors.Is(err, errs.ErrTimeout) {
		return retry.Again, 0
	}
	return retry.Never, 0
}
