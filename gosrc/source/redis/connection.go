package redis

// This file is a connection to a Redis server.
//
// It speaks RESP2, which every Redis server and its relatives understand
// (redis.io/docs/latest/develop/reference/protocol-spec). A request is an array of
// strings. Several requests may go out together; their replies come back in the same
// order:
//
//	+text\r\n              a status
//	-WORD text\r\n         a refusal
//	:number\r\n            a number
//	$length\r\nbytes\r\n   a string; length -1 means that there is none
//	*count\r\nreplies      a list; count -1 means that there is none
//
// Every reply has to be read whole before the next one. After any error that is not a
// refusal the connection is useless.

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"slices"
	"strconv"
	"time"
)

// Limits of replies other than the bytes of values.
const (
	maxReply = 64 << 20 // bytes of one reply; an element of a list counts as 16 and its own
	maxDepth = 3        // lists in lists
	maxLine  = 16 << 10 // a line; also the size of the buffer that replies are read through
)

const (
	window   = 1 << 20 // bytes of one write; each has the whole time-out
	together = 1024    // requests that are sent before their replies are read
)

// A connection is used by one goroutine at a time. cut may be called by any.
type connection struct {
	conn      net.Conn
	limit     time.Duration // for one read or write
	in        *bufio.Reader
	out       []byte // requests that have not been sent
	idleSince time.Time
}

// A refusal is an error that the server sent as a reply.
type refusal string

func (r refusal) Error() string { return string(r) }

// errProtocol has no class, since the connection is useless after it; classify gives one.
var errProtocol = errors.New("the server's reply does not follow Redis's protocol")

// dial connects to a server, and authenticates.
func (s *server) dial(ctx context.Context) (*connection, error) {
	limit := min(s.retry.Timeout, 15*time.Second)
	timed, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	conn, err := (&net.Dialer{Timeout: limit}).DialContext(timed, "tcp", s.addr)
	if err != nil {
		return nil, err
	}
	if s.tls != nil {
		secure := tls.Client(conn, s.tls)
		if err := secure.HandshakeContext(timed); err != nil {
			_ = conn.Close()
			return nil, err
		}
		conn = secure
	}
	c := &connection{conn: conn, limit: s.retry.Timeout}
	c.in = bufio.NewReaderSize(c, maxLine)
	stop := context.AfterFunc(ctx, c.cut)
	err = s.login(c)
	if !stop() || err != nil {
		c.cut()
		return nil, errors.Join(err, ctx.Err())
	}
	return c, nil
}

// login names the user and selects the database.
func (s *server) login(c *connection) error {
	var requests [][]string
	if s.username != "" && s.password != "" {
		requests = append(requests, []string{"AUTH", s.username, s.password})
	} else if s.password != "" {
		requests = append(requests, []string{"AUTH", s.password})
	}
	if s.db > 0 {
		requests = append(requests, []string{"SELECT", strconv.Itoa(s.db)})
	}
	_, err := c.do(requests...)
	return err
}

// cut ends what the connection is doing.
func (c *connection) cut() { _ = c.conn.Close() }

// Read reads from the server, within the time-out.
func (c *connection) Read(p []byte) (int, error) {
	if err := c.conn.SetReadDeadline(time.Now().Add(c.limit)); err != nil {
		return 0, err
	}
	return c.conn.Read(p)
}

// write sends bytes; the time-out is for each window.
func (c *connection) write(p []byte) error {
	for len(p) > 0 {
		if err := c.conn.SetWriteDeadline(time.Now().Add(c.limit)); err != nil {
			return err
		}
		n, err := c.conn.Write(p[:min(len(p), window)])
		if err != nil {
			return err
		}
		p = p[n:]
	}
	return nil
}

// ask adds a request to those that flush sends.
func (c *connection) ask(args ...string) {
	c.header('*', len(args))
	c.words(args...)
}

func (c *connection) words(args ...string) {
	for _, a := range args {
		c.header('$', len(a))
		c.out = append(append(c.out, a...), "\r\n"...)
	}
}

func (c *connection) header(kind byte, n int) {
	c.out = append(strconv.AppendInt(append(c.out, kind), int64(n), 10), "\r\n"...)
}

// flush sends the requests.
func (c *connection) flush() error {
	err := c.write(c.out)
	c.out = c.out[:0]
	return err
}

// do sends requests and returns their replies. If the server refuses some, the error is
// the first refusal, and all replies have been read.
func (c *connection) do(requests ...[]string) ([]reply, error) {
	var replies []reply
	var refused error
	for some := range slices.Chunk(requests, together) {
		for _, r := range some {
			c.ask(r...)
		}
		if err := c.flush(); err != nil {
			return nil, err
		}
		for range some {
			r, err := c.reply()
			if err != nil {
				return nil, err
			}
			if refused == nil {
				refused = r.refused()
			}
			replies = append(replies, r)
		}
	}
	return replies, refused
}

