package ring

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"
)

// A slot has one owner at a time, slots do not overlap, and Close waits for
// all of them.
func TestRing(t *testing.T) {
	released := false
	r := New(make([]byte, 4*100), 4, 100, func() { released = true })
	var wg sync.WaitGroup
	for g := range 16 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			for range 200 {
				s, err := r.Get(context.Background())
				if err != nil {
					t.Error(err)
					return
				}
				for i := range s.Bytes {
					s.Bytes[i] = byte(g)
				}
				for _, b := range s.Bytes {
					if b != byte(g) {
						t.Error("two owners")
					}
				}
				r.Put(s)
			}
		}()
	}
	wg.Wait()
	r.Close()
	if !released {
		t.Error("the memory was not released")
	}
}

func TestGetEndsWithItsContext(t *testing.T) {
	r := New(make([]byte, 10), 1, 10, func() {})
	s, _ := r.Get(context.Background())
	cause := errors.New("enough")
	ctx, cancel := context.WithCancelCause(context.Background())
	time.AfterFunc(10*time.Millisecond, func() { cancel(cause) })
	if _, err := r.Get(ctx); !errors.Is(err, cause) {
		t.Errorf("%v, want the cause", err)
	}
	r.Put(s)
	defer func() {
		if recover() == nil {
			t.Error("a slot given back twice passes")
		}
	}()
	r.Put(s)
}
