package redis

import (
	"bufio"
	"bytes"
	"net"
	"strings"
	"testing"

	"github.com/overwire/overwire/gosrc/source/sourcetest"
)

// Each reply of the protocol is read, and whatever else a server sends is an error: of
// the server's own, or that it is no Redis.
func TestReplies(t *testing.T) {
	t.Parallel()
	const ok, fails, refuses = 0, 1, 2
	number := func(r replies) error { _, err := r.number(); return err }
	text := func(r replies) error { _, err := r.text(); return err }
	into := func(r replies) error { _, err := r.into(make([]byte, 3)); return err }
	keys := func(r replies) error { _, _, err := r.keys(); return err }
	results := func(r replies) error { return r.results(2) }
	for _, q := range []struct {
		bytes string
		read  func(replies) error
		want  int
	}{
		{"+OK\r\n", replies.word, ok},
		{"-ERR no\r\n", replies.word, refuses},
		{":1\r\n", replies.word, fails},
		{"+OK\n", replies.word, fails},
		{"+O", replies.word, fails},
		{"\r\n", replies.word, fails},
		{"+" + strings.Repeat("x", 1<<15) + "\r\n", replies.word, fails},
		{":17\r\n", number, ok},
		{":-1\r\n", number, fails},
		{":9223372036854775807\r\n", number, fails},
		{":x\r\n", number, fails},
		{"-WRONGTYPE no\r\n", number, refuses},
		{"$2\r\nab\r\n", text, ok},
		{"$0\r\n\r\n", text, ok},
		{"$-1\r\n", text, fails},
		{"$2\r\nabc\r\n", text, fails},
		{"$1048577\r\n", text, fails},
		{"$3\r\nabc\r\n", into, ok},
		{"$2\r\nab\r\n", into, ok},
		{"$4\r\nabcd\r\n", into, fails},
		{"$3\r\nab", into, fails},
		{"*2\r\n$1\r\n0\r\n*1\r\n$1\r\nk\r\n", keys, ok},
		{"*2\r\n$1\r\n0\r\n*0\r\n", keys, ok},
		{"*3\r\n$1\r\n0\r\n*0\r\n", keys, fails},
		{"*2\r\n$1\r\n0\r\n*9999999\r\n", keys, fails},
		{"*2\r\n$1\r\n0\r\n*1\r\n:1\r\n", keys, fails},
		{"*2\r\n+OK\r\n:1\r\n", results, ok},
		{"*2\r\n-ERR no\r\n:1\r\n", results, refuses},
		{"*1\r\n+OK\r\n", results, fails},
		{"*-1\r\n", results, fails},
		{"*2\r\n-ERR no\r\n", results, fails},
		{"-EXECABORT no\r\n", results, refuses},
	} {
		err := q.read(replies{bufio.NewReader(strings.NewReader(q.bytes))})
		got := fails
		if err == nil {
			got = ok
		} else if refused(err) {
			got = refuses
		}
		if got != q.want {
			t.Errorf("%.40q: %v", q.bytes, err)
		}
	}
}

// Whatever a server sends ends as a value or an error, and leaves what lies behind the
// caller's memory alone.
func FuzzReplies(f *testing.F) {
	f.Add([]byte("$3\r\nabc\r\n"))
	f.Add([]byte("*2\r\n$1\r\n0\r\n*1\r\n$1\r\nk\r\n"))
	f.Add([]byte("-ERR no\r\n"))
	f.Fuzz(func(t *testing.T, sent []byte) {
		read := func() replies { return replies{bufio.NewReaderSize(bytes.NewReader(sent), 16)} }
		p := bytes.Repeat([]byte{7}, 8)
		if n, err := read().into(p[:4]); err == nil && !bytes.Contains(sent, p[:n]) || !bytes.Equal(p[4:], []byte{7, 7, 7, 7}) {
			t.Errorf("%d bytes, %v: %v", n, p, err)
		}
		if s, err := read().text(); err == nil && !bytes.Contains(sent, []byte(s)) {
			t.Errorf("%q was never sent", s)
		}
		if _, keys, err := read().keys(); err == nil && len(keys) > len(sent) {
			t.Errorf("%d keys of %d bytes", len(keys), len(sent))
		}
		if n, err := read().number(); err == nil && n < 0 {
			t.Errorf("the number %d", n)
		}
		_ = read().results(2)
	})
}

