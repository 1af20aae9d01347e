package queue

import (
	"context"
	"testing"
)

// A reader gets a slot that it filled, or else the one that was freed first. Other callers get the one that was freed
// last. takeSlots waits for all slots.
func TestFreeSlots(t *testing.T) {
	f := newFreeSlots(3)
	slots := []*Slot{{index: 0}, {index: 1}, {index: 2}}
	for _, s := range slots {
		f.putSlot(s)
	}
	for _, c := range []struct{ reader, want int }{{anyone, 2}, {5, 0}, {6, 1}} {
		if s, err := f.takeSlotFor(t.Context(), c.reader); err != nil || s.index != c.want {
			t.Fatalf("slot %v, %v, want %d", s, err, c.want)
		}
	}
	for _, n := range []int{1, 0, 2} {
		f.putSlot(slots[n])
	}
	for _, c := range []struct{ reader, want int }{{5, 0}, {6, 1}, {5, 2}} {
		if s, err := f.takeSlotFor(t.Context(), c.reader); err != nil || s.index != c.want {
			t.Fatalf("reader %d: slot %v, %v, want %d", c.reader, s, err, c.want)
		}
	}
	f.putSlot(slots[0])
	if s, err := f.takeSlotFor(t.Context(), anyone); err != nil || s != slots[0] {
		t.Fatalf("slot %v, %v, want the one that was freed", s, err)
	}
	all := make(chan struct{})
	go func() {
		f.takeSlots(3)
		close(all)
	}()
	f.putSlot(slots[0])
	f.putSlot(slots[1])
	select {
	case <-all:
		t.Fatal("takeSlots returned before all slots were free")
	default:
	}
	f.putSlot(slots[2])
	<-all
	ended, end := context.WithCancel(t.Context())
	end()
	if s, err := f.takeSlotFor(ended, anyone); err == nil {
		t.Fatalf("got slot %v, but none is free", s)
	}
}
