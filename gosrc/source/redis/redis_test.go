package redis

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/source/sourcetest"
)

var bg = context.Background()

func random(n int) []byte {
	b := make([]byte, n)
	_, _ = rand.NewChaCha8([32]byte{9}).Read(b)
	return b
}

// withConnection returns options that reach the server. changes are pairs of a name and a value; an empty value
// removes the option.
func withConnection(s *sourcetest.Redis, changes ...string) source.Options {
	m := map[string]string{"password": sourcetest.RedisPassword, "retries": "0"}
	if s.CA != "" {
		m["cacert"] = s.CA
	}
	for i := 0; i < len(changes); i += 2 {
		if m[changes[i]] = changes[i+1]; changes[i+1] == "" {
			delete(m, changes[i])
		}
	}
	return source.Options{Storage: m}
}

func put(t testing.TB, opt source.Options, uri string, data []byte) {
	t.Helper()
	d, err := Create(bg, uri, opt, int64(len(data)))
	if err != nil {
		t.Fatal(err)
	}
	defer d.Drop()
	if err := d.Write(data, 0); err != nil {
		t.Fatal(err)
	}
	if err := d.Finish(int64(len(data))); err != nil {
		t.Fatal(err)
	}
	if err := d.Publish(); err != nil {
		t.Fatal(err)
	}
}

func get(uri string, opt source.Options) ([]byte, error) {
	o, err := Open(bg, uri, opt)
	if err != nil {
		return nil, err
	}
	defer o.Close()
	p := make([]byte, o.Size())
	return p, o.ReadAt(bg, p, 0)
}

