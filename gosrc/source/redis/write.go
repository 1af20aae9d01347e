package redis

// This file writes and removes files in Redis.

import (
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/source/parts"
	"github.com/overwire/overwire/gosrc/source/retry"
)

const (
	part     = 16 << 20
	inFlight = 4
	// smallValue is the size of values for a server that refused larger ones. Hosted servers limit requests to
	// a million bytes or more.
	smallValue = 512 << 10
	// unpublished is the lifetime of values after their writer has died.
	unpublished = 24 * time.Hour
	// mostTurns limits how often a writer retries because another writer published first. Only a misbehaving
	// server causes that many retries.
	mostTurns = 1000
)

// An upload is a file being written. It implements parts.Store.
type upload struct {
	name
	server *server
	id     string // random part of the draft's keys

	most atomic.Int64 // largest size of a value

	mu   sync.Mutex
	sent []int64 // offsets of the sent values
}

// Create begins a file. The existing content of the key remains until Publish. The caller ends the draft with Drop.
func Create(ctx context.Context, uri string, opt source.Options, _ int64) (source.Draft, error) {
	n, err := parseURI(uri)
	if err != nil {
		return nil, err
	}
	s, err := newServer(n, opt)
	if err != nil {
		return nil, n.placeError("save", -1, err)
	}
	var id [8]byte
	_, _ = rand.Read(id[:]) // cannot fail
	u := &upload{name: n, server: s, id: hex.EncodeToString(id[:])}
	u.most.Store(part)
	// Report a wrong password or a cluster before the caller encodes data.
	if err := doRequest(ctx, u.server, func(ctx context.Context, c *redis.Client) error {
		if err := c.StrLen(ctx, n.key).Err(); err != nil {
			return err
		}
		u.most.Store(mostValue(ctx, c))
		return refuseCluster(ctx, c, n.key)
	}); err != nil {
		s.closeIdle()
		return nil, n.placeError("save", -1, err)
	}
	return parts.New(ctx, u, part, cmp.Or(s.retry.Connections, inFlight)), nil
}

// doRequest sends a request and retries it.
func doRequest(ctx context.Context, s *server, fn func(context.Context, *redis.Client) error) error {
	return repeatRequest(ctx, s, judgeError, fn)
}

func repeatRequest(ctx context.Context, s *server, judge func(error) (retry.Verdict, time.Duration),
	fn func(context.Context, *redis.Client) error) error {
	_, err := retry.Repeat(ctx, s.retry, judge, s.heard.Load, func() error {
		err := s.with(ctx, fn)
		var a *answer
		if err == nil || errors.As(err, &a) {
			s.heard.Store(true)
		}
		return err
	})
	return errs.FromOS(err)
}

// hiddenKey returns the key of a value before it is published. It does not begin with the file's key and a
// colon, so readers do not find it.
func (u *upload) hiddenKey(off int64) string {
	return u.key + ".draft-" + u.id + ":" + strconv.FormatInt(off, 10)
}

func (u *upload) shownKey(off int64) string {
	return u.key + ":ow-" + u.id + ":" + strconv.FormatInt(off, 10)
}

// mostValue returns the largest value that the server accepts, at most the size of a part. If the server does
// not report its limit, it returns the size of a part. Part then lowers the limit after a refusal.
func mostValue(ctx context.Context, c *redis.Client) int64 {
	const setting = "proto-max-bulk-len"
	all, err := c.ConfigGet(ctx, setting).Result()
	if n, numberErr := strconv.ParseInt(all[setting], 10, 64); err == nil && numberErr == nil && n > 0 {
		return min(n, part)
	}
	return part
}

// errLarge is the error for a value that may be too large for the server.
var errLarge = errs.New(errs.ErrNotSupported, "the server does not accept a value of this size")