// A transaction does all or nothing, and says what the server refused first.
func TestTransaction(t *testing.T) {
	t.Parallel()
	c := plainClient(t, sourcetest.StartRedis(t, false))
	c.must(c.transaction([][]string{{"set", "a", "1"}, {"rename", "a", "b"}, {"persist", "b"}}))
	if n := c.lookUp("exists", "b"); n != 1 {
		t.Error("what it did is not there")
	}
	if err := c.transaction([][]string{{"set", "c", "1"}, {"no such request"}}); !refused(err) || !strings.Contains(err.Error(), "unknown command") {
		t.Error(err)
	}
	if n := c.lookUp("exists", "c"); n != 0 {
		t.Error("half of a transaction was done")
	}
	if err := c.transaction([][]string{{"rename", "none", "d"}, {"set", "e", "1"}}); !refused(err) || !strings.Contains(err.Error(), "no such key") {
		t.Error(err)
	}
}

// A connection that the server has closed while it was idle is replaced, at the cost of
// no try.
func TestIdle(t *testing.T) {
	t.Parallel()
	for _, tls := range []bool{false, true} {
		s := sourcetest.StartRedis(t, tls)
		scheme := map[bool]string{false: "redis://", true: "rediss://"}[tls]
		data := random(1000)
		put(t, with(s), scheme+s.Addr+"/m", data)
		o, err := Open(bg, scheme+s.Addr+"/m", with(s, "retries", "0"))
		if err != nil {
			t.Fatal(err)
		}
		defer o.Close()
		server, err := connect(name{scheme: scheme[:len(scheme)-3], host: s.Addr}, with(s))
		if err != nil {
			t.Fatal(err)
		}
		c, err := server.dial(bg)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(c.cut)
		if n, err := c.ask("client", "kill", "type", "normal"); err != nil || n != 1 {
			t.Fatal("killed:", n, err)
		}
		back := make([]byte, len(data))
		if err := o.ReadAt(bg, back, 0); err != nil || !bytes.Equal(back, data) {
			t.Errorf("tls %v: %v, or other bytes", tls, err)
		}
	}
}

// A password is taken by a server that has none for its default user, and by one from
// before Redis 6, which knows no users.
func TestPasswords(t *testing.T) {
	t.Parallel()
	s := sourcetest.StartRedis(t, false)
	c := plainClient(t, s)
	c.must(c.do("config", "set", "requirepass", ""))
	old, err := net.Listen("tcp", "127.0.0.1:0")
	c.must(err)
	t.Cleanup(func() { _ = old.Close() })
	go func() {
		conn, err := old.Accept()
		if err != nil {
			return
		}
		defer conn.Close()
		b := make([]byte, 100)
		for {
			n, err := conn.Read(b)
			if err != nil {
				return
			}
			reply := "-ERR wrong number of arguments for 'auth' command\r\n"
			if string(b[:n]) == "*2\r\n$4\r\nauth\r\n$4\r\nsome\r\n" {
				reply = "+OK\r\n"
			}
			_, _ = conn.Write([]byte(reply))
		}
	}()
	for _, host := range []string{s.Addr, old.Addr().String()} {
		server, err := connect(name{scheme: "redis", host: host}, with(s, "password", "some"))
		c.must(err)
		other, err := server.dial(bg)
		if err != nil {
			t.Errorf("%v", err)
			continue
		}
		other.cut()
	}
}
