package queue

/*
#include "queue.h"
#include "../../../../cuda/abi.h"
*/
import "C"

import (
	"context"
	"sync"
	"time"
	"unsafe"

	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/device/cuda/memory"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/tensor"
)

const (
	statusBytes = 16 << 10
	tableBytes  = headBytes - statusBytes

	// MaxWords is the maximum number of status words of a round: one per chunk, and one per part of chunks whose
	// checksums are compared.
	MaxWords = statusBytes / 4

	// GapLimit limits AllowGapWrites: only gaps of fewer than GapLimit bytes between neighbouring tasks may be
	// overwritten.
	GapLimit = 16

	// GroupSlots is the number of slots worth collecting for one submission. A driver call takes microseconds, and a
	// load has thousands of slots that fit in a core's cache.
	GroupSlots = 16

	// scratchBytes is enough for any chunk. Chunks with scattered or unaligned destinations are first decoded to
	// scratch memory.
	scratchBytes = 16 << 20
)

// A Queue is the device.Queue of a GPU, for one load.
type Queue struct {
	pool    *Pool
	c       *C.struct_owcu_queue
	inPlace bool // kernels read slots in place; see ReadInPlace
	pages   memory.Pages
	size    int64   // size of a slot
	all     []*Slot // all allocated slots
	slots   []*Slot // slots that are in use
	free    *freeSlots
	end     completer
	closed  bool // guarded by end.mu

	order sync.Mutex // held while a piece is submitted, so that pieces that use scratch memory do not interleave
	next  uint32     // compute stream; guarded by order
}

// A FilledSlot is a filled slot and the other arguments of Submit.
type FilledSlot struct {
	Slot  *Slot
	N     int64
	Tasks []device.DecodeTask
	Done  func(task int, err error)
}

// fits reports whether the queue can be divided into these slots without being much too large. A queue of RemoteRing's
// size or less is never too large, so that loads with different rings can use it in turn.
func (q *Queue) fits(slots int, slotBytes int64) bool {
	need := roundUpToRing(int64(slots) * slotStride(slotBytes))
	most := max(2*need, int64(ring.divided)*slotStride(ring.bytes))
	return slots <= len(q.all) && need <= q.pages.N && q.pages.N <= most+memory.HugePage
}

// divideIntoSlots divides the queue's memory into slots of `room` bytes, including tables. No slot may be in use.
func (q *Queue) divideIntoSlots(slots int, room int64) {
	q.free.takeSlots(len(q.slots))
	q.size, q.slots, q.c.nslots = room-headBytes, q.all[:slots], C.int(slots)
	base := q.c.arena.device
	if q.inPlace {
		base = q.c.arena.mapped
	}
	for i, s := range q.slots {
		s.mem.at = int64(i)*room + headBytes
		s.mem.host = unsafe.Add(q.pages.P, s.mem.at)
		s.mem.own = unsafe.Slice((*byte)(s.mem.host), q.size)
		s.mem.dev = uint64(base) + uint64(s.mem.at)
		s.c.status = q.c.arena.mapped + C.owcu_ptr(s.mem.at-headBytes)
		q.free.putSlot(s)
	}
}

// ReadInPlace makes kernels read slots in place until Close, as on a coherent device. It is for tests, because it is
// slow on other devices. No slot may be in use.
func (q *Queue) ReadInPlace() {
	q.inPlace = true
	q.divideIntoSlots(len(q.slots), q.size+headBytes)
}

// Get waits for a free slot, or until ctx ends.
func (q *Queue) Get(ctx context.Context) (device.Slot, error) { return q.GetFor(ctx, anyone) }

// GetFor is like Get for one of several readers with separate slots. It prefers a slot that this reader has filled
// before.
func (q *Queue) GetFor(ctx context.Context, reader int) (device.Slot, error) {
	s, err := q.free.takeSlotFor(ctx, reader)
	if err != nil {
		return nil, err
	}
	s.ownFresh()
	return s, nil
}

// TryGet returns a free slot, or nil if none is free.
func (q *Queue) TryGet() *Slot { return q.TryGetFor(anyone) }

// TryGetFor is like GetFor but does not wait. It returns nil if no slot is free.
func (q *Queue) TryGetFor(reader int) *Slot {
	s := q.free.tryTakeSlotFor(reader)
	if s != nil {
		s.ownFresh()
	}
	return s
}

