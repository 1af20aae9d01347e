// Package ring is the staging memory of a load: a fixed set of slots, each
// with one owner at a time. It is allocated once and never grows.
package ring

import (
	"context"
	"sync"
)

// A Slot is one piece of staging memory. Whoever got it from Get owns it until
// Put.
type Slot struct {
	Bytes []byte
	lent  []byte // not nil: stands for Bytes
	owned bool
}

// Memory is the slot's bytes, or what it borrowed.
func (s *Slot) Memory() []byte {
	if s.lent != nil {
		return s.lent
	}
	return s.Bytes
}

// Borrow lets b take the place of the slot's bytes until Put.
func (s *Slot) Borrow(b []byte) { s.lent = b }

// A Ring hands out slots. It is safe for concurrent use.
type Ring struct {
	free chan *Slot

	mu   sync.Mutex
	all  []*Slot
	give func() // returns the memory
}

// New cuts mem into n slots of size bytes; release is called once, by Close,
// when every slot has come back.
func New(mem []byte, n int, size int64, release func()) *Ring {
	r := &Ring{free: make(chan *Slot, n), give: release}
	for i := range int64(n) {
		s := &Slot{Bytes: mem[i*size : (i+1)*size : (i+1)*size]}
		r.all = append(r.all, s)
		r.free <- s
	}
	return r
}

// Get waits for a free slot, or for the end of ctx.
func (r *Ring) Get(ctx context.Context) (*Slot, error) {
	select {
	case s := <-r.free:
		r.mu.Lock()
		s.owned = true
		r.mu.Unlock()
		return s, nil
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

// Put gives a slot back. Giving a slot back twice is a bug, and panics.
func (r *Ring) Put(s *Slot) {
	r.mu.Lock()
	if !s.owned {
		panic("ring: slot given back twice")
	}
	s.owned, s.lent = false, nil
	r.mu.Unlock()
	r.free <- s
}

// Close waits until every slot is back and releases the memory.
func (r *Ring) Close() {
	for range r.all {
		<-r.free
	}
	r.give()
}
