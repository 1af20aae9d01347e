package blocks

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"

	"github.com/overwire/overwire/gosrc/internal/spawn"
)

func TestCache(t *testing.T) {
	// Promise: a block is made once for all callers that ask at the same time; an
	// error is not kept; unused blocks go when there are too many.
	c := New[int64](100)
	var made atomic.Int64
	bad := errors.New("bad")
	get := func(k int64, n int, err error) error {
		e, err := c.Get(k, func() ([]byte, error) {
			made.Add(1)
			return make([]byte, n), err
		})
		if err == nil {
			c.Put(e)
		}
		return err
	}
	if err := get(1, 10, bad); err != bad {
		t.Fatal(err)
	}
	if err := spawn.Each(context.Background(), "test", 8, 100, func(int) error { return get(1, 10, nil) }); err != nil {
		t.Fatal(err)
	}
	if made.Load() != 2 {
		t.Fatalf("made %d times", made.Load())
	}
	for k := range int64(50) {
		if err := get(k, 30, nil); err != nil {
			t.Fatal(err)
		}
		if c.size > 130 {
			t.Fatalf("%d bytes are held", c.size)
		}
	}
}
