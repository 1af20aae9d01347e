package cuda

/*
#include "queue.h"
#include "../../../cuda/abi.h"
*/
import "C"

import (
	"context"
	"errors"
	"math"
	"sync"
	"time"
	"unsafe"

	"github.com/overwire/overwire/cuda/built"
	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/spawn"
)

// A slot in pinned memory has status words, tables and bytes; its mirror, in
// the staging on the device, has the same layout. Tables are written right before
// the bytes, so that one copy usually takes both.
//
// A coherent device reads the host's memory as fast as a copy would bring it: its
// kernels read slots in place, and its queues have no staging. The slots stay pinned.
// Pinning them costs milliseconds a process, and without it the system may move pages
// that are in use again and again to the device and back, or from node to node. Files
// are not mapped for the kernels to read: one that is truncated meanwhile would end the
// context, and one that is written would change after its checksum was compared.
const (
	statusBytes = 16 << 10
	maxWords    = statusBytes / 4 // of one round: chunks, and parts of those whose checksums are compared
	tableBytes  = headBytes - statusBytes
	// Chunks that do not land contiguously or aligned are decoded into scratch
	// first; any chunk fits.
	scratchBytes = 16 << 20
)

// A Queue is what one load needs of a device; see device.Queue.
type Queue struct {
	dev       *Device
	c         *C.struct_owcu_queue
	inPlace   bool // the kernels read slots where they are; see ReadInPlace
	pages     hugePages
	size      int64   // of a slot
	all       []*Slot // all that were made
	slots     []*Slot // those in use
	free      *freeSlots
	submitted chan *Slot    // in order, to the completer
	ended     chan struct{} // closed when the completer has ended

	order sync.Mutex // of submissions, held during the driver's calls: pieces that use scratch must not interleave
	next  uint32     // compute stream; guarded by order

	polled    bool       // see UsePolling; set while no work is in flight
	finishing sync.Mutex // held while slots of a polled queue are finished: one after the other
	asked     []*Slot    // of FinishEnded; guarded by finishing

	mu       sync.Mutex // guards the rest, for moments: the completer must not wait for the driver's calls of others
	inflight int
	drained  chan struct{} // closed and renewed when inflight falls to 0
	broken   error         // the first device error; later submits fail with it
	closed   bool
	flying   []*Slot          // where it is polled: submitted, in order
	trace    device.TraceFunc // nil: not timed
	origin   time.Time
}

// A Slot is the staging memory of one piece. Bytes is pinned memory; the caller
// that got the slot owns it until Submit or Put.
type Slot struct {
	Bytes []byte

	q        *Queue
	c        *C.struct_owcu_slot
	index    int
	at       int64          // of Bytes, in the queue's memory
	host     unsafe.Pointer // of Bytes
	view     []byte         // registered memory used in place of Bytes; nil: none
	onDev    uint64         // device memory used in place of Bytes; 0: none
	devLen   int64
	dev      uint64 // of Bytes, where the kernels read them: in the staging, or in place
	owned    bool
	reader   int     // who filled it last, alone; or anyone
	loose    bool    // see AllowGapWrites
	checks   bool    // see CheckOnSubmit
	sumOnly  bool    // see SumOnly
	count    int     // tasks of the piece
	joined   []*Slot // whose work this one's includes; see SubmitAll
	copied   int64   // bytes, for the trace
	done     func(task int, err error)
	failures map[int]error // by task
	build    pieceBuilder
}

// idleIndexFor says in which of the device's two idle queues slots of n bytes fit.
func idleIndexFor(n int64) int {
	if n <= TablesOnly {
		return 1
	}
	return 0
}

// Queue returns a queue with that number of slots of that many bytes; numbers below
// 1 mean the defaults. The device keeps one closed queue for the next caller that
// needs as much memory, however it is divided, so that a second load pins and
// allocates nothing (and one of TablesOnly).
func (d *Device) Queue(slots int, slotBytes int64) (*Queue, error) {
	d.making.Lock() // PrepareQueue may be making this one
	defer d.making.Unlock()
	return d.takeOrMakeQueue(slots, slotBytes)
}