// transaction sends requests that the server runs all or none of.
func (c *connection) transaction(requests [][]string) error {
	_, err := c.do(slices.Concat([][]string{{"MULTI"}}, requests, [][]string{{"EXEC"}})...)
	return err
}

// number sends one request whose reply is a number.
func (c *connection) number(request ...string) (int64, error) {
	r, err := c.do(request)
	if err != nil {
		return 0, err
	}
	return r[0].number()
}

// set stores a value that expires.
func (c *connection) set(key string, value []byte, expires time.Duration) error {
	c.header('*', 5)
	c.words("SET", key)
	c.header('$', len(value))
	if err := c.flush(); err != nil {
		return err
	}
	if err := c.write(value); err != nil { // without a copy of it
		return err
	}
	c.out = append(c.out, "\r\n"...)
	c.words("EX", strconv.Itoa(int(expires/time.Second)))
	if err := c.flush(); err != nil {
		return err
	}
	r, err := c.reply()
	if err != nil {
		return err
	}
	return r.refused()
}

// into reads the reply to a request of bytes into p, and reports how many the server
// sent: other than len(p) if the value was changed.
func (c *connection) into(p []byte) (int, error) {
	line, err := c.line()
	if err != nil {
		return 0, err
	}
	switch line[0] {
	case '-':
		return 0, refusal(line[1:])
	case '$':
	default:
		return 0, errProtocol
	}
	n, err := count(line)
	if err != nil || n > int64(len(p)) {
		return 0, errProtocol
	}
	if n < 0 {
		return 0, nil
	}
	if _, err := io.ReadFull(c.in, p[:n]); err != nil {
		return 0, err
	}
	return int(n), c.lineEnd()
}

// A reply is what the server says to one request other than one of bytes.
type reply struct {
	kind byte // the first of the line
	n    int64
	text string
	list []reply
}

// refused is the refusal in a reply, or nil. In the reply to a transaction each request
// has its own.
func (r reply) refused() error {
	if r.kind == '-' {
		return refusal(r.text)
	}
	for _, one := range r.list {
		if err := one.refused(); err != nil {
			return err
		}
	}
	return nil
}

func (r reply) number() (int64, error) {
	if r.kind != ':' {
		return 0, errProtocol
	}
	return r.n, nil
}

// reply reads the next reply.
func (c *connection) reply() (reply, error) {
	left := int64(maxReply)
	return c.nested(&left, 0)
}

// nested reads a reply whose strings have up to left bytes.
func (c *connection) nested(left *int64, depth int) (reply, error) {
	line, err := c.line()
	if err != nil {
		return reply{}, err
	}
	r := reply{kind: line[0]}
	switch r.kind {
	case '+', '-':
		r.text = string(line[1:])
		return r, nil
	case ':', '$', '*':
	default:
		return r, errProtocol
	}
	if r.n, err = count(line); err != nil || r.kind == ':' || r.n < 0 {
		return r, err
	}
	size := r.n
	if r.kind == '*' && size <= maxReply {
		size *= 16
	}
	if *left -= size; *left < 0 || depth == maxDepth {
		return r, errProtocol
	}
	if r.kind == '$' {
		text := make([]byte, r.n)
		if _, err := io.ReadFull(c.in, text); err != nil {
			return r, err
		}
		r.text = string(text)
		return r, c.lineEnd()
	}
	for n := r.n; n > 0; n-- {
		one, err := c.nested(left, depth+1)
		if err != nil {
			return r, err
		}
		r.list = append(r.list, one)
	}
	return r, nil
}

// line reads a line that has at least one byte. It is valid until the next read.
func (c *connection) line() ([]byte, error) {
	line, err := c.in.ReadSlice('\n')
	if errors.Is(err, bufio.ErrBufferFull) {
		return nil, errProtocol
	}
	if err != nil {
		return nil, err
	}
	line, ok := bytes.CutSuffix(line, []byte("\r\n"))
	if !ok || len(line) == 0 {
		return nil, errProtocol
	}
	return line, nil
}

func (c *connection) lineEnd() error {
	var end [2]byte
	if _, err := io.ReadFull(c.in, end[:]); err != nil {
		return err
	}
	if end != [2]byte{'\r', '\n'} {
		return errProtocol
	}
	return nil
}

// count is the number in a line after its first byte.
func count(line []byte) (int64, error) {
	n, err := strconv.ParseInt(string(line[1:]), 10, 64)
	if err != nil {
		return 0, errProtocol
	}
	return n, nil
}
