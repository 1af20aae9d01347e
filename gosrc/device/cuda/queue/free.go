package queue

// The free slots of a queue.

import (
	"context"
	"slices"
	"sync"
)

// freeSlots gives slots that are likely to be in the processor's cache still, so that filling and copying
// them takes less of the host's memory: a reader that fills slots of its own gets the one that it filled last,
// others the one that came back last.
type freeSlots struct {
	tokens chan struct{} // one for each free slot
	mu     sync.Mutex
	slots  []*Slot // in the order in which they came back
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

// putSlotAndJoined puts the slots that are joined to a slot, then the slot itself: from then on its next user may
// join others to it.
func (f *freeSlots) putSlotAndJoined(s *Slot) {
	for _, m := range s.joined {
		f.putSlotAndJoined(m)
	}
	s.joined, s.result.done, s.build.tasks = s.joined[:0], nil, nil
	f.putSlot(s)
}

// takeSlotFor waits for a slot for a reader, or for the end of ctx.
func (f *freeSlots) takeSlotFor(ctx context.Context, reader int) (*Slot, error) {
	select {
	case <-f.tokens:
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	return f.popSlotFor(reader), nil
}

// tryTakeSlotFor takes a slot for a reader, or nil if none is free.
func (f *freeSlots) tryTakeSlotFor(reader int) *Slot {
	select {
	case <-f.tokens:
		return f.popSlotFor(reader)
	default:
		return nil
	}
}

// popSlotFor takes a slot for a reader that has taken a token, so one is free.
func (f *freeSlots) popSlotFor(reader int) *Slot {
	f.mu.Lock()
	defer f.mu.Unlock()
	n := len(f.slots) - 1
	if reader != anyone {
		for n > 0 && f.slots[n].reader != reader {
			n-- // down to the slot that came back first: the newer ones suit the readers that filled them
		}
	}
	s := f.slots[n]
	s.reader = reader
	f.slots = slices.Delete(f.slots, n, n+1)
	return s
}

// takeSlots takes n slots, and waits for those that are not back.
func (f *freeSlots) takeSlots(n int) {
	for range n {
		_, _ = f.takeSlotFor(context.Background(), anyone) // without an error: this context does not end
	}
}
