//go:build cgo

package cuda

/*
#include "lane.h"
#include "../../../cuda/abi.h"
*/
import "C"

import (
	"context"
	"errors"
	"sync"
	"time"
	"unsafe"

	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/fault"
	"github.com/overwire/overwire/gosrc/internal/spawn"
)

// A slot in pinned memory is its status words, its tables and its bytes; its
// deviceMirror, in the staging on the device, has the same layout. Tables are written
// right before the bytes, so that both mostly go in one copy.
const (
	statusBytes = 16 << 10
	maxChunks   = statusBytes / 4 // of one round
	tableBytes  = headBytes - statusBytes
	// Chunks that do not land contiguously or aligned are decoded into scratch
	// first; any chunk fits.
	scratchBytes = 16 << 20
)

// A Queue is what one load needs of a device; see device.Queue.
type Queue struct {
	dev       *Device
	c         *C.struct_owcu_lane
	pages     pages
	size      int64   // of a slot
	all       []*Slot // that there are
	slots     []*Slot // of them, those in use
	free      chan *Slot
	submitted chan *Slot    // in order, for the completer
	ended     chan struct{} // the completer has

	mu       sync.Mutex // also orders submits: pieces that use scratch must not mix
	inflight int
	moved    chan struct{} // closed and renewed when inflight falls to 0
	broken   error         // the first device error: nothing can be submitted any more
	closed   bool
	next     uint32      // compute stream
	span     device.Span // nil: not timed
	origin   time.Time
}

// A Slot is one piece's place. Bytes is pinned memory; the caller that got the slot
// owns it until Submit or Put.
type Slot struct {
	Bytes []byte

	c      *C.struct_owcu_slot
	index  int
	host   unsafe.Pointer // of Bytes
	view   []byte         // registered memory that stands for Bytes; nil: none
	onDev  uint64         // memory of the device that stands for Bytes; 0: none
	devLen int64
	dev    uint64 // its deviceMirror, in the staging
	owned  bool
	count  int      // jobs of the piece
	rounds int      // of the last piece
	taken  [2]int64 // bytes copied and decoded, while the queue is timed
	done   func(task int, err error)
	errs   map[int]error // by task
	build  build
}

// TablesOnly is the slotBytes of a queue whose slots only view memory of the
// device: it takes next to no pinned memory, and is kept beside the other.
const TablesOnly = 4096

// rank is which of the idle queues one with slots of n bytes may become.
func rank(n int64) int {
	if n <= TablesOnly {
		return 1
	}
	return 0
}

// Queue gives a queue with that number of slots of that many bytes; not positive numbers
// mean the defaults. The device keeps one closed queue for the next who asks for
// as much memory, however it is cut, so a second load pins and allocates nothing
// (and one of TablesOnly).
func (d *Device) Queue(slots int, slotBytes int64) (*Queue, error) {
	d.making.Lock() // Prepare may be making just that one
	defer d.making.Unlock()
	return d.makeQueue(slots, slotBytes)
}

// Prepare makes a default queue for the load that is about to begin, unless one
// is kept already. What goes wrong here goes wrong there, too.
func (d *Device) Prepare() {
	d.making.Lock()
	defer d.making.Unlock()
	d.mu.Lock()
	kept := d.idle[0] != nil
	d.mu.Unlock()
	if kept {
		return
	}
	if l, err := d.makeQueue(0, 0); err == nil {
		l.Close()
	}
}

func (d *Device) makeQueue(slots int, slotBytes int64) (*Queue, error) {
	if slots <= 0 {
		slots = ring.slots
	}
	if slotBytes <= 0 {
		slotBytes = ring.bytes
	}
	if slots > 1024 || slotBytes > 1<<31 {
		return nil, fault.New(fault.ErrArgument, "a ring of %d slots of %d bytes", slots, slotBytes)
	}
	d.mu.Lock()
	kept := &d.idle[rank(slotBytes)]
	l := *kept
	*kept = nil
	d.mu.Unlock()
	if l != nil {
		if need := int64(slots) * stride(slotBytes); slots <= len(l.all) && need <= l.pages.n && l.pages.n <= 2*need+huge {
			l.closed = false
			l.shape(slots, stride(slotBytes))
			return l, nil
		}
		l.end()
		d.later(l.release)
	}
	fns, err := d.functions()
	if err != nil {
		return nil, err
	}
	most, n := slots, int64(slots)*stride(slotBytes)
	if rank(slotBytes) == 0 { // it may be cut for another source the next time
		remote, _ := RemoteRing()
		most = max(most, remote)
	}
	p := d.takeSpare()
	if p.n < n || p.n > n+huge {
		p.free()
		if p, err = newPages(n); err != nil {
			return nil, err
		}
	}
	l, err = d.newQueue(&p, most, fns)
	if errors.Is(err, fault.ErrMemory) {
		// Dropped tensors, or another queue, may lie where the
		// staging could.
		d.inter()
		if e := d.giveBack(); e == nil && p.raw != nil {
			l, err = d.newQueue(&p, most, fns)
		}
	}
	if err != nil {
		p.free()
		return nil, d.sized(err, n, "the staging of a load")
	}
	l.shape(slots, stride(slotBytes))
	return l, nil
}

