package queue

// This file keeps the free slots of a queue.

import (
	"context"
	"slices"
	"sync"
)

// freeSlots returns slots that are probably still in the processor's cache, so that filling and copying them
// needs less memory bandwidth. A reader that fills slots of its own gets the one that it filled last; others get
// the one that was returned last.
type freeSlots struct {
	tokens chan struct{} // one for each free slot
	mu     sync.Mutex
	slots  []*Slot // in the order in which they were returned
}

// anyone is the reader's number for a slot that several readers fill.
const anyone = -1

func newFreeSlots(most int) *freeSlots { return &freeSlots{tokens: make(chan struct{}, most)} }

func (f *freeSlots) putSlot(s *Slot) {
	f.mu.Lock()
	f.slots = append(f.slots, s)
	f.mu.Unlock()
	f.tokens <- struct{}{}
}

// putSlotAndJoined returns the slots that are joined to a slot, then the slot itself. From then on its next user
// may join others to it.
func (f *freeSlots) putSlotAndJoined(s *Slot) {
	for _, m := range s.joined {
		f.putSlotAndJoined(m)
	}
	s.joined, s.result.done, s.build.tasks = s.joined[:0], nil, nil
	f.putSlot(s)
}

// takeSlotFor waits for a slot for a reader or for the end of ctx.
func (f *freeSlots) takeSlotFor(ctx context.Context, reader int) (*Slot, error) {
	select {
	case <-f.tokens:
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	return f.popSlotFor(reader), nil
}

// tryTakeSlotFor takes a slot for a reader. It returns nil if none is free.
func (f *freeSlots) tryTakeSlotFor(reader int) *Slot {
	select {
	case <-f.tokens:
		return f.popSlotFor(reader)
	default:
		return nil
	}
}

// popSlotFor takes a slot for a reader that has taken a token, so a slot is free.
func (f *freeSlots) popSlotFor(reader int) *Slot {
	f.mu.Lock()
	defer f.mu.Unlock()
	n := len(f.slots) - 1
	if reader != anyone {
		for n > 0 && f.slots[n].reader != reader {
			n-- // prefer the slots that were returned first: newer ones suit the readers that filled them
		}
	}
	s := f.slots[n]
	s.reader = reader
	f.slots = slices.Delete(f.slots, n, n+1)
	return s
}

// takeSlots takes n slots, waiting until they are returned.
func (f *freeSlots) takeSlots(n int) {
	for range n {
		_, _ = f.takeSlotFor(context.Background(), anyone) // cannot fail: this context does not end
	}
}
