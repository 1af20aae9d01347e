package pinned

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/spawn/spawntest"
)

// Ordinary memory grows to the size that Await asks for, up to its limit, and keeps its contents.
func TestGrows(t *testing.T) {
	m, err := Take(64<<20, 20<<20, nil)
	if err != nil {
		t.Fatal(err)
	}
	m.Want(1 << 20)
	for n := int64(1); n <= 20<<20; n += 3 << 20 {
		if err := m.Await(t.Context(), n); err != nil {
			t.Fatal(err)
		}
		m.Bytes(n-1, 1)[0] = byte(n >> 20)
	}
	for n := int64(1); n <= 20<<20; n += 3 << 20 {
		if b := m.Bytes(n-1, 1)[0]; b != byte(n>>20) {
			t.Errorf("%d bytes: %d", n, b)
		}
	}
	if err := m.Await(t.Context(), 20<<20+1); !errors.Is(err, errs.ErrMemory) {
		t.Errorf("over the limit: %v", err)
	}
	m.Keep() // this frees ordinary memory
	if Ready(nil) != 0 {
		t.Error("ordinary memory was cached")
	}
	for end := time.Now().Add(20 * time.Second); len(spawntest.Left()) > 0; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("still running: %v", spawntest.Left())
		}
	}
}

// Unused memory can be freed, and Await ends with its context.
func TestUnused(t *testing.T) {
	m, err := Take(1<<20, 1<<20, nil)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	for range 3 { // the memory may become ready before the check
		if err := m.Await(ctx, 1<<20); err != nil && !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	}
	m.Free()
	for _, c := range [][2]int64{{0, 1}, {1, 0}, {1 << 60, 1}} {
		if _, err := Take(c[0], c[1], nil); !errors.Is(err, errs.ErrArgument) {
			t.Errorf("%v: %v", c, err)
		}
	}
}