// Part sends one part as one value, or as several if the server does not accept values of that size.
func (u *upload) Part(ctx context.Context, k int, p [][]byte) error {
	rest := bytes.Join(p, nil)
	if len(p) == 1 {
		rest = p[0]
	}
	off, noted := int64(k)*part, int64(-1)
	for isFirst := true; isFirst || len(rest) > 0; isFirst = false {
		value := rest[:min(int64(len(rest)), u.most.Load())]
		if off > noted {
			u.mu.Lock()
			u.sent = append(u.sent, off)
			u.mu.Unlock()
			noted = off
		}
		err := u.sendValue(ctx, off, value)
		if errors.Is(err, errLarge) && len(value) > smallValue {
			u.most.Store(smallValue)
			continue
		}
		if err != nil {
			return u.placeError("save", off, err)
		}
		rest, off = rest[len(value):], off+int64(len(value))
	}
	return nil
}

// sendValue sends one value. A server can only refuse a value over its limit by closing the connection. If that
// happens with a large value, the error is errLarge.
func (u *upload) sendValue(ctx context.Context, off int64, value []byte) error {
	isLost := false
	judge := func(err error) (retry.Verdict, time.Duration) {
		_, isAnswer := errors.AsType[*answer](err)
		isLost = !isAnswer && (errors.Is(err, errs.ErrIO) || errors.Is(err, errs.ErrTimeout))
		if isLost && len(value) > smallValue {
			return retry.Never, 0
		}
		return judgeError(err)
	}
	err := repeatRequest(ctx, u.server, judge, func(ctx context.Context, c *redis.Client) error {
		return commandError(c.Set(ctx, u.hiddenKey(off), value, unpublished))
	})
	switch {
	case err == nil || !isLost || ctx.Err() != nil:
		return err
	case len(value) > smallValue:
		return errLarge
	}
	return fmt.Errorf(
		"%w while sending a value of %d bytes: does the server limit the size of values (proto-max-bulk-len)?", err,
		len(value))
}

// commandError returns the error of a command that changes a key. Only the response OK means success.
func commandError(c *redis.StatusCmd) error {
	if text, err := c.Result(); err != nil || text == "OK" {
		return err
	}
	return errs.New(errs.ErrIO, "the server's response does not confirm that a value is stored")
}

// Publish renames the values and removes the values of the earlier file, in one transaction. If several writers
// run concurrently, the file of the last one remains.
func (u *upload) Publish(ctx context.Context, n int, whole []byte) error {
	if n == 0 {
		if err := u.Part(ctx, 0, [][]byte{whole}); err != nil {
			return err
		}
	}
	tries := 0
	err := u.inTurn(ctx, func(ctx context.Context, c *redis.Client) error {
		if tries++; tries > 1 { // an earlier transaction may have succeeded
			if k, err := c.Exists(ctx, u.shownKey(0)).Result(); err != nil || k == 1 {
				return err
			}
		}
		old, err := findValues(ctx, c, u.key)
		if errors.Is(err, errs.ErrFormat) { // the values do not form a file: remove the values written by this package
			old, err = writtenValues(ctx, c, u.key)
		}
		if err != nil {
			return err
		}
		keys := make([]string, len(u.sent))
		for i, off := range u.sent {
			keys[i] = u.hiddenKey(off)
		}
		if k, err := c.Exists(ctx, keys...).Result(); err != nil {
			return err
		} else if gap := int64(len(keys)) - k; gap != 0 {
			return errs.New(errs.ErrIO, "the server has lost %d of %d values: its memory is full", gap, len(keys))
		}
		var renames []*redis.StatusCmd
		_, err = c.TxPipelined(ctx, func(p redis.Pipeliner) error {
			unlinkValues(ctx, p, old)
			for _, off := range u.sent {
				renames = append(renames, p.Rename(ctx, u.hiddenKey(off), u.shownKey(off)))
				p.Persist(ctx, u.shownKey(off))
			}
			p.Set(ctx, u.turnKey(), u.id, unpublished) // other writers watch this key and list the values again
			p.Del(ctx, u.turnKey())
			return nil
		})
		for _, r := range renames {
			if err == nil {
				err = commandError(r)
			}
		}
		return err
	})
	if err != nil && u.isPublished() {
		err = nil
	}
	if err == nil {
		u.server.closeIdle()
	}
	return u.placeError("save", -1, err)
}

