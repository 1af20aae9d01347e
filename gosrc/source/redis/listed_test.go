package redis

import (
	"bytes"
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/source/sourcetest"
)

// between is a hook. It calls do after a file's values are listed and before their lengths are requested.
type between struct {
	redis.Hook
	do func()
}

func (b between) DialHook(next redis.DialHook) redis.DialHook { return next }

func (b between) ProcessHook(next redis.ProcessHook) redis.ProcessHook { return next }

func (b between) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		if cmds[0].Name() == "strlen" { // not the client's initial commands
			b.do()
		}
		return next(ctx, cmds)
	}
}

// If a file is replaced while its values are listed, the new file is read, without gaps. If it is replaced
// again and again, reading fails with errs.ErrCorrupt.
func TestReplacedWhileListed(t *testing.T) {
	t.Parallel()
	s := sourcetest.StartRedis(t, false)
	uri := "redis://" + s.Addr + "/model"
	for _, size := range []int{100, part + 100} {
		for _, c := range []struct {
			times int
			want  error
		}{{0, nil}, {1, nil}, {looks - 1, nil}, {looks, errs.ErrCorrupt}} {
			put(t, withConnection(s), uri, bytes.Repeat([]byte{255}, size))
			client, times := plainClient(t, s), 0
			client.AddHook(between{do: func() {
				if times < c.times {
					times++
					put(t, withConnection(s), uri, bytes.Repeat([]byte{byte(times)}, size))
				}
			}})
			values, err := findValues(bg, client, "model")
			if !errors.Is(err, c.want) || times != c.times {
				t.Fatalf("%d bytes, replaced %d times of %d: %v", size, times, c.times, err)
			}
			var n int64
			for _, v := range values {
				n += v.n
			}
			if err == nil && n != int64(size) {
				t.Errorf("%d bytes, replaced %d times: the values have %d bytes", size, c.times, n)
			}
		}
	}
}

// A read of a replaced file fails without retries, because the old file will not return.
func TestReplacedIsFinal(t *testing.T) {
	t.Parallel()
	s := sourcetest.StartRedis(t, false)
	uri := "redis://" + s.Addr + "/model"
	put(t, withConnection(s), uri, random(1000))
	o, err := Open(bg, uri, withConnection(s, "retries", "8"))
	if err != nil {
		t.Fatal(err)
	}
	defer o.Close()
	put(t, withConnection(s), uri, random(1000))
	err = o.ReadAt(bg, make([]byte, 1000), 0)
	if !errors.Is(err, errs.ErrCorrupt) || strings.Contains(err.Error(), "attempts") {
		t.Error(err)
	}
}