func (d *Device) takeOrMakeQueue(slots int, slotBytes int64) (*Queue, error) {
	if slots <= 0 {
		slots = ring.slots
	}
	if slotBytes <= 0 {
		slotBytes = ring.bytes
	}
	if slots > 1024 || slotBytes > 1<<31 {
		return nil, errs.New(errs.ErrArgument, "a ring of %d slots of %d bytes", slots, slotBytes)
	}
	d.mu.Lock()
	idle := &d.idle[idleIndexFor(slotBytes)]
	queue := *idle
	*idle = nil
	d.mu.Unlock()
	if queue != nil {
		if need := roundUpToRing(int64(slots) * slotStride(slotBytes)); slots <= len(queue.all) &&
			need <= queue.pages.n && queue.pages.n <= 2*need+huge {
			queue.closed, queue.inPlace = false, d.coherent
			queue.divideIntoSlots(slots, slotStride(slotBytes))
			return queue, nil
		}
		queue.endCompleter()
		d.deferFree(queue.tryFreeQueue)
	}
	kernels, err := d.loadKernels(&d.kernels, d.module, built.X16, kernelNames)
	if err != nil {
		return nil, err
	}
	most, n := slots, roundUpToRing(int64(slots)*slotStride(slotBytes))
	if idleIndexFor(slotBytes) == 0 { // the next source may need another division
		fine, _ := ExchangeRing(math.MaxInt / 3)
		most = max(most, fine)
	}
	memory := d.takeSparePages()
	if memory.shrinkTo(n); memory.n < n {
		memory.free()
		if memory, err = newHugePages(n, d.near); err != nil {
			return nil, err
		}
	}
	queue, err = d.newQueue(&memory, most, kernels)
	if errors.Is(err, errs.ErrMemory) {
		// Dropped tensors, or another queue, may occupy the memory for the staging.
		d.freeDeferred()
		if e := d.reapAndFreeKept(); e == nil && memory.raw != nil {
			queue, err = d.newQueue(&memory, most, kernels)
		}
	}
	if err != nil {
		memory.free()
		return nil, d.addSizesToError(err, n, "the staging of a load")
	}
	queue.divideIntoSlots(slots, slotStride(slotBytes))
	return queue, nil
}

// newQueue makes a queue on some pages, with space for `most` slots but none yet.
// After an error the caller still owns the pages, unless they are zero.
func (d *Device) newQueue(pages *hugePages, most int, kernels []C.owcu_handle) (*Queue, error) {
	var e C.struct_owcu_error
	var remainder *C.struct_owcu_queue
	c := C.owcu_queue_new(d.ctx, pages.p, C.uint64_t(pages.n), C.int(most), cBool(!d.coherent), &kernels[0],
		&remainder, &e)
	if c == nil {
		if remainder != nil {
			d.deferFree((&Queue{dev: d, c: remainder, pages: *pages}).tryFreeQueue)
			*pages = hugePages{}
		}
		return nil, errorOf(d.index, &e)
	}
	queue := &Queue{
		dev: d, c: c, inPlace: d.coherent, pages: *pages, free: newFreeSlots(most), submitted: make(chan *Slot, most),
		ended: make(chan struct{}), drained: make(chan struct{}),
	}
	for i, s := range unsafe.Slice(c.slots, most) {
		queue.all = append(queue.all, &Slot{q: queue, c: s, index: i, reader: anyone, failures: map[int]error{}})
	}
	spawn.Go("cuda completer", queue.runCompleter)
	return queue, nil
}