func plainClient(t testing.TB, s *sourcetest.Redis) *redis.Client {
	c := redis.NewClient(&redis.Options{Addr: s.Addr, Password: sourcetest.RedisPassword, Protocol: 2})
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// The common suite passes, and files of many sizes are written and read back, with and without TLS, in any db.
func TestServer(t *testing.T) {
	t.Parallel()
	for _, tls := range []bool{false, true} {
		s := sourcetest.StartRedis(t, tls)
		scheme := "redis://"
		if tls {
			scheme = "rediss://"
		}
		at := scheme + s.Addr + "/"
		sourcetest.Suite(t, sourcetest.Is{Remote: true, Known: true}, func(t *testing.T, data []byte) source.Source {
			put(t, withConnection(s), at+"suite", data)
			o, err := Open(bg, at+"suite", withConnection(s))
			if err != nil {
				t.Fatal(err)
			}
			return o
		})
		sizes := []int{1, step, step + 1, part, part + 1, 2*part + 12345}
		if tls || testing.Short() {
			sizes = []int{1, part + 1}
		}
		for _, n := range sizes {
			data := random(n)
			put(t, withConnection(s, "db", "3"), at+"a/b [c]*ü:7", data)
			back, err := get(at+"a/b [c]*ü:7", withConnection(s, "db", "3"))
			if err != nil || !bytes.Equal(back, data) {
				t.Fatalf("tls %v, %d bytes: read %d: %v", tls, n, len(back), err)
			}
		}
		if _, err := get(at+"a/b [c]*ü:7", withConnection(s)); !errors.Is(err, errs.ErrNotFound) {
			t.Error("found in another db:", err)
		}
		if tls {
			_, err := get(at+"suite", withConnection(s, "cacert", ""))
			if !errors.Is(err, errs.ErrPermission) || !strings.Contains(err.Error(), "certificate") {
				t.Error("unknown authority:", err)
			}
		}
	}
}

// Refusals give typed errors that contain no password.
func TestRefusals(t *testing.T) {
	t.Parallel()
	s := sourcetest.StartRedis(t, false)
	c := plainClient(t, s)
	at := "redis://" + s.Addr + "/"
	put(t, withConnection(s), at+"m", random(1000))
	c.HSet(bg, "hash", "a", "b")
	c.Set(bg, "hole:x:0", "abc", 0)
	c.Set(bg, "hole:x:5", "abc", 0)
	c.Set(bg, "twice:x:0", "abc", 0)
	c.Set(bg, "twice:y:0", "abc", 0)
	for _, q := range []struct {
		what, uri string
		opt       source.Options
		class     error
		says      string
	}{
		{"no password", at + "m", withConnection(s, "password", ""), errs.ErrPermission, "NOAUTH"},
		{"a wrong password", at + "m", withConnection(s, "password", "planted-wrong"), errs.ErrPermission, "WRONGPASS"},
		{"an unknown user", at + "m", withConnection(s, "username", "planted-user"), errs.ErrPermission, "WRONGPASS"},
		{"no such key", at + "none", withConnection(s), errs.ErrNotFound, "no such key"},
		{"no such db", at + "m", withConnection(s, "db", "99"), errs.ErrArgument, "db"},
		{"a broken db", at + "m", withConnection(s, "db", "1.5"), errs.ErrArgument, "db"},
		{"a hash", at + "hash", withConnection(s), errs.ErrFormat, "WRONGTYPE"},
		{"a hole", at + "hole", withConnection(s), errs.ErrFormat, "begins at 5"},
		{"an overlap", at + "twice", withConnection(s), errs.ErrFormat, "begins at 0"},
		{"no server", "redis://127.0.0.1:1/m", withConnection(s), errs.ErrIO, "refused"},
		{"a wrong password in the URI", "redis://:planted@" + s.Addr + "/m", source.Options{}, errs.ErrPermission, "WRONGPASS"},
		{"a wrong user in the URI", "redis://planted:planted%40@" + s.Addr + "/m", source.Options{}, errs.ErrPermission, "WRONGPASS"},
		{"an invalid escape in a password", "redis://:planted%zz@" + s.Addr + "/m", source.Options{}, errs.ErrArgument, "%25"},
		{"a slash in a password", "redis://:planted/x@" + s.Addr + "/m", source.Options{}, errs.ErrArgument, "expected"},
		{"no key", "redis://" + s.Addr, withConnection(s), errs.ErrArgument, "expected"},
		{"an unknown option", at + "m", withConnection(s, "pasword", "planted"), errs.ErrArgument, "pasword"},
		{"TLS with a server without TLS", "rediss://" + s.Addr + "/m", withConnection(s, "timeout", "0.3"), errs.ErrTimeout,
			""},
	} {
		_, err := get(q.uri, q.opt)
		if !errors.Is(err, q.class) || !strings.Contains(err.Error(), q.says) {
			t.Errorf("%s: %v", q.what, err)
			continue
		}
		for _, text := range []string{err.Error(), errs.Text(err)} {
			if strings.Contains(text, "planted") || strings.Contains(text, sourcetest.RedisPassword) {
				t.Errorf("%s: %s shows a secret", q.what, text)
			}
		}
	}
	if _, err := Create(bg, at+"m", withConnection(s, "password", "planted-wrong"), 1); !errors.Is(err,
		errs.ErrPermission) {
		t.Error("a wrong password was not reported by Create:", err)
	}
	c.Do(bg, "ACL", "SETUSER", "few", "on", ">"+sourcetest.RedisPassword, "~*", "+@all", "-exists")
	d, err := Create(bg, at+"m", withConnection(s, "username", "few"), 1)
	if err == nil {
		defer d.Drop()
		err = errors.Join(d.Write([]byte("x"), 0), d.Finish(1), d.Publish())
	}
	if !errors.Is(err, errs.ErrPermission) || strings.Contains(err.Error(), "lost") {
		t.Error("a user without permission for EXISTS:", err)
	}
	c.Do(bg, "ACL", "SETUSER", "us@er", "on", ">p:a/s%s@", "~*", "+@all")
	for uri, opt := range map[string]source.Options{
		"redis://:" + sourcetest.RedisPassword + "@" + s.Addr + "/m":        {},
		"redis://us%40er:p:a%2Fs%25s%40@" + s.Addr + "/m":                   {},
		"redis://us%40er@" + s.Addr + "/m":                                  {Env: map[string]string{"REDISCLI_AUTH": "p:a/s%s@"}},
		"redis://:wrong@" + s.Addr + "/m":                                   withConnection(s),
		"redis://default:" + sourcetest.RedisPassword + "@" + s.Addr + "/m": {Env: map[string]string{"REDISCLI_AUTH": "wrong"}},
	} {
		if b, err := get(uri, opt); err != nil || len(b) != 1000 {
			t.Errorf("%s: %v", uri, err)
		}
	}
	env := map[string]string{"REDISCLI_AUTH": sourcetest.RedisPassword}
	if b, err := get(at+"m", source.Options{Env: env}); err != nil || len(b) != 1000 {
		t.Error("REDISCLI_AUTH:", err)
	}
}

// Other layouts can be read: a single value, and tensorizer's keys, split anywhere.
func TestLayouts(t *testing.T) {
	t.Parallel()
	s := sourcetest.StartRedis(t, false)
	c := plainClient(t, s)
	data := random(3_000_000)
	c.Set(bg, "one", data, 0)
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 1))
	for off := 0; off < len(data); {
		n := min(len(data)-off, 1+r.IntN(200_000))
		what := "layer.0:weight"
		if off == 0 {
			what = "header"
		}
		c.Set(bg, fmt.Sprintf("prefix:%s:%d", what, off), data[off:off+n], 0)
		off += n
	}
	c.Set(bg, "prefix:of another", "x", 0)
	c.Set(bg, "prefixed:0", "x", 0)
	for _, key := range []string{"one", "prefix"} {
		uri := "redis://" + s.Addr + "/" + key
		back, err := get(uri, withConnection(s))
		if err != nil || !bytes.Equal(back, data) {
			t.Fatalf("%s: %d bytes: %v", key, len(back), err)
		}
		// A new file replaces the old layout and no other keys.
		put(t, withConnection(s), uri, data[:100])
		if back, err := get(uri, withConnection(s)); err != nil || !bytes.Equal(back, data[:100]) {
			t.Fatalf("%s after writing: %d bytes: %v", key, len(back), err)
		}
		if err := Remove(bg, uri, withConnection(s)); err != nil {
			t.Fatal(err)
		}
		if _, err := get(uri, withConnection(s)); !errors.Is(err, errs.ErrNotFound) {
			t.Error(err)
		}
	}
	if left := c.Keys(bg, "*").Val(); len(left) != 2 {
		t.Errorf("left in the store: %v", left)
	}
}

