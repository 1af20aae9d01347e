package redis

import (
	"bufio"
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"strings"
	"testing"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/spawn"
	"github.com/overwire/overwire/gosrc/source"
)

// hostile responds to a command with the entry of says for the whole command or for its name, or else with +OK.
func hostile(t *testing.T, says map[string]string) string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	serve := func(c net.Conn) {
		defer c.Close()
		r := bufio.NewReader(c)
		for {
			var n int
			if _, err := fmt.Fscanf(r, "*%d\r\n", &n); err != nil {
				return
			}
			words := make([]string, n)
			for i := range words {
				var size int
				_, _ = fmt.Fscanf(r, "$%d\r\n", &size)
				word := make([]byte, size+2)
				_, _ = io.ReadFull(r, word)
				words[i] = string(word[:size])
			}
			say := cmp.Or(says[strings.Join(words, " ")], says[words[0]], "+OK\r\n")
			if _, err := io.WriteString(c, say); err != nil {
				return
			}
		}
	}
	spawn.Go("hostile redis", func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			spawn.Go("hostile redis", func() { serve(c) })
		}
	})
	return l.Addr().String()
}

// Every invalid response gives a typed error. It causes no panic and no allocation of the announced size.
func TestHostile(t *testing.T) {
	for name, says := range map[string]map[string]string{
		"a short key":               {"scan": "*2\r\n$1\r\n0\r\n*1\r\n$1\r\na\r\n"},
		"another key":               {"scan": "*2\r\n$1\r\n0\r\n*1\r\n$12\r\nb-long-key:0\r\n"},
		"a cursor without progress": {"scan": "*2\r\n$1\r\n7\r\n*0\r\n"},
		"a huge array":              {"scan": "*2\r\n$1\r\n0\r\n*1000000000000000\r\n"},
		"a large array":             {"scan": "*1048577\r\n"},
		"a negative array":          {"scan": "*-7\r\n"},
		"an array of arrays":        {"scan": strings.Repeat("*1000000\r\n", 9)},
		"a huge bulk":               {"scan": "*2\r\n$1\r\n0\r\n*1\r\n$1099511627776\r\n"},
		"an overflow":               {"scan": "$9223372036854775807\r\n"},
		"a negative bulk":           {"scan": "*2\r\n$-9\r\n"},
		"no number":                 {"scan": "$x\r\n"},
		"another protocol":          {"scan": "%1000000000000\r\n"},
		"a stream":                  {"scan": "$?\r\n"},
		"a line without an end":     {"scan": "+" + strings.Repeat("x", mostLine)},
		"an empty line":             {"scan": "\n"},
		"a negative length":         {"strlen": ":-1\r\n"},
		"a negative value":          {"strlen a-long-key:0": ":-1\r\n", "scan": "*2\r\n$1\r\n0\r\n*1\r\n$12\r\na-long-key:0\r\n"},
		"another type":              {"strlen": "*0\r\n"},
		"a large hello":             {"hello": "*1000000000\r\n"},
	} {
		t.Run(name, func(t *testing.T) {
			for word, usual := range map[string]string{"hello": "-ERR unknown command\r\n", "strlen": ":0\r\n", "info": "$0\r\n\r\n", "exists": ":1\r\n"} {
				says[word] = cmp.Or(says[word], usual)
			}
			opt := source.Options{Storage: map[string]string{"retries": "0", "timeout": "10", "password": "x"}}
			_, err := Open(t.Context(), "redis://"+hostile(t, says)+"/a-long-key", opt)
			class := errs.ErrFormat
			if name == "another type" { // the error comes from the library
				class = errs.ErrIO
			}
			if !errors.Is(err, class) || spawn.Poisoned() != nil {
				t.Fatal(err)
			}
			if name == "a cursor without progress" && !strings.Contains(err.Error(), "does not advance") {
				t.Fatal("the listing did not stop:", err)
			}
		})
	}
}

// Valid responses pass unchanged, even if they are split anywhere. Each response is checked like the first one.
func TestAnswersPass(t *testing.T) {
	all := []byte("+OK\r\n-ERR no\r\n:12\r\n$-1\r\n$0\r\n\r\n$5\r\n$9\r\n*\r\n*-1\r\n*0\r\n" +
		"*3\r\n*0\r\n*2\r\n$2\r\n\r\n\r\n:1\r\n*2\r\n$-1\r\n*1\r\n+x\r\n:3\r\n")
	rng := rand.New(rand.NewPCG(1, 2))
	for range 200 {
		a := &answers{}
		for b := bytes.Repeat(all, 2); len(b) > 0; {
			n := 1 + rng.IntN(len(b))
			if err := a.checkBytes(b[:n]); err != nil {
				t.Fatal(err)
			}
			b = b[n:]
		}
		if len(a.left) != 0 || a.skip != 0 || len(a.line) != 0 || a.bytes != 0 || a.elements != 0 {
			t.Fatal("a response is incomplete:", a)
		}
		if err := a.checkBytes([]byte("*9999999\r\n")); !errors.Is(err, errs.ErrFormat) {
			t.Fatal(err)
		}
	}
}

// FuzzAnswers tests that the check either refuses its input or knows how many bytes must follow.
func FuzzAnswers(f *testing.F) {
	for _, s := range []string{"*2\r\n$1\r\n0\r\n*1\r\n$1\r\na\r\n", "$5\r\nhello\r\n", ":1\r\n", "*-1\r\n"} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		a := &answers{}
		if err := a.checkBytes(b); err != nil && !errors.Is(err, errs.ErrFormat) {
			t.Fatal(err)
		}
		if a.skip < 0 || a.skip > mostBulk+2 || len(a.left) > mostDepth || len(a.line) > mostLine {
			t.Fatal(a)
		}
	})
}
