package spawn

import (
	"errors"
	"sync/atomic"
	"testing"
)

// Each calls for every number once, never more at a time than it may, and
// returns the error of the least number that failed; nothing runs after it.
func TestEach(t *testing.T) {
	var now, most, calls atomic.Int64
	if err := Each("test", 3, 100, func(int) error {
		n := now.Add(1)
		defer now.Add(-1)
		for m := most.Load(); n > m && !most.CompareAndSwap(m, n); m = most.Load() {
		}
		calls.Add(1)
		return nil
	}); err != nil || calls.Load() != 100 || most.Load() > 3 {
		t.Fatalf("%v, %d calls, %d at once", err, calls.Load(), most.Load())
	}
	bad := errors.New("bad")
	for range 50 {
		if err := Each("test", 4, 40, func(i int) error {
			if i >= 2 {
				return errors.New("later")
			}
			if i == 1 {
				return bad
			}
			return nil
		}); !errors.Is(err, bad) {
			t.Fatal(err)
		}
	}
	if err := Each("test", 4, 0, func(int) error { return bad }); err != nil {
		t.Fatal(err)
	}
}
