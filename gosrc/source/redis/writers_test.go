package redis

import (
	"bytes"
	"errors"
	"sync"
	"testing"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/spawn"
	"github.com/overwire/overwire/gosrc/source/sourcetest"
)

// Concurrent writers of one key all succeed. Exactly one of their files remains, complete and without values of
// the others.
func TestWritersOfOneKey(t *testing.T) {
	t.Parallel()
	s := sourcetest.StartRedis(t, false)
	uri, size := "redis://"+s.Addr+"/model", 1000
	c := plainClient(t, s)
	for range 10 {
		var writers sync.WaitGroup
		for k := range 4 {
			writers.Add(1)
			spawn.Go("writer", func() {
				defer writers.Done()
				for range 5 {
					put(t, withConnection(s), uri, bytes.Repeat([]byte{byte(k)}, size+k))
				}
			})
		}
		writers.Wait()
		data, err := get(uri, withConnection(s))
		if err != nil || len(data) == 0 || !bytes.Equal(data, bytes.Repeat(data[:1], size+int(data[0]))) {
			t.Fatalf("%d bytes: %v; keys %q", len(data), err, c.Keys(bg, "*").Val())
		}
		if keys := c.Keys(bg, "*").Val(); len(keys) != 1 {
			t.Fatalf("left in the store: %q", keys)
		}
	}
}

// Saving over values of two writers, which do not form a file, creates a valid file.
func TestSaveOverTwoFiles(t *testing.T) {
	t.Parallel()
	s := sourcetest.StartRedis(t, false)
	uri, data := "redis://"+s.Addr+"/model", random(1000)
	c := plainClient(t, s)
	for _, id := range []string{"00112233445566aa", "00112233445566bb"} {
		if err := c.Set(bg, "model:ow-"+id+":0", data, 0).Err(); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := get(uri, withConnection(s)); !errors.Is(err, errs.ErrFormat) {
		t.Fatalf("two files were read as one: %v", err)
	}
	put(t, withConnection(s), uri, data)
	if back, err := get(uri, withConnection(s)); err != nil || !bytes.Equal(back, data) {
		t.Fatalf("%d bytes: %v", len(back), err)
	}
}