// If a file is replaced while it is open, reads fail with errs.ErrCorrupt and never mix old and new bytes. An
// unpublished file is not visible, and a dropped draft leaves no keys.
func TestReplaced(t *testing.T) {
	t.Parallel()
	s := sourcetest.StartRedis(t, false)
	c := plainClient(t, s)
	uri := "redis://" + s.Addr + "/m"
	put(t, withConnection(s), uri, random(part+1))
	o, err := Open(bg, uri, withConnection(s))
	if err != nil {
		t.Fatal(err)
	}
	defer o.Close()
	data := random(2*part + 5)
	for stage := range 3 {
		d, err := Create(bg, uri, withConnection(s), int64(len(data)))
		if err != nil {
			t.Fatal(err)
		}
		if err := d.Write(data, 0); err != nil {
			t.Fatal(err)
		}
		if stage > 0 {
			if err := d.Finish(int64(len(data))); err != nil {
				t.Fatal(err)
			}
		}
		if n := len(c.Keys(bg, "m.draft-*").Val()); stage > 0 && n != 3 {
			t.Fatalf("%d draft values, want 3", n)
		}
		if err := o.ReadAt(bg, make([]byte, 10), part-9); err != nil {
			t.Fatal(err)
		}
		if stage == 2 {
			if err := d.Publish(); err != nil {
				t.Fatal(err)
			}
		}
		d.Drop()
	}
	if err := o.ReadAt(bg, make([]byte, 10), part-9); !errors.Is(err, errs.ErrCorrupt) {
		t.Error(err)
	}
	keys := c.Keys(bg, "*").Val()
	if len(keys) != 3 {
		t.Errorf("left in the store: %v", keys)
	}
	for _, k := range keys {
		if ttl := c.TTL(bg, k).Val(); ttl != -1 {
			t.Errorf("%s expires in %v", k, ttl)
		}
	}
}

// A read that is cancelled while the server is silent ends immediately, and nothing writes to its memory
// afterwards.
func TestCancel(t *testing.T) {
	t.Parallel()
	s := sourcetest.StartRedis(t, false)
	put(t, withConnection(s), "redis://"+s.Addr+"/m", random(part))
	var stop atomic.Bool
	front := through(t, s.Addr, func(n int) int {
		for stop.Load() {
			time.Sleep(5 * time.Millisecond)
		}
		return n
	})
	o, err := Open(bg, "redis://"+front+"/m", withConnection(s))
	if err != nil {
		t.Fatal(err)
	}
	defer o.Close()
	stop.Store(true)
	defer stop.Store(false)
	ctx, cancel := context.WithCancelCause(bg)
	time.AfterFunc(50*time.Millisecond, func() { cancel(errs.ErrCancelled) })
	// Without the cancellation it would end with a timeout.
	if err := o.ReadAt(ctx, make([]byte, part), 0); !errors.Is(err, errs.ErrCancelled) {
		t.Error(err)
	}
}

