package redis

// This file bounds what a server's answers say they hold: the library allocates by their
// word, before the first byte has come.

import (
	"bytes"
	"net"
	"strconv"
	"syscall"

	"github.com/overwire/overwire/gosrc/errs"
)

// Bounds of one answer. Requests are for lengths, for at most `step` bytes of a value, for
// some thousand keys, and for what became of each command of a transaction.
const (
	mostLine     = 64 << 10 // of a status, an error, a number or a header
	mostBulk     = step
	mostBytes    = 64 << 20 // of all bulks
	mostElements = 1 << 20  // of all arrays
	mostDepth    = 4
)

// answers is a connection to a server that checks the lengths in its answers, which have
// the version 2 of the protocol, as they pass. It does not look at the contents.
type answers struct {
	net.Conn
	line            []byte // the header that is coming
	skip            int64  // bytes of a bulk and its line end to come
	left            []int  // elements to come, of each open array
	bytes, elements int64  // of the answer
}

// checkAnswers is a connection whose answers are checked. The library asks the system whether
// one that it kept is still there.
func checkAnswers(c net.Conn) net.Conn {
	if s, ok := c.(syscall.Conn); ok {
		return struct {
			*answers
			syscall.Conn
		}{&answers{Conn: c}, s}
	}
	return &answers{Conn: c}
}

// Read reads what has passed the check, or says what has not.
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
			return notRedis("a line of more than %d bytes", mostLine)
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
		return notRedis("a length of %q", a.line[1:min(len(a.line), 32)])
	case kind == '$' && n >= 0:
		if a.bytes += min(n, mostBytes); n > mostBulk || a.bytes > mostBytes {
			return notRedis("%d bytes, of at most %d, and %d in all", n, mostBulk, mostBytes)
		}
		a.skip = n + 2
	case kind == '*' && n > 0:
		if a.elements += min(n, mostElements+1); a.elements > mostElements || len(a.left) == mostDepth {
			return notRedis("%d elements in %d arrays, of at most %d in all, and in %d", n, len(a.left)+1, mostElements,
				mostDepth)
		}
		a.left = append(a.left, int(n))
		return nil
	}
	a.countElement()
	return nil
}

// countElement counts an element that has ended, or the answer.
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
	return errs.New(errs.ErrFormat, "no answer of a Redis server to what was asked: "+format, args...)
}
