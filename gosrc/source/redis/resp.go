package redis

// This file speaks Redis' protocol, RESP 2, on one connection.
//
// A request is *N and N texts, a text $LENGTH and its bytes. A reply is +WORD, -ERROR,
// :NUMBER, a text ($-1: none), or *N and N replies (*-1: none). Each line, and the bytes
// of a text, end with CR LF. Replies come in the order of the requests
// (https://redis.io/docs/latest/develop/reference/protocol-spec/).

import (
	"bufio"
	"cmp"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// most is how many values one file may have.
const most = 1 << 20

// A fault is what a server responds if it refuses a request.
type fault string

func (f fault) Error() string { return string(f) }

// refused reports whether err is a response of the server.
func refused(err error) bool {
	_, ok := errors.AsType[fault](err)
	return ok
}

// errReply says that a server does not keep to the protocol. Its connection is of no use
// any more.
var errReply = errors.New("the server's answer is none of Redis")

// longest bounds a text that is read into memory of its own: a key, a report.
const longest = 1 << 20

// Replies are read from a server. Memory that is allocated is bounded whatever it sends.
type replies struct{ from *bufio.Reader }

// line reads a line of one of these kinds, without the kind and the end. What it returns
// is valid until the next read.
func (r replies) line(kinds string) ([]byte, error) {
	b, err := r.from.ReadSlice('\n')
	switch {
	case errors.Is(err, bufio.ErrBufferFull):
		return nil, errReply
	case err != nil:
		return nil, err
	case len(b) < 3 || b[len(b)-2] != '\r':
		return nil, errReply
	}
	rest := b[1 : len(b)-2]
	switch {
	case b[0] == '-':
		return nil, fault(rest)
	case strings.IndexByte(kinds, b[0]) < 0:
		return nil, errReply
	}
	return rest, nil
}

// count reads the number of a line of this kind: lowest to highest.
func (r replies) count(kind string, lowest, highest int64) (int64, error) {
	b, err := r.line(kind)
	if err != nil {
		return 0, err
	}
	n, err := strconv.ParseInt(string(b), 10, 64)
	if err != nil || n < lowest || n > highest {
		return 0, errReply
	}
	return n, nil
}

// number reads a number that is not negative.
func (r replies) number() (int64, error) { return r.count(":", 0, 1<<62) }

// word reads what a server responds to a request that gives nothing back: OK.
func (r replies) word() error {
	_, err := r.line("+")
	return err
}

// text reads a text.
func (r replies) text() (string, error) {
	n, err := r.count("$", 0, longest)
	if err != nil {
		return "", err
	}
	b := make([]byte, n)
	if _, err := io.ReadFull(r.from, b); err != nil {
		return "", err
	}
	return string(b), r.end()
}

// into reads a text of at most len(p) bytes into p.
func (r replies) into(p []byte) (int, error) {
	n, err := r.count("$", 0, int64(len(p)))
	if err != nil {
		return 0, err
	}
	if _, err := io.ReadFull(r.from, p[:n]); err != nil {
		return 0, err
	}
	return int(n), r.end()
}

// end reads the end of a text.
func (r replies) end() error {
	for _, want := range []byte("\r\n") {
		if c, err := r.from.ReadByte(); err != nil || c != want {
			return errors.Join(err, errReply)
		}
	}
	return nil
}

// keys reads what SCAN gives: where it goes on, and keys.
func (r replies) keys() (next string, keys []string, err error) {
	if _, err = r.count("*", 2, 2); err != nil {
		return "", nil, err
	}
	if next, err = r.text(); err != nil {
		return "", nil, err
	}
	n, err := r.count("*", 0, most)
	for ; err == nil && n > 0; n-- {
		var key string
		key, err = r.text()
		keys = append(keys, key)
	}
	return next, keys, err
}

// results reads what EXEC gives, one word or number for each request; the error is the
// first of theirs.
func (r replies) results(n int) error {
	if _, err := r.count("*", int64(n), int64(n)); err != nil {
		return err
	}
	var first error
	for range n {
		if _, err := r.line("+:"); err != nil && !refused(err) {
			return err
		} else if first == nil {
			first = err
		}
	}
	return first
}

// A connection sends requests and reads their replies. One goroutine uses it; cut may be
// called at any time, and ends what that one waits for. After an error it is of no use:
// replies may be left.
type connection struct {
	net.Conn
	replies
	to *bufio.Writer
}

// newConnection has small buffers: the bytes of large texts pass them by.
func newConnection(conn net.Conn, wait time.Duration) *connection {
	c := &connection{Conn: conn}
	c.from, c.to = bufio.NewReaderSize(patient{c, wait}, 16<<10), bufio.NewWriterSize(patient{c, wait}, 16<<10)
	return c
}

func (c *connection) cut() { _ = c.Close() }

// send adds a request, of texts and at the end perhaps bytes. Reading its reply sends it,
// and reports if that fails.
func (c *connection) send(last []byte, words ...string) {
	n := len(words)
	if last != nil {
		n++
	}
	c.head('*', n)
	for _, w := range words {
		c.head('$', len(w))
		_, _ = c.to.WriteString(w + "\r\n")
	}
	if last != nil {
		c.head('$', len(last))
		_, _ = c.to.Write(last)
		_, _ = c.to.WriteString("\r\n")
	}
}

func (c *connection) head(kind byte, n int) {
	b := strconv.AppendInt(append(c.to.AvailableBuffer(), kind), int64(n), 10)
	_, _ = c.to.Write(append(b, "\r\n"...))
}

// do sends a request that gives nothing back.
func (c *connection) do(words ...string) error {
	c.send(nil, words...)
	return c.word()
}

// ask sends a request that gives a number.
func (c *connection) ask(words ...string) (int64, error) {
	c.send(nil, words...)
	return c.number()
}

// transaction sends requests, each of which gives a word or a number, of which the server
// does all or none.
func (c *connection) transaction(requests [][]string) error {
	c.send(nil, "multi")
	for _, words := range requests {
		c.send(nil, words...)
	}
	c.send(nil, "exec")
	var first error
	for range 1 + len(requests) { // OK, and QUEUED for each
		if err := c.word(); err != nil && !refused(err) {
			return err
		} else if first == nil {
			first = err
		}
	}
	return cmp.Or(first, c.results(len(requests)))
}

// alive reports whether an idle connection can be used: the server has not closed it.
func (c *connection) alive() bool {
	conn := c.Conn
	if t, ok := conn.(*tls.Conn); ok {
		conn = t.NetConn()
	}
	at, ok := conn.(syscall.Conn)
	if !ok || conn.SetReadDeadline(time.Time{}) != nil {
		return false
	}
	raw, err := at.SyscallConn()
	if err != nil {
		return false
	}
	quiet := false
	err = raw.Read(func(fd uintptr) bool {
		_, _, err := unix.Recvfrom(int(fd), make([]byte, 1), unix.MSG_PEEK|unix.MSG_DONTWAIT)
		quiet = err == unix.EAGAIN
		return true
	})
	return err == nil && quiet
}

// A patient connection sends what was added before it waits for replies, and waits only
// so long for a byte to arrive, or for bytes to be taken.
type patient struct {
	*connection
	wait time.Duration
}

func (p patient) Read(b []byte) (int, error) {
	if err := p.to.Flush(); err != nil {
		return 0, err
	}
	if err := p.SetReadDeadline(time.Now().Add(p.wait)); err != nil {
		return 0, err
	}
	return p.Conn.Read(b)
}

func (p patient) Write(b []byte) (int, error) {
	if err := p.SetWriteDeadline(time.Now().Add(p.wait)); err != nil {
		return 0, err
	}
	return p.Conn.Write(b)
}