// newQueue makes a queue of some pages, with no slots yet but room for most. After
// an error the pages are the caller's still, unless they are zero.
func (d *Device) newQueue(p *pages, most int, fns *[kernels]C.owcu_handle) (*Queue, error) {
	var e C.struct_owcu_error
	var left *C.struct_owcu_lane
	c := C.owcu_lane_new(d.ctx, p.p, C.uint64_t(p.n), C.int(most), &fns[0], &left, &e)
	if c == nil {
		if left != nil {
			d.later((&Queue{dev: d, c: left, pages: *p}).release)
			*p = pages{}
		}
		return nil, failure(d.index, &e)
	}
	l := &Queue{
		dev: d, c: c, pages: *p, free: make(chan *Slot, most), submitted: make(chan *Slot, most),
		ended: make(chan struct{}), moved: make(chan struct{}),
	}
	for i, s := range unsafe.Slice(c.slots, most) {
		l.all = append(l.all, &Slot{c: s, index: i, errs: map[int]error{}})
	}
	spawn.Go("cuda completer", l.complete)
	return l, nil
}

// shape cuts the queue's memory into slots, room for each with its tables. None is
// in use.
func (l *Queue) shape(slots int, room int64) {
	for range l.slots {
		<-l.free
	}
	l.size, l.slots, l.c.nslots = room-headBytes, l.all[:slots], C.int(slots)
	for i, s := range l.slots {
		at := int64(i) * room
		s.host = unsafe.Add(l.pages.p, at+headBytes)
		s.Bytes = unsafe.Slice((*byte)(s.host), l.size)
		s.dev = uint64(l.c.staging) + uint64(at) + headBytes
		s.c.status = l.c.mapped + C.owcu_ptr(at)
		l.free <- s
	}
}