// StagingMemory returns the device memory that contains the slots' mirrors. For a coherent device, the first call
// allocates it. No slot may be in use.
func (q *Queue) StagingMemory() (base unsafe.Pointer, n int64, err error) {
	q.order.Lock()
	defer q.order.Unlock()
	if err := q.allocateOnce(&q.c.arena.device, q.pages.N, "the staging memory of a load"); err != nil {
		return nil, 0, err
	}
	return device.Pointer(uintptr(q.c.arena.device)), q.pages.N, nil
}

// allocateOnce allocates the queue's scratch or staging memory if it does not exist. The caller holds q.order.
func (q *Queue) allocateOnce(which *C.owcu_ptr, n int64, what string) error {
	var e C.struct_owcu_error
	if *which == 0 && C.owcu_queue_alloc(q.c, which, C.uint64_t(n), &e) != 0 {
		return q.pool.ctx.AddSizes(q.end.recordError(&e), n, what)
	}
	return nil
}

// Put returns a slot that was not submitted. It panics if a slot is returned twice.
func (q *Queue) Put(s device.Slot) {
	own := s.(*Slot)
	if !own.owned {
		panic("cuda: slot returned twice")
	}
	own.owned = false
	q.free.putSlot(own)
}

// Submit copies the first n bytes of a slot to the device, unless kernels read them in place, and decodes each task's
// chunk to its Dst in device memory. It takes the slot back even if it returns an error. After CheckOnSubmit, it also
// compares checksums, while the chunks are decoded, which is safe for any bytes. Otherwise the caller must have
// compared them. All other properties of the chunks are always checked.
//
// done is called once per task when its bytes have been written or its error is known. It is called by another
// goroutine or, for a polled queue, by the caller of FinishEnded or Close. It must not wait for this queue. If Submit
// returns an error, done is not called, and nothing is written after Submit returns.
func (q *Queue) Submit(slot device.Slot, n int64, tasks []device.DecodeTask, done func(task int, err error)) error {
	s, isBegun := slot.(*Slot), false
	defer func() {
		if !isBegun && s.owned { // a panic came first: return the slot, because Close waits for every slot
			q.Put(s)
		}
	}()
	s.beginPiece(n, tasks, done)
	isBegun = true
	return q.submitJoined(s)
}

// submitJoined queues the work of a slot that was begun, and of the slots joined to it.
func (q *Queue) submitJoined(s *Slot) error {
	q.order.Lock()
	defer q.order.Unlock()
	b, isQueued := &s.build, false
	defer func() {
		if !isQueued { // true even after a panic; Close waits for every slot
			q.free.putSlotAndJoined(s)
		}
	}()
	err := q.end.deviceError()
	for err == nil && !b.hasAllTasks() {
		err = q.queueRound(s, b)
	}
	if err != nil {
		return err
	}
	isQueued = true
	q.end.add(s)
	return nil
}

// queueRound queues as many of a piece's tasks as fit in the tables. It waits for every round except the last, because
// the next round overwrites the tables. Few pieces need several rounds. The caller holds q.order.
func (q *Queue) queueRound(s *Slot, b *pieceBuilder) error {
	if b.pieceNeedsScratch {
		if err := q.allocateOnce(&q.c.scratch, scratchBytes, "scratch"); err != nil {
			return err
		}
	}
	b.fillRound(uint64(q.c.scratch))
	for _, m := range s.joined {
		m.build.fillRound(0)
		b.copies = append(b.copies, m.build.copies...)
	}
	c := s.c
	c.wait = 0
	if !b.hasAllTasks() {
		c.wait = 1
	}
	c.stream = 0
	switch {
	case s.modes.sumOnly: // not on other streams: their kernels may wait for copies, and the result is urgent
		c.stream = C.OWCU_STREAMS - 1
	case !b.scratch: // chunks in scratch memory use the first compute stream, one after another
		c.stream = C.uint32_t(q.next % (C.OWCU_STREAMS - 1))
		q.next++
	}
	b.writeRound()
	for i := range b.copies {
		if s.isReadInPlace() {
			s.copied += int64(b.copies[i].n)
		}
	}
	var e C.struct_owcu_error
	if C.owcu_submit_slot(q.c, C.int(s.index), &e) != 0 {
		return q.end.recordError(&e)
	}
	if c.wait != 0 {
		b.t.collectErrors(s)
	}
	return nil
}