// A client uses one connection, which a cancellation closes, for every kind of command. (go-redis 9.22 and
// later use a second one for pipelines.)
func TestOneConnection(t *testing.T) {
	t.Parallel()
	s := sourcetest.StartRedis(t, false)
	c := plainClient(t, s)
	at, err := newServer(name{scheme: "redis", host: s.Addr}, withConnection(s))
	if err != nil {
		t.Fatal(err)
	}
	defer at.closeIdle()
	before := strings.Count(c.ClientList(bg).Val(), "\n")
	if err := at.with(bg, func(ctx context.Context, c *redis.Client) error {
		length := func(p redis.Pipeliner) error { return p.StrLen(ctx, "m").Err() }
		_, err := c.Pipelined(ctx, length)
		_, err2 := c.TxPipelined(ctx, length)
		return errors.Join(err, err2, c.StrLen(ctx, "m").Err())
	}); err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(c.ClientList(bg).Val(), "\n") - before; n != 1 {
		t.Errorf("%d connections", n)
	}
}

// Broken connections only cost time.
func TestCut(t *testing.T) {
	t.Parallel()
	s := sourcetest.StartRedis(t, false)
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	var calls, cuts atomic.Int64
	front := through(t, s.Addr, func(n int) int {
		if h := calls.Add(1) * 0x9E3779B9 % 97; uint64(h)+seed%97 == 96 {
			cuts.Add(1)
			return -1
		}
		return n
	})
	data := random(2*part + 5)
	opt := withConnection(s, "retries", "50")
	put(t, opt, "redis://"+front+"/m", data)
	for range 2 {
		if back, err := get("redis://"+front+"/m", opt); err != nil || !bytes.Equal(back, data) {
			t.Fatalf("%d bytes: %v", len(back), err)
		}
	}
	t.Logf("%d cuts", cuts.Load())
	if cuts.Load() == 0 {
		t.Error("nothing was cut")
	}
}

// through is a proxy to a server. For each block it calls pass, which returns how many bytes to forward, or a
// negative number to cut the connection.
func through(t *testing.T, addr string, pass func(int) int) string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			in, err := l.Accept()
			if err != nil {
				return
			}
			out, err := net.Dial("tcp", addr)
			if err != nil {
				_ = in.Close()
				continue
			}
			relay := func(to, from net.Conn) {
				defer to.Close()
				defer from.Close()
				b := make([]byte, 256<<10)
				for {
					n, err := from.Read(b)
					if k := pass(n); k < 0 || err != nil && err != io.EOF {
						return
					}
					if _, werr := to.Write(b[:n]); werr != nil || err != nil {
						return
					}
				}
			}
			go relay(in, out)
			go relay(out, in)
		}
	}()
	return l.Addr().String()
}