// Get waits for a free slot, or for the end of ctx.
func (l *Queue) Get(ctx context.Context) (device.Slot, error) {
	select {
	case s := <-l.free:
		s.owned, s.view, s.onDev = true, nil, 0
		s.c.after, s.c.then = nil, nil
		return s, nil
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

// View lets b take the place of the slot's bytes until it is back: memory that
// was registered (Device.Register), from which the device then copies.
func (s *Slot) View(b []byte) {
	if !s.owned || len(b) > len(s.Bytes) {
		panic("cuda: a slot that is not the caller's, or more memory than it has")
	}
	s.view = b
}

// DeviceMirror is the slot's memory in the staging on the device. A caller that asks has
// the piece's bytes there before Submit, which then copies only its tables; as
// with ViewDevice.
func (s *Slot) DeviceMirror() unsafe.Pointer {
	s.ViewDevice(uintptr(s.dev), int64(len(s.Bytes)))
	return pointer(C.owcu_ptr(s.dev))
}

// Staging is the memory on the device that has the slots' mirrors.
func (l *Queue) Staging() (base unsafe.Pointer, n int64) { return pointer(l.c.staging), l.pages.n }

// ViewDevice lets n bytes at p, in memory of the slot's own device, take the
// place of the slot's bytes until it is back: nothing of them is copied. p is a
// multiple of 16. Whoever wrote them is waited for (WaitFor) or has ended, and
// has compared the checksums. The host does not see them: of a chunk only what
// its record says is checked before the kernels, which bear any bytes.
func (s *Slot) ViewDevice(p uintptr, n int64) {
	if !s.owned || p == 0 || p%16 != 0 {
		panic("cuda: a slot that is not the caller's, or memory that is not aligned")
	}
	s.onDev, s.devLen = uint64(p), n
}

// held is how many bytes stand for the slot's.
func (s *Slot) held() int64 {
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

// Put gives a slot back that was not submitted. Giving one back twice is a bug,
// and panics.
func (l *Queue) Put(s device.Slot) {
	own := s.(*Slot)
	if !own.owned {
		panic("cuda: slot given back twice")
	}
	own.owned = false
	l.free <- own
}

// Submit sends the first n bytes of a slot on their way: each task's chunk is
// copied to the device, decoded there and laid down at its Dst, in device
// memory. It takes the slot over, whatever it returns. The checksums of the
// chunks have been compared; everything else about them is checked here.
//
// done is called once for each task, by another goroutine, when the task's bytes
// are in place or its error is known; it must not wait for this queue. If Submit
// returns an error, done is not called, and nothing is being written any more.
func (l *Queue) Submit(slot device.Slot, n int64, tasks []device.DecodeTask, done func(task int, err error)) error {
	s := slot.(*Slot)
	if !s.owned || n < 0 || n > s.held() {
		panic("cuda: a slot that is not the caller's, or a piece larger than it")
	}
	s.owned = false
	s.count, s.done = len(tasks), done
	clear(s.errs)
	b := &s.build
	b.begin(s, n, tasks)

	l.mu.Lock()
	defer l.mu.Unlock()
	if l.span != nil {
		s.taken = [2]int64{n, 0}
		for i := range tasks {
			s.taken[1] += int64(tasks[i].Chunk.Logical)
		}
	}
	err := l.broken
	s.rounds = 0
	for err == nil && !b.finished() {
		err = l.round(s, b)
		s.rounds++
	}
	b.jobs = nil
	if err != nil {
		s.done = nil
		l.free <- s
		return err
	}
	l.inflight++
	l.submitted <- s
	return nil
}

// round queues as many of a piece's jobs as the tables hold. All rounds but the
// last are waited for, since the next one writes the same tables; pieces that
// need more than one are rare. l.mu is held.
func (l *Queue) round(s *Slot, b *build) error {
	if b.around && l.c.scratch == 0 {
		var e C.struct_owcu_error
		if C.owcu_scratch(l.c, scratchBytes, &e) != 0 {
			return l.dev.sized(l.fail(&e), scratchBytes, "scratch")
		}
	}
	b.fill(uint64(l.c.scratch))
	c := s.c
	c.wait = 0
	if !b.finished() {
		c.wait = 1
	}
	c.stream = 0
	// Chunks in scratch wait for each other on the first stream, as pieces with an Order do.
	if !b.scratch && (c.then == nil || s.onDev != 0) {
		c.stream = C.uint32_t(l.next % (C.OWCU_STREAMS - 1))
		l.next++
	}
	b.write()
	var e C.struct_owcu_error
	if C.owcu_submit(l.c, C.int(s.index), &e) != 0 {
		return l.fail(&e)
	}
	if c.wait != 0 {
		b.harvest()
	}
	return nil
}

// fail notes a device error. Out of memory is not one, nor is a stream that is
// being captured: the next call may do.
func (l *Queue) fail(e *C.struct_owcu_error) error {
	err := failure(l.dev.index, e)
	if e.code != C.OWCU_OUT_OF_MEMORY && e.code != C.OWCU_CAPTURED && l.broken == nil {
		l.broken = err
	}
	return err
}

// complete hands out what has landed, piece by piece in the order of their
// submission.
func (l *Queue) complete() {
	defer close(l.ended)
	for s := range l.submitted {
		var e C.struct_owcu_error
		rc := C.owcu_wait(l.c, C.int(s.index), &e)
		l.mu.Lock()
		var err error
		if rc != 0 {
			err = l.fail(&e)
		}
		l.mu.Unlock()
		if err == nil {
			s.build.harvest()
			l.told(s)
		}
		done, n := s.done, s.count
		s.done = nil
		_ = spawn.Guard("cuda completer", func() error {
			for i := range n {
				each := s.errs[i]
				if err != nil {
					each = err
				}
				done(i, each)
			}
			return nil
		})
		l.free <- s
		l.mu.Lock()
		if l.inflight--; l.inflight == 0 {
			close(l.moved)
			l.moved = make(chan struct{})
		}
		l.mu.Unlock()
	}
}

// Drain waits until everything that was submitted has landed and its done calls
// have returned, or for the end of ctx: then work is still under way, and Close
// waits for it. It returns the device error that broke the queue, if one did.
func (l *Queue) Drain(ctx context.Context) error {
	for {
		l.mu.Lock()
		n, moved, err := l.inflight, l.moved, l.broken
		l.mu.Unlock()
		if n == 0 {
			return err
		}
		select {
		case <-moved:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// WaitFor makes everything submitted from now on wait for the work that is
// queued now on a stream of the same device: memory of torch's allocator may
// still be in use there. The number is DLPack's: 1 the legacy default stream, 2
// the thread's, else a handle.
func (l *Queue) WaitFor(stream uintptr) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.broken != nil {
		return l.broken
	}
	var e C.struct_owcu_error
	if C.owcu_join(l.c, C.uint64_t(stream), &e) != 0 {
		return l.fail(&e)
	}
	return nil
}

// Close waits for what is under way and until every slot is back, and gives the
// queue back to its device. It may be called once.
func (l *Queue) Close() {
	for range l.slots {
		<-l.free
	}
	for _, s := range l.slots {
		l.free <- s
	}
	_ = l.Drain(context.Background()) // the completer's last steps
	l.mu.Lock()
	healthy := l.broken == nil && !l.closed
	l.closed = true
	l.mu.Unlock()
	d := l.dev
	d.mu.Lock()
	if kept := &d.idle[rank(l.size)]; healthy && *kept == nil {
		*kept = l
		d.mu.Unlock()
		return
	}
	d.mu.Unlock()
	l.end()
	d.later(l.release)
}

// destroy frees the queue; nothing is under way.
func (l *Queue) destroy() error {
	l.end()
	var e C.struct_owcu_error
	return l.dev.given(l.giveBack(&e), &e, l.release)
}

// end ends the completer; nothing is under way.
func (l *Queue) end() {
	close(l.submitted)
	<-l.ended
}

// release gives a queue without a completer back to the driver, and says whether
// it is gone.
func (l *Queue) release() bool {
	var e C.struct_owcu_error
	return l.giveBack(&e) <= 0
}

func (l *Queue) giveBack(e *C.struct_owcu_error) C.int {
	rc := C.owcu_lane_free(l.c, e)
	if rc <= 0 {
		l.pages.free() // not before: they are registered
	}
	return rc
}