// Drain waits until all submitted work has ended and its done calls have returned, or until ctx ends. In the latter
// case work continues, and Close waits for it. Drain returns the error that broke the queue, if any.
func (q *Queue) Drain(ctx context.Context) error { return q.end.drain(ctx) }

// UsePolling makes the queue a polled queue until Close. A polled queue has no goroutine that finishes slots. Its user
// calls FinishEnded repeatedly, because a thread that sleeps until the device wakes it, and then wakes other threads,
// is hundreds of microseconds late. Get and Drain may wait for these calls, so another goroutine must make them. No
// slot may be in use.
func (q *Queue) UsePolling() { q.end.polled = true }

// FinishEnded finishes slots that the device has completed, on each stream in the order of submission: it calls done
// for their tasks and frees the slots. It reports whether there were any. It does not wait for the device.
func (q *Queue) FinishEnded() (worked bool) { return q.end.finishEnded() }

// CountFlying returns the number of submitted slots of a polled queue that are not finished or being finished.
func (q *Queue) CountFlying() int { return q.end.countFlying() }

// CountFree returns the number of free slots.
func (q *Queue) CountFree() int { return len(q.free.tokens) }

// Close waits until work in flight has ended and every slot has been returned. It then returns the queue to its pool.
// It must be called only once.
func (q *Queue) Close() {
	if q.end.polled {
		q.end.finishAll()
		q.end.polled = false
	}
	q.free.takeSlots(len(q.slots))
	for _, s := range q.slots {
		q.free.putSlot(s)
	}
	_ = q.Drain(context.Background()) // waits for the completer's last steps
	q.end.mu.Lock()
	healthy := q.end.broken == nil && !q.closed
	q.closed = true
	q.end.mu.Unlock()
	if healthy && q.pool.keep(q) {
		return
	}
	q.end.stop()
	q.pool.mem.DeferFree(q.tryFree)
}

// tryFree frees a queue after its completer has ended. See memory.Free.
func (q *Queue) tryFree() (gone bool, err error) {
	var e C.struct_owcu_error
	rc := C.owcu_queue_free(q.c, &e)
	if rc <= 0 {
		q.pages.Free() // not earlier, because they were registered
	}
	if rc != 0 {
		err = q.pool.ctx.ErrorOf(unsafe.Pointer(&e))
	}
	return rc <= 0, err
}

// SubmitAll calls Submit for each piece, in order. Consecutive pieces are submitted as one if they wait for the same
// event, are loose, have no checksums, and have the same layout in the slot as at their destinations. They are copied
// separately but end together. Unlike Submit, SubmitAll returns no error. It calls done with the error for each task of
// the pieces that were not submitted.
func (q *Queue) SubmitAll(pieces []FilledSlot) {
	count := 0
	defer func() { // return the slots even after a panic, because Close waits for every slot
		for i := range pieces {
			if s := pieces[i].Slot; i < count || s.owned {
				s.owned = false
				q.free.putSlotAndJoined(s)
			}
		}
	}()
	for i := range pieces {
		p := &pieces[i]
		p.Slot.beginPiece(p.N, p.Tasks, p.Done)
		count++
	}
	for len(pieces) > 0 {
		s, n := pieces[0].Slot, 1
		for n < len(pieces) && s.tryJoinSlot(pieces[n].Slot) {
			n++
		}
		together := pieces[:n]
		pieces = pieces[n:]
		if err := q.submitJoined(s); err != nil {
			for _, p := range together {
				for i := range p.Tasks {
					p.Done(i, err)
				}
			}
		}
	}
}

// FollowStream makes all work submitted from now on wait for the work that is now queued on a stream of the same
// device, because that work may still use memory from torch's allocator. Stream numbers are those of DLPack: 1 is the
// legacy default stream, 2 the per-thread default stream, and any other number is a handle.
func (q *Queue) FollowStream(stream uintptr) error {
	q.order.Lock()
	defer q.order.Unlock()
	if err := q.end.deviceError(); err != nil {
		return err
	}
	var e C.struct_owcu_error
	if C.owcu_queue_follow(q.c, C.uint64_t(stream), &e) != 0 {
		return q.end.recordError(&e)
	}
	return nil
}