// divideIntoSlots divides the queue's memory into slots of `room` bytes each, tables
// included. No slot may be in use.
func (q *Queue) divideIntoSlots(slots int, room int64) {
	q.free.takeSlots(len(q.slots))
	q.size, q.slots, q.c.nslots = room-headBytes, q.all[:slots], C.int(slots)
	base := q.c.slab.device
	if q.inPlace {
		base = q.c.slab.mapped
	}
	for i, s := range q.slots {
		s.at = int64(i)*room + headBytes
		s.host = unsafe.Add(q.pages.p, s.at)
		s.Bytes = unsafe.Slice((*byte)(s.host), q.size)
		s.dev = uint64(base) + uint64(s.at)
		s.c.status = q.c.slab.mapped + C.owcu_ptr(s.at-headBytes)
		q.free.putSlot(s)
	}
}

// ReadInPlace makes the kernels read slots where they are, until Close, as those of a
// coherent device do anyway: for tests, since over another link it is slow. No slot may
// be in use.
func (q *Queue) ReadInPlace() {
	q.inPlace = true
	q.divideIntoSlots(len(q.slots), q.size+headBytes)
}

// Get waits for a free slot, or for the end of ctx.
func (q *Queue) Get(ctx context.Context) (device.Slot, error) { return q.GetFor(ctx, anyone) }

// GetFor is Get for one of several readers that each fill slots alone: if it can, it gives
// one that this reader has filled.
func (q *Queue) GetFor(ctx context.Context, reader int) (device.Slot, error) {
	s, err := q.free.takeSlotFor(ctx, reader)
	if err != nil {
		return nil, err
	}
	s.ownFresh()
	return s, nil
}

// ownFresh makes the slot its caller's, as if it were new.
func (s *Slot) ownFresh() {
	s.owned, s.loose, s.checks, s.sumOnly, s.view, s.onDev = true, false, false, false, nil, 0
	s.c.after, s.c.nbehind = nil, 0
}

// View replaces the slot's bytes by b until the slot is back: memory that was
// registered (Device.Register), from which the device then copies.
func (s *Slot) View(b []byte) {
	if !s.owned || len(b) > len(s.Bytes) {
		panic("cuda: a slot that is not the caller's, or more memory than it has")
	}
	s.view = b
}

// ViewMirror is the slot's memory in the staging on the device, if there is one. A
// caller that asks for it puts the piece's bytes there before Submit, which then copies
// only its tables; as with ViewDevice.
func (s *Slot) ViewMirror() unsafe.Pointer {
	if s.q.c.slab.device == 0 {
		return nil
	}
	at := s.q.c.slab.device + C.owcu_ptr(s.at)
	s.ViewDevice(uintptr(at), int64(len(s.Bytes)))
	return devicePointer(at)
}

// StagingMemory is the device memory that contains the slots' mirrors. A queue of a coherent
// device has none before the first call. No slot may be in use.
func (q *Queue) StagingMemory() (base unsafe.Pointer, n int64, err error) {
	q.order.Lock()
	defer q.order.Unlock()
	if err := q.allocateOnce(&q.c.slab.device, q.pages.n, "the staging of a load"); err != nil {
		return nil, 0, err
	}
	return devicePointer(q.c.slab.device), q.pages.n, nil
}

// allocateOnce allocates the queue's scratch or staging, unless it is there. q.order is held.
func (q *Queue) allocateOnce(which *C.owcu_ptr, n int64, what string) error {
	var e C.struct_owcu_error
	if *which == 0 && C.owcu_queue_alloc(q.c, which, C.uint64_t(n), &e) != 0 {
		return q.dev.addSizesToError(q.recordError(&e), n, what)
	}
	return nil
}

// ViewDevice replaces the slot's bytes, until the slot is back, by n bytes at p in
// memory of the slot's own device: they are not copied. p is a multiple of 16. The
// caller has waited for the work that wrote them (FollowStream) and compared their
// checksums. The host does not see them: before the kernels, which are safe for any
// bytes, only the chunks' records are checked.
func (s *Slot) ViewDevice(p uintptr, n int64) {
	if !s.owned || p == 0 || p%16 != 0 {
		panic("cuda: a slot that is not the caller's, or memory that is not aligned")
	}
	s.onDev, s.devLen = uint64(p), n
}

