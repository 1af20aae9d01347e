package safetensors

// This file scans JSON token by token.

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/bits"
	"sort"
	"strconv"
	"unicode/utf16"
	"unicode/utf8"

	"github.com/overwire/overwire/gosrc/errs"
)

// A scanner reads JSON that is known to be UTF-8. After a method has set err and returned false, the scanner must not
// be used.
type scanner struct {
	b       []byte
	p       int // next byte
	bad     int // offset of the error
	err     error
	lenient bool
	scratch []byte // the last string with escapes, decoded
	keys    []span // keys of the ignored objects that are being read
}

type span struct{ lo, hi uint32 } // a range of b, which is smaller than 2^32

// failWith records an error, unless there already is one, and returns false.
func (s *scanner) failWith(format string, args ...any) bool {
	if s.err == nil {
		s.bad = min(s.p, len(s.b))
		s.err = errs.OfRule("InvalidHeaderDeserialization", errs.ErrFormat, "malformed header: %s",
			fmt.Sprintf(format, args...))
	}
	return false
}

func isSpace(c byte) bool { return c == ' ' || c == '\n' || c == '\t' || c == '\r' }

// space skips whitespace and returns the next byte, or 0 at the end.
func (s *scanner) space() byte {
	for s.p < len(s.b) {
		if c := s.b[s.p]; !isSpace(c) {
			return c
		}
		s.p++
	}
	return 0
}

// takeByte skips whitespace and c. Anything else is an error.
func (s *scanner) takeByte(c byte) bool {
	if s.p < len(s.b) && s.b[s.p] == c { // fast path: most writers add no whitespace
		s.p++
		return true
	}
	if s.space() != c || s.p == len(s.b) {
		return s.failWith("expected %q", c)
	}
	s.p++
	return true
}

// hasMore continues after a member of a list that ends with end. It returns true if another member follows, and false
// at the end or after an error.
func (s *scanner) hasMore(end byte) bool {
	switch c := s.space(); {
	case c == ',' && s.p < len(s.b):
		s.p++
		if s.space() == end {
			return s.failWith("trailing comma")
		}
		return true
	case c == end && s.p < len(s.b):
		s.p++
		return false
	}
	return s.failWith("expected ',' or %q", end)
}

// openList reads the opening byte of a list, and reports whether it has members.
func (s *scanner) openList(begin, end byte) bool {
	if !s.takeByte(begin) {
		return false
	}
	if s.space() == end && s.p < len(s.b) {
		s.p++
		return false
	}
	return true
}

// readString reads a string. The result is valid until the next call.
func (s *scanner) readString() ([]byte, bool) {
	if !s.takeByte('"') {
		return nil, false
	}
	start := s.p
	s.skipPlain()
	if s.p < len(s.b) && s.b[s.p] == '"' {
		s.p++
		return s.b[start : s.p-1], true
	}
	s.scratch = append(s.scratch[:0], s.b[start:s.p]...)
	for s.p < len(s.b) {
		switch c := s.b[s.p]; {
		case c == '"':
			s.p++
			return s.scratch, true
		case c != '\\':
			return nil, s.failWith("control character in a string")
		}
		if !s.readEscape() {
			return nil, false
		}
		from := s.p
		s.skipPlain()
		s.scratch = append(s.scratch, s.b[from:s.p]...)
	}
	return nil, s.failWith("unterminated string")
}

// skipPlain skips to the next quote, backslash or control character, eight bytes per step.
func (s *scanner) skipPlain() {
	const ones, highs = 0x0101010101010101, 0x8080808080808080
	for s.p+8 <= len(s.b) {
		x := binary.LittleEndian.Uint64(s.b[s.p:])
		q, e := x^(ones*'"'), x^(ones*'\\')
		// The lowest bit is correct, because a carry only affects bytes above a match.
		hit := ((q - ones) & ^q) | ((e - ones) & ^e) | ((x - ones*0x20) & ^x)
		if hit &= highs; hit != 0 {
			s.p += bits.TrailingZeros64(hit) / 8
			return
		}
		s.p += 8
	}
	for s.p < len(s.b) && s.b[s.p] != '"' && s.b[s.p] != '\\' && s.b[s.p] >= 0x20 {
		s.p++
	}
}

// readEscape reads the escape sequence that starts with the backslash at p.
func (s *scanner) readEscape() bool {
	if s.p+2 > len(s.b) {
		return s.failWith("unterminated string")
	}
	s.p += 2
	const from, to = `"\/bfnrt`, "\"\\/\b\f\n\r\t"
	c := s.b[s.p-1]
	if i := bytes.IndexByte([]byte(from), c); i >= 0 {
		s.scratch = append(s.scratch, to[i])
		return true
	}
	if c != 'u' {
		return s.failWith("bad escape")
	}
	r, ok := s.readHex4()
	if !ok {
		return false
	}
	if utf16.IsSurrogate(r) {
		if s.p+2 > len(s.b) || s.b[s.p] != '\\' || s.b[s.p+1] != 'u' {
			return s.failWith("lone surrogate")
		}
		s.p += 2
		low, ok := s.readHex4()
		if !ok {
			return false
		}
		if r = utf16.DecodeRune(r, low); r == utf8.RuneError {
			return s.failWith("lone surrogate")
		}
	}
	s.scratch = utf8.AppendRune(s.scratch, r)
	return true
}

