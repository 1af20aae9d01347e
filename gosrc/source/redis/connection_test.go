package redis

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"
)

// reader is a connection whose server has sent data.
func reader(data string) *connection {
	return &connection{in: bufio.NewReaderSize(strings.NewReader(data), maxLine)}
}

// encode writes a reply as a server does.
func encode(b *bytes.Buffer, r reply) {
	switch r.kind {
	case '+', '-':
		fmt.Fprintf(b, "%c%s\r\n", r.kind, r.text)
	case ':':
		fmt.Fprintf(b, ":%d\r\n", r.n)
	case '$':
		fmt.Fprintf(b, "$%d\r\n", r.n)
		if r.n >= 0 {
			fmt.Fprintf(b, "%s\r\n", r.text)
		}
	case '*':
		fmt.Fprintf(b, "*%d\r\n", r.n)
		for _, one := range r.list {
			encode(b, one)
		}
	}
}

// Replies are read to their last byte; what breaks the protocol, or is larger than the
// limits, is an error.
func TestReply(t *testing.T) {
	t.Parallel()
	text := func(s string) reply { return reply{kind: '$', n: int64(len(s)), text: s} }
	for sent, want := range map[string]reply{
		"+OK\r\n":                            {kind: '+', text: "OK"},
		"-ERR no\r\n":                        {kind: '-', text: "ERR no"},
		":-12\r\n":                           {kind: ':', n: -12},
		"$-1\r\n":                            {kind: '$', n: -1},
		"$0\r\n\r\n":                         text(""),
		"$4\r\na\r\nb\r\n":                   text("a\r\nb"),
		"*-1\r\n":                            {kind: '*', n: -1},
		"*2\r\n$1\r\n7\r\n*1\r\n$1\r\nk\r\n": {kind: '*', n: 2, list: []reply{text("7"), {kind: '*', n: 1, list: []reply{text("k")}}}},
	} {
		c := reader(sent + "+next\r\n")
		if r, err := c.reply(); err != nil || !reflect.DeepEqual(r, want) {
			t.Errorf("%q: %v, %v", sent, r, err)
		}
		if r, err := c.reply(); err != nil || r.text != "next" {
			t.Errorf("after %q: %v, %v", sent, r, err)
		}
	}
	for _, sent := range []string{
		"", "+OK", "\r\n", "+OK\n", "?\r\n", ":x\r\n", ":99999999999999999999\r\n", "$3\r\nab\r\n", "$3\r\nabcd\r\n",
		"$99999999999\r\n", "*9223372036854775807\r\n", "*2\r\n:1\r\n", "*1\r\n*1\r\n*1\r\n*1\r\n:1\r\n",
		"+" + strings.Repeat("x", maxLine) + "\r\n",
	} {
		if r, err := reader(sent).reply(); err == nil || refused(err) {
			t.Errorf("%.40q: %v, %v", sent, r, err)
		}
	}
	p := make([]byte, 3)
	for sent, want := range map[string]int{"$3\r\nabc\r\n": 3, "$1\r\na\r\n": 1, "$-1\r\n": 0, "$4\r\nabcd\r\n": -1, "$3\r\nabcd\r\n": -1, ":3\r\n": -1} {
		n, err := reader(sent).into(p)
		if want < 0 && err == nil || want >= 0 && (n != want || err != nil) {
			t.Errorf("%q: %d, %v", sent, n, err)
		}
	}
	var r refusal
	if _, err := reader("-WRONGTYPE it\r\n").into(p); !errors.As(err, &r) {
		t.Error(err)
	}
}

// A reply of any bytes is an error or the reply that those bytes encode.
func FuzzReply(f *testing.F) {
	for _, sent := range []string{"+OK\r\n", "-ERR\r\n", ":1\r\n", "$2\r\nab\r\n", "*2\r\n$1\r\n0\r\n*1\r\n$1\r\nk\r\n", "$-1\r\n"} {
		f.Add(sent)
	}
	f.Fuzz(func(t *testing.T, sent string) {
		r, err := reader(sent).reply()
		if err != nil {
			return
		}
		_ = r.refused()
		var b bytes.Buffer
		encode(&b, r)
		again, err := reader(b.String()).reply()
		if err != nil || !reflect.DeepEqual(again, r) {
			t.Fatalf("%q: %v; encoded and read again: %v, %v", sent, r, again, err)
		}
	})
}
