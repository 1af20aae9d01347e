package redis

// This file limits the lengths in a server's responses, because the library allocates the announced length
// before the first byte arrives.

import (
	"bytes"
	"net"
	"strconv"
	"syscall"

	"github.com/overwire/overwire/gosrc/errs"
)

// The limits of one response. Requests ask for lengths, for at most `step` bytes of a value, for a few thousand
// keys, or for the results of a transaction's commands.
const (
	mostLine     = 64 << 10 // bytes of a status, an error, a number or a header
	mostBulk     = step
	mostBytes    = 64 << 20 // sum of all bulk strings
	mostElements = 1 << 20  // sum of all arrays
	mostDepth    = 4
)

// answers is a connection that checks the lengths in a server's responses (protocol version 2). It does not
// inspect the contents.
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
