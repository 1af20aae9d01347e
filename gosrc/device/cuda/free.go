//go:build cgo

package cuda

// This file has the free slots of a queue.

import (
	"context"
	"slices"
	"sync"
)

// freeSlots gives the slot that came back first, or the one that came back last: its memory
// is the likeliest to be in the processor's cache still, so that filling and copying it take
// less of the host's memory.
type freeSlots struct {
	there chan struct{} // one for each slot
	mu    sync.Mutex
	slots []*Slot
	last  bool
}

func newFreeSlots(most int) *freeSlots { return &freeSlots{there: make(chan struct{}, most)} }

func (f *freeSlots) put(s *Slot) {
	f.mu.Lock()
	f.slots = append(f.slots, s)
	f.mu.Unlock()
	f.there <- struct{}{}
}

// take waits for a slot, or for the end of ctx.
func (f *freeSlots) take(ctx context.Context) (*Slot, error) {
	select {
	case <-f.there:
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	n := 0
	if f.last {
		n = len(f.slots) - 1
	}
	s := f.slots[n]
	f.slots = slices.Delete(f.slots, n, n+1)
	return s, nil
}

// takeAll waits until n slots are back, and takes them.
func (f *freeSlots) takeAll(n int) {
	for range n {
		_, _ = f.take(context.Background()) // it does not end
	}
}
