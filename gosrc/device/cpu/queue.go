package cpu

import (
	"context"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/overwire/overwire/gosrc/device"
)

// A Queue is the host at work for one load; see device.Queue. A piece is decoded
// by the worker that read it, while its bytes are in that core's cache. The memory
// is allocated once and never grows.
type Queue struct {
	free   chan *slot
	slots  int
	base   unsafe.Pointer // nil: no slot has bytes
	length int64
}

type slot struct {
	bytes, view []byte // view, if not nil, stands for bytes
	owned       atomic.Bool
}

func (s *slot) Memory() []byte {
	if s.view != nil {
		return s.view
	}
	return s.bytes
}

func (s *slot) View(b []byte) { s.view = b }

func (s *slot) DeviceMirror() unsafe.Pointer { return nil }

// decoders serve all queues: a pool of each would keep theirs until the garbage
// collector has run twice.
var decoders = sync.Pool{New: func() any { return new(Decoder) }}

// NewQueue gives a queue with that number of slots, each at least that long; none if
// nothing needs a slot.
func NewQueue(slots int, size int64) (*Queue, error) {
	if size == 0 {
		slots = 0
	}
	q := &Queue{free: make(chan *slot, slots), slots: slots}
	if slots == 0 {
		return q, nil
	}
	size = (size + page - 1) &^ (page - 1)
	var err error
	if q.base, q.length, err = Map(size * int64(slots)); err != nil {
		return nil, err
	}
	mem := unsafe.Slice((*byte)(q.base), q.length)
	for i := range int64(slots) {
		q.free <- &slot{bytes: mem[i*size : (i+1)*size : (i+1)*size]}
	}
	return q, nil
}

// Get waits for a free slot, or for the end of ctx.
func (q *Queue) Get(ctx context.Context) (device.Slot, error) {
	select {
	case s := <-q.free:
		s.owned.Store(true)
		return s, nil
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

// Put gives a slot back.
func (q *Queue) Put(s device.Slot) {
	own := s.(*slot)
	if !own.owned.Swap(false) {
		panic("cpu: slot given back twice")
	}
	own.view = nil
	q.free <- own
}

// Submit decodes the tasks, and returns when they are done; the first error is
// that of all tasks behind it, too.
func (q *Queue) Submit(s device.Slot, _ int64, tasks []device.DecodeTask, done func(task int, err error)) error {
	defer q.Put(s)
	dec := decoders.Get().(*Decoder)
	defer decoders.Put(dec)
	staged := s.Memory()
	var err error
	for i := range tasks {
		t := &tasks[i]
		if err == nil {
			err = dec.Run(t, staged[t.Src:t.Src+t.Chunk.Stored])
		}
		done(i, err)
	}
	return nil
}

// Decode decodes the chunk of one task out of its stored bytes.
func Decode(t *device.DecodeTask, stored []byte) error {
	dec := decoders.Get().(*Decoder)
	defer decoders.Put(dec)
	return dec.Run(t, stored)
}

// Drain has nothing to wait for.
func (q *Queue) Drain(context.Context) error { return nil }

// Asynchronous is false: decoding is the workers' own time.
func (q *Queue) Asynchronous() bool { return false }

// Time has nothing to tell.
func (q *Queue) Time(device.Span) error { return nil }

// StagingBytes is the memory of all slots.
func (q *Queue) StagingBytes() int64 { return q.length }

// Close waits until every slot is back and releases the memory.
func (q *Queue) Close() {
	for range q.slots {
		<-q.free
	}
	if q.base != nil {
		Unmap(q.base, q.length)
	}
}
