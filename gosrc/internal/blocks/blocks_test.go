package blocks

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/overwire/overwire/gosrc/internal/spawn"
)

func TestCache(t *testing.T) {
	// A block is produced once for all callers that request it in parallel. Errors are not cached, and unused
	// blocks are dropped when the cache is full.
	c := New[int64](100)
	var made atomic.Int64
	bad := errors.New("bad")
	get := func(k int64, n int, err error) error {
		e, err := c.Get(context.Background(), k, func() ([]byte, error) {
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
		t.Fatalf("the block was produced %d times, want 2", made.Load())
	}
	for k := range int64(50) {
		if err := get(k, 30, nil); err != nil {
			t.Fatal(err)
		}
		if c.size > 130 {
			t.Fatalf("the cache has %d bytes", c.size)
		}
	}
}

func TestOthers(t *testing.T) {
	// A cancelled caller does not fail others that wait for the same block. A caller whose context has ended
	// does not wait.
	c := New[int](100)
	begun, end := make(chan struct{}), make(chan struct{})
	failed := make(chan error, 1)
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		_, err := c.Get(ctx, 1, func() ([]byte, error) {
			close(begun)
			<-end
			return nil, context.Canceled
		})
		failed <- err
	}()
	<-begun
	cancel()
	if _, err := c.Get(ctx, 1, nil); !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for range 4 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			e, err := c.Get(context.Background(), 1, func() ([]byte, error) { return []byte{7}, nil })
			if err != nil || e.Data[0] != 7 {
				t.Errorf("%v", err)
				return
			}
			c.Put(e)
		}()
	}
	time.Sleep(10 * time.Millisecond) // some of them are now waiting
	close(end)
	wg.Wait()
	if err := <-failed; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	if c.size != 1 || c.lru.Len() != 1 {
		t.Errorf("%d bytes in %d unused blocks", c.size, c.lru.Len())
	}
	defer func() {
		if recover() == nil {
			t.Error("no panic")
		}
		if _, err := c.Get(context.Background(), 2, func() ([]byte, error) { return nil, nil }); err != nil {
			t.Error(err) // the panic must not leave a block
		}
	}()
	_, _ = c.Get(context.Background(), 2, func() ([]byte, error) { panic("a fill") })
}

func TestFailed(t *testing.T) {
	// Callers that wait for a fill that fails get its error and do not retry. Later callers retry.
	c := New[int](100)
	begun, end := make(chan struct{}), make(chan struct{})
	broken := errors.New("broken")
	var fills atomic.Int32
	fill := func() ([]byte, error) {
		if fills.Add(1) == 1 {
			close(begun)
		}
		<-end
		return nil, broken
	}
	var wg sync.WaitGroup
	get := func() {
		defer wg.Done()
		if _, err := c.Get(context.Background(), 1, fill); !errors.Is(err, broken) {
			t.Error(err)
		}
	}
	wg.Add(1)
	go get()
	<-begun
	for range 4 {
		wg.Add(1)
		go get()
	}
	for users := 0; users < 5; {
		c.mu.Lock()
		users = c.by[1].users
		c.mu.Unlock()
	}
	close(end)
	wg.Wait()
	if n := fills.Load(); n != 1 {
		t.Errorf("%d fills", n)
	}
	if e, err := c.Get(context.Background(), 1, func() ([]byte, error) { return []byte{7}, nil }); err != nil ||
		e.Data[0] != 7 {
		t.Error(err)
	}
}