// isPublished reports whether the server has the values although Publish failed: its answer was lost, or the caller was
// cancelled before it arrived.
func (u *upload) isPublished() (is bool) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	err := doRequest(ctx, u.server, func(ctx context.Context, c *redis.Client) error {
		k, err := c.Exists(ctx, u.shownKey(0)).Result()
		is = k == 1
		return err
	})
	return err == nil && is
}

// writtenValues lists the values under a key that were written by this package, even if they do not form a file.
func writtenValues(ctx context.Context, c *redis.Client, key string) (values []value, err error) {
	keys, err := scanKeys(ctx, c, key)
	for _, k := range keys {
		if ownKey().MatchString(k[len(key)+1:]) {
			values = append(values, value{key: k})
		}
	}
	return values, err
}

// turnKey returns the key that every writer of a file changes when it publishes.
func (u *upload) turnKey() string { return u.key + ".draft-turn" }

// inTurn runs fn, which ends with a transaction. If another writer has published in the meantime, the values
// that fn listed have changed, so inTurn runs fn again.
func (u *upload) inTurn(ctx context.Context, fn func(context.Context, *redis.Client) error) error {
	for turn := 1; ; turn++ {
		overtaken := false
		err := doRequest(ctx, u.server, func(ctx context.Context, c *redis.Client) error {
			err := c.Do(ctx, "WATCH", u.turnKey()).Err()
			if err == nil {
				err = fn(ctx, c)
			}
			overtaken = errors.Is(err, redis.TxFailedErr)
			return err
		})
		if !overtaken || ctx.Err() != nil {
			return err
		}
		if turn == mostTurns {
			return errs.New(errs.ErrIO, "gave up because other writers published %d times during this write", turn)
		}
	}
}

// UndoPublish removes the published values; see source.Draft. No other file has values with these keys, and a writer
// that replaces the file removes them.
func (u *upload) UndoPublish(ctx context.Context) error {
	s := &server{opt: u.server.opt, retry: u.server.retry} // Publish has closed the connections
	defer s.closeIdle()
	values := make([]value, len(u.sent))
	for i, off := range u.sent {
		values[i].key = u.shownKey(off)
	}
	return u.placeError("save", -1, doRequest(ctx, s, func(ctx context.Context, c *redis.Client) error {
		_, err := c.TxPipelined(ctx, func(p redis.Pipeliner) error {
			unlinkValues(ctx, p, values)
			return nil
		})
		return err
	}))
}

// Abort removes the values that were sent. It has its own deadline, because the draft's context is often
// already cancelled.
func (u *upload) Abort() {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	if len(u.sent) > 0 {
		_ = doRequest(ctx, u.server, func(ctx context.Context, c *redis.Client) error {
			_, err := c.Pipelined(ctx, func(p redis.Pipeliner) error {
				for _, off := range u.sent {
					p.Unlink(ctx, u.hiddenKey(off))
				}
				return nil
			})
			return err
		})
	}
	u.server.closeIdle()
}

// Remove deletes a file. It succeeds if the file does not exist.
func Remove(ctx context.Context, uri string, opt source.Options) error {
	n, err := parseURI(uri)
	if err != nil {
		return err
	}
	s, err := newServer(n, opt)
	if err != nil {
		return n.placeError("save", -1, err)
	}
	defer s.closeIdle()
	return n.placeError("save", -1, doRequest(ctx, s, func(ctx context.Context, c *redis.Client) error {
		old, err := findValues(ctx, c, n.key)
		if err != nil || len(old) == 0 {
			return err
		}
		_, err = c.TxPipelined(ctx, func(p redis.Pipeliner) error {
			unlinkValues(ctx, p, old)
			return nil
		})
		return err
	}))
}

// unlinkValues removes values with few commands, because a transaction's response has one element per command
// and must not exceed mostElements.
func unlinkValues(ctx context.Context, p redis.Pipeliner, values []value) {
	for some := range slices.Chunk(values, 1000) {
		keys := make([]string, len(some))
		for i, v := range some {
			keys[i] = v.key
		}
		p.Unlink(ctx, keys...)
	}
}