func (s *scanner) readHex4() (rune, bool) {
	if s.p+4 > len(s.b) {
		return 0, s.failWith("unterminated string")
	}
	v, err := strconv.ParseUint(string(s.b[s.p:s.p+4]), 16, 16)
	if err != nil || s.b[s.p] == '+' {
		return 0, s.failWith("bad escape")
	}
	s.p += 4
	return rune(v), true
}

// readUnsigned reads a whole number without sign, point or exponent. over reports whether it overflows an int64.
func (s *scanner) readUnsigned() (v int64, over, ok bool) {
	s.space()
	start := s.p
	for s.p < len(s.b) {
		d := s.b[s.p] - '0'
		if d > 9 {
			break
		}
		if v > (1<<63-1-int64(d))/10 { // the next digit would overflow
			over = true
		}
		v = v*10 + int64(d)
		s.p++
	}
	if s.p == start {
		return 0, false, s.failWith("expected an unsigned integer")
	}
	if s.b[start] == '0' && s.p > start+1 {
		return 0, false, s.failWith("number with a leading zero")
	}
	if s.p < len(s.b) && (s.b[s.p] == '.' || s.b[s.p]|0x20 == 'e') {
		return 0, false, s.failWith("expected an unsigned integer, not a float")
	}
	return v, over, true
}

// skipValue checks and skips any value at the given depth. It refuses duplicate keys, which it compares without
// resolving escapes.
func (s *scanner) skipValue(depth int) bool {
	c := s.space()
	switch {
	case c == '{' || c == '[':
		if depth > maxDepth {
			return s.failWith("nested too deeply")
		}
		if c == '[' {
			for more := s.openList('[', ']'); more; more = s.hasMore(']') {
				if !s.skipValue(depth + 1) {
					return false
				}
			}
			return s.err == nil
		}
		base := len(s.keys)
		for more := s.openList('{', '}'); more; more = s.hasMore('}') {
			if _, ok := s.readKey(); !ok || !s.takeByte(':') || !s.skipValue(depth+1) {
				return false
			}
		}
		return s.err == nil && s.checkDistinct(base)
	case c == '"':
		_, ok := s.readString()
		return ok
	case c == '-' || c-'0' <= 9:
		return s.skipNumber()
	}
	for _, word := range []string{"true", "false", "null"} {
		if bytes.HasPrefix(s.b[s.p:], []byte(word)) {
			s.p += len(word)
			return true
		}
	}
	return s.failWith("expected a value")
}

// readKey reads a key and records it for checkDistinct.
func (s *scanner) readKey() ([]byte, bool) {
	s.space()
	lo := s.p
	key, ok := s.readString()
	if ok {
		s.keys = append(s.keys, span{uint32(lo), uint32(s.p)})
	}
	return key, ok
}

// checkDistinct checks for duplicate keys at the end of an object, and removes its keys, which start at base.
func (s *scanner) checkDistinct(base int) bool {
	keys := s.keys[base:]
	s.keys = s.keys[:base]
	if len(keys) < 2 || s.lenient {
		return true
	}
	text := func(i int) []byte { return s.b[keys[i].lo:keys[i].hi] }
	sort.Slice(keys, func(i, k int) bool { return bytes.Compare(text(i), text(k)) < 0 })
	for i := 1; i < len(keys); i++ {
		if bytes.Equal(text(i-1), text(i)) {
			return s.failWith("duplicate key %s", text(i))
		}
	}
	return true
}

// skipNumber skips a JSON number, which must be in the range of a float64.
func (s *scanner) skipNumber() bool {
	start := s.p
	digits := func() bool {
		from := s.p
		for s.p < len(s.b) && s.b[s.p]-'0' <= 9 {
			s.p++
		}
		return s.p > from
	}
	at := func(c byte) bool { return s.p < len(s.b) && s.b[s.p]|0x20 == c|0x20 }
	if at('-') {
		s.p++
	}
	first := s.p
	if !digits() || s.b[first] == '0' && s.p > first+1 {
		return s.failWith("invalid number")
	}
	plain := s.p-start < 300
	if at('.') {
		if s.p++; !digits() {
			return s.failWith("invalid number")
		}
	}
	if at('e') {
		plain = false
		if s.p++; at('+') || at('-') {
			s.p++
		}
		if !digits() {
			return s.failWith("invalid number")
		}
	}
	if plain {
		return true
	}
	if _, err := strconv.ParseFloat(string(s.b[start:s.p]), 64); err != nil {
		return s.failWith("number out of range")
	}
	return true
}
