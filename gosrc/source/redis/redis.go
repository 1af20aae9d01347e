// Package redis reads and writes files in Redis: redis://host[:port]/key, and rediss:// with TLS.
//
// A small file is one string value under the key. Because the size of values is limited, a larger file consists of
// several values, key:ANYTHING:OFFSET, where OFFSET is the value's offset in the file. This is the layout of
// tensorizer. This package writes key:ow-RANDOM:OFFSET with a new random part for each file, so that a reader never
// mixes an old and a new file. If a value disappears while the file is read, the error is errs.ErrCorrupt.
//
// Drafts are written under different keys. They expire if their writer dies, and are renamed in one transaction. A
// value has up to 16 MiB.
package redis

import (
	"cmp"
	"context"
	"io"
	"regexp"
	"slices"
	"sort"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/source/retry"
)

type value struct {
	key    string
	off, n int64
}

// An object is a file in Redis. It implements retry.Fetcher.
type object struct {
	name
	server *server
	values []value
	size   int64
}

// Open opens a file. A file written by this package has an identity: the key of its first value, which is never
// used again (see upload). Files written by other programs have none, because Redis stores no dates.
func Open(ctx context.Context, uri string, opt source.Options) (*retry.Source, error) {
	n, err := parseURI(uri)
	if err != nil {
		return nil, err
	}
	s, err := newServer(n, opt)
	if err != nil {
		return nil, n.placeError("open", -1, err)
	}
	o := &object{name: n, server: s}
	err = retry.Do(ctx, s.retry, judgeError, func(ctx context.Context) error {
		return s.with(ctx, func(ctx context.Context, c *redis.Client) (err error) {
			o.values, err = findValues(ctx, c, n.key)
			return err
		})
	})
	if err == nil && o.values == nil {
		err = errs.New(errs.ErrNotFound, "no such key, and no values with keys KEY:...:OFFSET")
	}
	if err != nil {
		s.closeIdle()
		return nil, n.placeError("open", -1, err)
	}
	for _, v := range o.values {
		o.size += v.n
	}
	r := s.retry
	r.Host = n.scheme + "://" + n.host
	r.Connections = cmp.Or(r.Connections, 16) // the server uses one thread for all connections
	if first := o.values[0].key; len(first) > len(n.key) && ownKey().MatchString(first[len(n.key)+1:]) {
		r.Pin = first
	}
	return retry.New(o, r), nil
}

// findValues returns the values of a file in the order of their offsets, or nil if there are none.
func findValues(ctx context.Context, c *redis.Client, key string) ([]value, error) {
	n, err := c.StrLen(ctx, key).Result()
	if err != nil {
		return nil, err
	}
	if n < 0 {
		return nil, notRedis("a value has %d bytes", n)
	}
	if n > 0 {
		return []value{{key, 0, n}}, nil
	}
	if err := refuseCluster(ctx, c, key); err != nil {
		return nil, err
	}
	for range looks {
		keys, err := scanKeys(ctx, c, key)
		if err != nil {
			return nil, err
		}
		values, err := layOutValues(ctx, c, key, keys)
		if err == nil && !slices.ContainsFunc(values, func(v value) bool { return v.n == 0 }) {
			return values, nil
		}
		// A value that is empty or missing may have been replaced after it was listed.
		there, lookupErr := c.Exists(ctx, keys...).Result()
		if lookupErr != nil || there == int64(len(keys)) {
			return values, cmp.Or(lookupErr, err)
		}
	}
	return nil, errs.New(errs.ErrCorrupt, "the file was replaced %d times while its values were being listed", looks)
}

// looks is how often the values are listed if the file keeps being replaced.
const looks = 10

// refuseCluster refuses a cluster unless the key contains a {tag}, which stores all values on one server.
// Otherwise each server stores and lists only some of a file's values.
func refuseCluster(ctx context.Context, c *redis.Client, key string) error {
	if _, rest, ok := strings.Cut(key, "{"); ok && strings.IndexByte(rest, '}') > 0 {
		return nil
	}
	// Without permission for INFO, later commands return the server's own error.
	if info, err := c.Info(ctx, "cluster").Result(); err == nil && strings.Contains(info, "cluster_enabled:1") {
		return errs.New(errs.ErrNotSupported,
			"the server is part of a cluster: use a key with a {tag}, which keeps the values of a file together")
	}
	return nil
}

// The limits of a listing: values of one file, total length of their keys, and number of responses. Most
// responses are empty if a server has many other keys.
const (
	most      = 1 << 20
	mostNames = 256 << 20
	mostPages = 1 << 20
)

