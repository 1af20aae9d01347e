package cpu

// Implements the host's queue: each worker decodes the pieces that it reads.

import (
	"context"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/overwire/overwire/gosrc/device"
)

// A Queue is the device.Queue of the host. The worker that read a piece also decodes it, while the bytes are in
// the core's cache. The memory is allocated once and never grows.
type Queue struct {
	free   chan *slot
	memory device.Memory // holds all slots; zero if there are no slots
}

type slot struct {
	bytes, view []byte // view, if not nil, replaces bytes
	owned       atomic.Bool
}

func (s *slot) Memory() []byte {
	if s.view != nil {
		return s.view
	}
	return s.bytes
}

func (s *slot) View(b []byte) { s.view = b }

func (s *slot) ViewMirror() unsafe.Pointer { return nil }

func (s *slot) CheckOnSubmit() {}

// decoders is shared by all queues, because a pool per queue would keep its decoders until the
// second garbage collection.
var decoders = sync.Pool{New: func() any { return new(Decoder) }}

// NewQueue returns a queue with slots of at least size bytes. If size is 0, it has no slots.
func NewQueue(slots int, size int64) (*Queue, error) {
	if size == 0 {
		slots = 0
	}
	q := &Queue{free: make(chan *slot, slots)}
	if slots == 0 {
		return q, nil
	}
	size = (size + page - 1) &^ (page - 1)
	all, err := Alloc([]int64{size * int64(slots)})
	if err != nil {
		return nil, err
	}
	q.memory = all[0]
	mem := q.memory.Slice()
	for i := range int64(slots) {
		q.free <- &slot{bytes: mem[i*size : (i+1)*size : (i+1)*size]}
	}
	return q, nil
}

// Get waits for a free slot, or until ctx ends.
func (q *Queue) Get(ctx context.Context) (device.Slot, error) {
	select {
	case s := <-q.free:
		s.owned.Store(true)
		return s, nil
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

// GetFor is Get, because all readers share the slots.
func (q *Queue) GetFor(ctx context.Context, _ int) (device.Slot, error) { return q.Get(ctx) }

// Put returns a slot.
func (q *Queue) Put(s device.Slot) {
	own := s.(*slot)
	if !own.owned.Swap(false) {
		panic("cpu: slot returned twice")
	}
	own.view = nil
	q.free <- own
}

// Submit decodes the tasks and returns when they are done. After the first error, all later tasks get that error.
func (q *Queue) Submit(s device.Slot, _ int64, tasks []device.DecodeTask, done func(task int, err error)) error {
	defer q.Put(s)
	dec := decoders.Get().(*Decoder)
	defer decoders.Put(dec)
	memory := s.Memory()
	var err error
	for i := range tasks {
		t := &tasks[i]
		if err == nil {
			err = dec.Run(t, memory[t.Src:t.Src+t.Chunk.Stored])
		}
		done(i, err)
	}
	return nil
}

// Decode decodes the chunk of a task from its stored bytes.
func Decode(t *device.DecodeTask, stored []byte) error {
	dec := decoders.Get().(*Decoder)
	defer decoders.Put(dec)
	return dec.Run(t, stored)
}

// Drain returns immediately: Submit does all the work.
func (q *Queue) Drain(context.Context) error { return nil }

// Asynchronous returns false: workers do the decoding.
func (q *Queue) Asynchronous() bool { return false }

// CanCheck returns false: the worker that read a chunk compares its checksum.
func (q *Queue) CanCheck() bool { return false }

// TraceTimes does nothing: workers record the times.
func (q *Queue) TraceTimes(device.TraceFunc) error { return nil }

// PinnedBytes returns the size of all slots in bytes.
func (q *Queue) PinnedBytes() int64 { return q.memory.Bytes }

// Close waits until every slot has been returned, and frees the memory.
func (q *Queue) Close() {
	for range cap(q.free) {
		<-q.free
	}
	q.memory.Release()
}