// isReadInPlace is whether the kernels read the slot's piece without a copy to the staging.
func (s *Slot) isReadInPlace() bool { return s.onDev != 0 || s.q.inPlace }

// capacityBytes is how many bytes the slot has now.
func (s *Slot) capacityBytes() int64 {
	if s.onDev != 0 {
		return s.devLen
	}
	return int64(len(s.Memory()))
}

// Memory is the piece's bytes in host memory.
func (s *Slot) Memory() []byte {
	if s.view != nil {
		return s.view
	}
	return s.Bytes
}

// Put returns a slot that was not submitted. Returning one twice is a bug, and
// panics.
func (q *Queue) Put(s device.Slot) {
	own := s.(*Slot)
	if !own.owned {
		panic("cuda: slot given back twice")
	}
	own.owned = false
	q.free.putSlot(own)
}

// Submit copies the first n bytes of a slot to the device, unless its kernels read them
// in place, and decodes each task's chunk to its Dst, in device memory. It takes the slot
// back, whatever it returns. Checksums are compared here after CheckOnSubmit, beside the decoding,
// which is safe for any bytes; else the caller has compared them. Everything else about
// the chunks is checked here in any case.
//
// done is called once for each task when its bytes are in place or its error is known: by another
// goroutine or, of a polled queue, by the caller of FinishEnded or Close. It must not wait for this
// queue. If Submit returns an error, done is not called, and nothing writes any more.
func (q *Queue) Submit(slot device.Slot, n int64, tasks []device.DecodeTask, done func(task int, err error)) error {
	s, isBegun := slot.(*Slot), false
	defer func() {
		if !isBegun && s.owned { // a panic: Close waits for every slot
			q.Put(s)
		}
	}()
	s.beginPiece(n, tasks, done)
	isBegun = true
	return q.submitJoined(s)
}

// beginPiece takes the slot, and what is to be done with its first n bytes. After a panic its caller still owns it.
func (s *Slot) beginPiece(n int64, tasks []device.DecodeTask, done func(task int, err error)) {
	if !s.owned || n < 0 || n > s.capacityBytes() {
		panic("cuda: a slot that is not the caller's, or a piece larger than it")
	}
	s.count, s.done = len(tasks), done
	clear(s.failures)
	s.copied = n
	if s.isReadInPlace() {
		s.copied = 0 // but for what round copies
	}
	s.build.checkPiece(s, n, tasks)
	s.owned = false
}

// submitJoined queues the work of a slot that has begun, and of those with it.
func (q *Queue) submitJoined(s *Slot) error {
	q.order.Lock()
	defer q.order.Unlock()
	b, isQueued := &s.build, false
	defer func() {
		if !isQueued { // also after a panic: Close waits for every slot
			q.freeSlotAndJoined(s)
		}
	}()
	err := q.deviceError()
	for err == nil && !b.hasAllTasks() {
		err = q.queueRound(s, b)
	}
	if err != nil {
		return err
	}
	isQueued = true
	q.mu.Lock()
	defer q.mu.Unlock()
	q.inflight++
	if q.polled {
		q.flying = append(q.flying, s)
		return nil
	}
	q.submitted <- s // has space for all
	return nil
}

// queueRound queues as many of a piece's tasks as the tables hold. It waits for every
// round but the last, since the next one overwrites the tables; pieces that need
// several are rare. q.order is held.
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
	case s.sumOnly: // others wait for it, and the kernels on the other streams may wait for copies
		c.stream = C.OWCU_STREAMS - 1
	case !b.scratch: // chunks in scratch wait for each other on the first stream
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
		return q.recordError(&e)
	}
	if c.wait != 0 {
		b.collectErrors()
	}
	return nil
}

// deviceError is the error that broke the queue, if there is one.
func (q *Queue) deviceError() error {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.broken
}