// In a cluster, a file is read and written at the server that stores its key, if a tag keeps its values
// together. Everything else is refused before a byte is written, and the error names the right server.
func TestCluster(t *testing.T) {
	t.Parallel()
	servers := []*sourcetest.Redis{}
	clients := []*redis.Client{}
	bus := ""
	for range 2 { // the port between servers is 10,000 higher by default, which may be out of range
		_, bus, _ = net.SplitHostPort(sourcetest.FreePort(t))
		s := sourcetest.StartRedis(t, false, "--cluster-enabled", "yes", "--cluster-port", bus, "--cluster-announce-ip",
			sourcetest.Host(),
			"--masterauth", sourcetest.RedisPassword)
		servers, clients = append(servers, s), append(clients, plainClient(t, s))
	}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(clients[0].ClusterAddSlotsRange(bg, 0, 8191).Err())
	must(clients[1].ClusterAddSlotsRange(bg, 8192, 16383).Err())
	host, port, _ := net.SplitHostPort(servers[1].Addr)
	must(clients[0].Do(bg, "cluster", "meet", host, port, bus).Err())
	for n := 0; ; n++ {
		a, _ := clients[0].ClusterInfo(bg).Result()
		b, _ := clients[1].ClusterInfo(bg).Result()
		if strings.Contains(a, "cluster_state:ok") && strings.Contains(b, "cluster_state:ok") {
			break
		}
		if n > 300 {
			t.Fatal("the cluster did not start: ", a, b)
		}
		time.Sleep(50 * time.Millisecond)
	}
	data := random(part + 12345)
	opt := withConnection(servers[0])
	for i := range 20 {
		key := fmt.Sprintf("models/{m%d}/x", i)
		slot, err := clients[0].ClusterKeySlot(bg, key).Result()
		must(err)
		home, other := servers[0], servers[1]
		if slot > 8191 {
			home, other = other, home
		}
		if i < 2 {
			put(t, opt, "redis://"+home.Addr+"/"+key, data)
			back, err := get("redis://"+home.Addr+"/"+key, opt)
			if err != nil || !bytes.Equal(back, data) {
				t.Errorf("%s: %v, or wrong bytes", key, err)
			}
		}
		_, err = Open(bg, "redis://"+other.Addr+"/"+key, opt)
		_, err2 := Create(bg, "redis://"+other.Addr+"/"+key, opt, 5)
		for _, err := range []error{err, err2} {
			if !errors.Is(err, errs.ErrNotSupported) || !strings.Contains(err.Error(), home.Addr) {
				t.Errorf("%s at the wrong server: %v", key, err)
			}
		}
	}
	for _, s := range servers {
		for _, key := range []string{"plain", "other", "third", "a{}b", "{"} {
			uri := "redis://" + s.Addr + "/" + key
			_, err := Open(bg, uri, opt)
			_, err2 := Create(bg, uri, opt, 5)
			for _, err := range []error{err, err2, Remove(bg, uri, opt)} {
				if !errors.Is(err, errs.ErrNotSupported) || !strings.Contains(err.Error(), "cluster") {
					t.Errorf("%s: %v", uri, err)
				}
			}
		}
	}
}

// UndoPublish removes a published file, and leaves a file that has replaced it.
func TestUndoPublish(t *testing.T) {
	s := sourcetest.StartRedis(t, false)
	opt, uri := withConnection(s), "redis://"+s.Addr+"/undone"
	d, err := Create(bg, uri, opt, 3)
	if err == nil {
		err = errors.Join(d.Write([]byte("old"), 0), d.Finish(3), d.Publish())
	}
	if err != nil {
		t.Fatal(err)
	}
	put(t, opt, uri, []byte("old"))
	if err := d.UndoPublish(); err != nil {
		t.Error(err)
	}
	if b, err := get(uri, opt); string(b) != "old" {
		t.Errorf("%q %v", b, err)
	}
	d, err = Create(bg, uri, opt, 3)
	if err == nil {
		err = errors.Join(d.Write([]byte("new"), 0), d.Finish(3), d.Publish(), d.UndoPublish(), d.UndoPublish())
	}
	if err != nil {
		t.Error(err)
	}
	if keys := plainClient(t, s).Keys(bg, "*").Val(); len(keys) != 0 {
		t.Error(keys)
	}
}

// A file that the server has published is published, even if the answer is lost because the save was cancelled.
func TestPublishWithoutAnAnswer(t *testing.T) {
	s := sourcetest.StartRedis(t, false)
	plain := plainClient(t, s)
	ctx, cancel := context.WithCancel(bg)
	defer cancel()
	var cuts atomic.Int32
	front := through(t, s.Addr, func(n int) int {
		if keys := plain.Keys(bg, "answer:ow-*").Val(); len(keys) == 0 || !cuts.CompareAndSwap(0, 1) {
			return n
		}
		cancel()
		return -1
	})
	opt := withConnection(s)
	d, err := Create(ctx, "redis://"+front+"/answer", opt, 3)
	if err == nil {
		err = errors.Join(d.Write([]byte("new"), 0), d.Finish(3), d.Publish())
	}
	if err != nil || cuts.Load() == 0 {
		t.Errorf("%v, cuts: %d", err, cuts.Load())
	}
	if b, err := get("redis://"+s.Addr+"/answer", opt); string(b) != "new" {
		t.Errorf("%q %v", b, err)
	}
}
