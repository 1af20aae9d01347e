package redis

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/source/sourcetest"
)

// impostor responds to SET and RENAME with the given word. Otherwise it acts like a server that stores nothing
// but reports that every key exists.
func impostor(t *testing.T, word string) (addr string) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	serve := func(c net.Conn) {
		defer c.Close()
		r := bufio.NewReader(c)
		queued := []string(nil)
		for {
			head, err := r.ReadString('\n')
			if err != nil {
				return
			}
			n, _ := strconv.Atoi(strings.Trim(head, "*\r\n"))
			var name string
			for i := range n {
				size, _ := r.ReadString('\n')
				k, _ := strconv.Atoi(strings.Trim(size, "$\r\n"))
				b := make([]byte, k+2)
				if _, err := io.ReadFull(r, b); err != nil {
					return
				}
				if i == 0 {
					name = strings.ToUpper(string(b[:k]))
				}
			}
			answer := map[string]string{"SET": "+" + word, "RENAME": "+" + word, "EXISTS": ":1", "STRLEN": ":0", "PERSIST": ":1", "UNLINK": ":1",
				"WATCH": "+OK", "DEL": ":1", "INFO": "$0\r\n", "SCAN": "*2\r\n$1\r\n0\r\n*0"}[name]
			switch {
			case name == "MULTI":
				queued, answer = []string{}, "+OK"
			case name == "EXEC":
				answer, queued = fmt.Sprintf("*%d\r\n%s", len(queued), strings.Join(queued, "\r\n")), nil
			case queued != nil:
				queued, answer = append(queued, answer), "+QUEUED"
			case answer == "":
				answer = "-ERR unknown command"
			}
			_, _ = io.WriteString(c, answer+"\r\n")
		}
	}
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go serve(c)
		}
	}()
	return l.Addr().String()
}

// A value counts as stored, and a file as published, only if the server responds with OK.
func TestStoredAnswers(t *testing.T) {
	for word, ok := range map[string]bool{"OK": true, "QUEUED": false, "": false} {
		d, err := Create(bg, "redis://"+impostor(t, word)+"/m", source.Options{Storage: map[string]string{"retries": "0"}}, 1)
		if err != nil {
			t.Fatal(err)
		}
		err = errors.Join(d.Write([]byte("x"), 0), d.Finish(1), d.Publish())
		d.Drop()
		if (err == nil) != ok || err != nil && !errors.Is(err, errs.ErrIO) {
			t.Errorf("%q: %v", word, err)
		}
	}
}

// A password with an unescaped / or # is refused before any server is contacted. The rest of such a password
// could be mistaken for a host name.
func TestPasswordInURI(t *testing.T) {
	for _, uri := range []string{"redis://u:wo/zz@h/k", "redis://:wo/zz@h/k", "redis://u:wo#/zz@h/k"} {
		_, err := Open(bg, uri, source.Options{})
		if !errors.Is(err, errs.ErrArgument) || strings.Contains(err.Error(), "zz") {
			t.Errorf("%s: %v", uri, err)
		}
	}
}

// A server that does not accept values of 16 MiB receives smaller ones. Their size follows the server's
// setting. If the setting cannot be read, they are small enough for any server.
func TestLimitOfValues(t *testing.T) {
	t.Parallel()
	s := sourcetest.StartRedis(t, false)
	for i, c := range []struct {
		limit int64
		mute  bool // the user may not read the setting
	}{{part, false}, {3 << 20, false}, {1 << 20, false}, {3 << 20, true}, {1 << 20, true}} {
		opt := source.Options{Storage: map[string]string{"password": sourcetest.RedisPassword, "retries": "0"}}
		if c.mute {
			opt.Storage["username"] = "mute"
		}
		admin := redis.NewClient(&redis.Options{Addr: s.Addr, Password: sourcetest.RedisPassword})
		defer admin.Close()
		if err := errors.Join(admin.ConfigSet(bg, "proto-max-bulk-len", strconv.FormatInt(c.limit, 10)).Err(),
			admin.Do(bg, "ACL", "SETUSER", "mute", "on", ">"+sourcetest.RedisPassword, "~*", "+@all", "-config").Err()); err != nil {
			t.Fatal(err)
		}
		uri, data := fmt.Sprintf("redis://%s/m%d", s.Addr, i), bytes.Repeat([]byte("0123456789abcdef"), 37<<20/16)
		d, err := Create(bg, uri, opt, int64(len(data)))
		if err != nil {
			t.Fatal(err)
		}
		defer d.Drop()
		if err := errors.Join(d.Write(data, 0), d.Finish(int64(len(data))), d.Publish()); err != nil {
			t.Fatalf("limit %d, mute %v: %v", c.limit, c.mute, err)
		}
		src, err := Open(bg, uri, opt)
		if err != nil {
			t.Fatal(err)
		}
		back := make([]byte, src.Size())
		if err := src.ReadAt(bg, back, 0); err != nil || !bytes.Equal(back, data) {
			t.Errorf("limit %d: %v, or wrong bytes", c.limit, err)
		}
		src.Close()
		if err := Remove(bg, uri, opt); err != nil {
			t.Error(err)
		}
		if left, err := admin.DBSize(bg).Result(); err != nil || left != 0 {
			t.Errorf("limit %d: %d keys remain, %v", c.limit, left, err)
		}
	}
}