// recordError records a device error. Out of memory is not one, nor is a stream that is
// being captured: the next call may succeed.
func (q *Queue) recordError(e *C.struct_owcu_error) error {
	err := errorOf(q.dev.index, e)
	q.mu.Lock()
	defer q.mu.Unlock()
	if e.code != C.OWCU_OUT_OF_MEMORY && e.code != C.OWCU_CAPTURED && q.broken == nil {
		q.broken = err
	}
	return err
}

// runCompleter calls done for what has landed, piece by piece in the order of
// submission.
func (q *Queue) runCompleter() {
	defer close(q.ended)
	for s := range q.submitted {
		_ = spawn.Guard("cuda completer", func() error { q.finishSlot(s); return nil })
	}
}

// finishSlot waits for a slot's work, says that it has landed, and takes the slot back, also
// after a panic: Drain and Close wait for it.
func (q *Queue) finishSlot(s *Slot) {
	var e C.struct_owcu_error
	var err error
	if C.owcu_wait_slot(q.c, C.int(s.index), &e) != 0 {
		err = q.recordError(&e)
	}
	defer func() {
		q.freeSlotAndJoined(s)
		q.mu.Lock()
		defer q.mu.Unlock()
		if q.inflight--; q.inflight == 0 {
			close(q.drained)
			q.drained = make(chan struct{})
		}
	}()
	if err == nil {
		s.build.collectErrors()
		q.reportTimes(s)
	}
	s.callDone(err)
	for _, m := range s.joined {
		m.callDone(err)
	}
}

// callDone calls done for each task of a slot, also after a panic of one.
func (s *Slot) callDone(err error) {
	for i := range s.count {
		each := s.failures[i]
		if err != nil {
			each = err
		}
		_ = spawn.Guard("cuda completer", func() error { s.done(i, each); return nil })
	}
}

// Drain waits until everything submitted has landed and its done calls have
// returned, or for the end of ctx: then work continues, and Close waits for it. It
// returns the error that broke the queue, if there is one.
func (q *Queue) Drain(ctx context.Context) error {
	for {
		q.mu.Lock()
		n, signal, err := q.inflight, q.drained, q.broken
		q.mu.Unlock()
		if n == 0 {
			return err
		}
		select {
		case <-signal:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// Close waits for work in flight and until every slot is back, and returns the
// queue to its device. It may be called once.
func (q *Queue) Close() {
	if q.polled {
		q.finishAll()
		q.polled = false
	}
	q.free.takeSlots(len(q.slots))
	for _, s := range q.slots {
		q.free.putSlot(s)
	}
	_ = q.Drain(context.Background()) // the completer's last steps
	q.mu.Lock()
	healthy := q.broken == nil && !q.closed
	q.closed = true
	q.mu.Unlock()
	d := q.dev
	d.mu.Lock()
	if idle := &d.idle[idleIndexFor(q.size)]; healthy && *idle == nil {
		*idle = q
		d.mu.Unlock()
		return
	}
	d.mu.Unlock()
	q.endCompleter()
	d.deferFree(q.tryFreeQueue)
}

// destroy frees the queue; no work may be in flight.
func (q *Queue) destroy() error {
	q.endCompleter()
	var e C.struct_owcu_error
	return q.dev.handleFreeResult(q.tryFreeMemory(&e), &e, q.tryFreeQueue)
}

// endCompleter ends the completer; no work may be in flight.
func (q *Queue) endCompleter() {
	close(q.submitted)
	<-q.ended
}

// tryFreeQueue frees a queue without a completer, and reports whether it is gone.
func (q *Queue) tryFreeQueue() bool {
	var e C.struct_owcu_error
	return q.tryFreeMemory(&e) <= 0
}

func (q *Queue) tryFreeMemory(e *C.struct_owcu_error) C.int {
	rc := C.owcu_queue_free(q.c, e)
	if rc <= 0 {
		q.pages.free() // only now: they were registered
	}
	return rc
}