// scanKeys lists the keys that begin with key and a colon.
func scanKeys(ctx context.Context, c *redis.Client, key string) ([]string, error) {
	pattern := strings.NewReplacer(`\`, `\\`, `*`, `\*`, `?`, `\?`, `[`, `\[`, `]`, `\]`).Replace(key) + ":*"
	var all []string
	var cursor uint64
	size := 0
	for range mostPages {
		some, next, err := c.Scan(ctx, cursor, pattern, 5000).Result()
		if err != nil {
			return nil, err
		}
		for _, k := range some {
			if size += len(k); !strings.HasPrefix(k, key+":") {
				return nil, notRedis("the server lists a key without the requested prefix")
			}
		}
		if all = append(all, some...); len(all) > most || size > mostNames {
			return nil, errs.New(errs.ErrNotSupported,
				"more than %d keys begin with this key, or their names have more than %d bytes", most, mostNames)
		}
		switch {
		case next == 0:
			slices.Sort(all)
			return slices.Compact(all), nil // a scan may repeat a key
		case next == cursor:
			return nil, notRedis("the server's listing does not advance beyond %d", next)
		}
		cursor = next
	}
	return nil, notRedis("the server's listing does not end")
}

var ownKey = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^ow-[0-9a-f]{16}:\d+$`) })

// layOutValues sorts the values and checks that they form one file: from offset 0, without gaps or overlaps.
func layOutValues(ctx context.Context, c *redis.Client, key string, keys []string) ([]value, error) {
	var values []value
	isOurs := slices.ContainsFunc(keys, func(k string) bool { return ownKey().MatchString(k[len(key)+1:]) })
	for _, k := range keys {
		off, err := strconv.ParseInt(k[strings.LastIndexByte(k, ':')+1:], 10, 64)
		if err != nil || off < 0 || isOurs && !ownKey().MatchString(k[len(key)+1:]) {
			continue // a key of another program
		}
		values = append(values, value{key: k, off: off})
	}
	if len(values) == 0 {
		return nil, nil
	}
	lengths, err := c.Pipelined(ctx, func(p redis.Pipeliner) error {
		for i := range values {
			p.StrLen(ctx, values[i].key)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	for i := range values {
		if values[i].n = lengths[i].(*redis.IntCmd).Val(); values[i].n < 0 {
			return nil, notRedis("a value has %d bytes", values[i].n)
		}
	}
	sort.Slice(values, func(i, k int) bool {
		return values[i].off < values[k].off || values[i].off == values[k].off && values[i].n < values[k].n
	})
	end := int64(0)
	for _, v := range values {
		if v.off != end || v.n > 1<<62-end {
			return nil, errs.New(errs.ErrFormat,
				"the values do not form a file: one begins at %d, expected %d", v.off, end)
		}
		end += v.n
	}
	return values, nil
}

// Size returns the file's size when it was opened.
func (o *object) Size() int64 { return o.size }

// Fetch returns a body that requests values when it is read, directly into the reader's memory.
func (o *object) Fetch(ctx context.Context, off, n int64) (io.ReadCloser, error) {
	i, exact := slices.BinarySearchFunc(o.values, off, func(v value, off int64) int { return cmp.Compare(v.off, off) })
	if !exact {
		i--
	}
	return &body{ctx: ctx, o: o, i: i, off: off, end: off + n}, nil
}

func (o *object) Judge(err error) (retry.Verdict, time.Duration) { return judgeError(err) }

func (o *object) Close() error {
	o.server.closeIdle()
	return nil
}

// A body reads [off, end), beginning with value i.
type body struct {
	ctx      context.Context
	o        *object
	i        int
	off, end int64
}

// One Read requests ranges of step bytes together, up to batch bytes in total. This keeps the server busy and
// lets the caller observe progress.
const (
	step  = 1 << 20
	batch = 16 << 20
)

// Read reads at most one batch into p. If a request of the batch fails, Read returns no bytes.
func (b *body) Read(p []byte) (int, error) {
	n := min(int64(len(p)), b.end-b.off, batch)
	if n == 0 {
		if len(p) == 0 {
			return 0, nil
		}
		return 0, io.EOF
	}
	type ask struct {
		cmd  *redis.ZeroCopyStringCmd
		want int
	}
	i, off := b.i, b.off
	err := b.o.server.with(b.ctx, func(ctx context.Context, c *redis.Client) error {
		i, off = b.i, b.off
		var asks []ask
		_, err := c.Pipelined(ctx, func(pipe redis.Pipeliner) error {
			for offset := int64(0); offset < n; {
				v := b.o.values[i]
				if off == v.off+v.n {
					i++
					continue
				}
				m := min(n-offset, v.off+v.n-off, step)
				// Two more bytes give the library space to read the line end in the same call. The next range
				// overwrites them.
				to := p[offset:min(offset+m+2, n)]
				cmd := redis.NewZeroCopyStringCmd(ctx, to, "getrange", v.key, off-v.off, off-v.off+m-1)
				asks = append(asks, ask{cmd, int(m)})
				_ = pipe.Process(ctx, cmd)
				offset, off = offset+m, off+m
			}
			return nil
		})
		if err != nil {
			return err
		}
		for _, a := range asks {
			if a.cmd.Val() != a.want {
				return errs.New(errs.ErrCorrupt, "a value was removed, or its length has changed")
			}
		}
		return nil
	})
	if err != nil {
		return 0, err
	}
	b.i, b.off = i, off
	return int(n), nil
}

func (b *body) Close() error { return nil }