// MeasureLink measures the link with count copies of n bytes from the queue's slots to their mirrors. No slot may be in
// use.
func (q *Queue) MeasureLink(n int64, count int) (time.Duration, error) {
	if n <= 0 || n > q.size || count <= 0 {
		return 0, errs.New(errs.ErrArgument, "cannot copy %d bytes %d times: expected 1 to %d bytes, once or more", n,
			count, q.size)
	}
	if _, _, err := q.StagingMemory(); err != nil {
		return 0, err
	}
	ctx := C.owcu_handle(q.pool.ctx.Handle())
	on := C.uint64_t(uintptr(unsafe.Pointer(*q.c.arena.streams)))
	start := time.Now()
	for i := range count {
		s := q.slots[i%len(q.slots)]
		dst, src := q.c.arena.device+C.owcu_ptr(s.mem.at), C.owcu_ptr(uintptr(s.mem.host))
		if err := call(q.pool.ctx, func(e *C.struct_owcu_error) C.int {
			return C.owcu_copy(ctx, on, dst, src, C.uint64_t(n), cBool(i+1 == count), e)
		}); err != nil {
			var ignored C.struct_owcu_error
			C.owcu_stream_sync(ctx, on, &ignored)
			return 0, err
		}
	}
	return time.Since(start), nil
}

// PinnedBytes returns how many bytes of host memory are registered for the queue. Staging memory on the device, if any,
// has the same size.
func (q *Queue) PinnedBytes() int64 { return q.pages.N }

// Asynchronous returns true: Submit returns before its tasks are done.
func (q *Queue) Asynchronous() bool { return true }

// CanCheck reports whether Submit compares checksums. It does if the bytes are copied to the device. On a
// coherent device, kernels would have to read the slots twice.
func (q *Queue) CanCheck() bool { return !q.inPlace }

// TraceTimes calls trace for every finished piece with the times of its copy and of its kernels. nil stops that. No
// piece may be in flight. For a piece with several rounds, it reports the last round.
func (q *Queue) TraceTimes(trace device.TraceFunc) error {
	if err := q.end.deviceError(); err != nil {
		return err
	}
	var e C.struct_owcu_error
	var err error
	if C.owcu_time_slots(q.c, cBool(trace != nil), &e) != 0 {
		err, trace = q.end.recordError(&e), nil
	}
	q.end.setTrace(trace)
	return err
}

// CastAndWait converts the elements of src between the dtypes from and to, writes them to dst on the device, and waits.
// It converts floats of 16 and 32 bits to each other, and floats of 8 bits to those. src must be at a multiple of 16.
// src and dst must not overlap.
func (q *Queue) CastAndWait(ctx context.Context, dst, src device.Memory, from, to tensor.DType) error {
	c := device.Cast{From: from, To: to}
	if !CanCast(c) {
		return errs.New(errs.ErrNotSupported, "cannot cast %v to %v on a GPU", from, to)
	}
	in, out := int64(from.Bits()/8), int64(to.Bits()/8)
	n := src.Bytes / in
	if n*in != src.Bytes || n*out != dst.Bytes {
		return errs.New(errs.ErrArgument, "invalid cast of %d bytes of %v to %d bytes of %v",
			src.Bytes, from, dst.Bytes, to)
	}
	const step = 64 << 20 // the parts of this many elements fit in the tables
	for at := int64(0); at < n; at += step {
		s, err := q.Get(ctx)
		if err != nil {
			return err
		}
		bytes := min(step, n-at) * in
		s.(*Slot).ViewDevice(uintptr(src.Ptr)+uintptr(at*in), bytes)
		task := device.DecodeTask{Chunk: tensor.Chunk{Codec: tensor.CodecRaw, Stored: uint32(bytes),
			Logical: uint32(bytes)},
			Dst: unsafe.Add(dst.Ptr, at*out), Cast: c}
		results := make(chan error, 1)
		if err := q.Submit(s, bytes, []device.DecodeTask{task}, func(_ int, err error) { results <- err }); err != nil {
			return err
		}
		if err := <-results; err != nil {
			return err
		}
	}
	return nil
}
