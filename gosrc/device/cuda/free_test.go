//go:build cgo

package cuda

import (
	"context"
	"testing"
)

// A free slot is the one that came back first or last, and takeAll waits for all of them.
func TestFreeSlots(t *testing.T) {
	f := newFreeSlots(3)
	slots := []*Slot{{index: 0}, {index: 1}, {index: 2}}
	for _, s := range slots {
		f.put(s)
	}
	for _, want := range []int{0, 2} {
		f.last = want == 2
		if s, err := f.take(t.Context()); err != nil || s.index != want {
			t.Fatalf("slot %v, %v, not %d", s, err, want)
		}
	}
	f.put(slots[0])
	if s, err := f.take(t.Context()); err != nil || s != slots[0] {
		t.Fatalf("slot %v, %v, not the one that came back", s, err)
	}
	all := make(chan struct{})
	go func() {
		f.takeAll(3)
		close(all)
	}()
	f.put(slots[0])
	select {
	case <-all:
		t.Fatal("it has not all slots")
	default:
	}
	f.put(slots[2])
	<-all
	ended, end := context.WithCancel(t.Context())
	end()
	if s, err := f.take(ended); err == nil {
		t.Fatalf("slot %v of none", s)
	}
}
