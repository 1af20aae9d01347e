package queue

/*
#include "queue.h"
*/
import "C"

import (
	"errors"
	"math"
	"sync"
	"unsafe"

	"github.com/overwire/overwire/gosrc/device/cuda/driver"
	"github.com/overwire/overwire/gosrc/device/cuda/memory"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/spawn"
)

// Kernels in the order of their numbers: transforms 1 to 8 of X16, then moves, casts and checksums.
const (
	kernelNames = "ow_x16_bf16\x00ow_x16_fp16\x00ow_x16_fp32\x00ow_x16_e4m3\x00ow_x16_e5m2\x00ow_x16_int8\x00" +
		"ow_x16_nibbles\x00ow_x16_bytes\x00ow_move_kernel\x00ow_cast_kernel\x00ow_crc\x00"
	kernelMove = 8
	kernelCast = 9
	kernelCRC  = 10
)

// A Pool makes the queues of one device, and caches closed queues for the next load.
type Pool struct {
	ctx     *driver.Context
	mem     *memory.Memory
	spare   *memory.Spare // memory of the first queue
	kernels *driver.Kernels

	making sync.Mutex // held while a queue is made
	mu     sync.Mutex
	idle   [2]*Queue // by idleIndexFor; guarded by mu
}

// NewPool returns the pool of a device. x16 is the module with the queues' kernels, and spare is memory for the first
// queue.
func NewPool(ctx *driver.Context, mem *memory.Memory, spare *memory.Spare, x16 *driver.Module) *Pool {
	return &Pool{ctx: ctx, mem: mem, spare: spare, kernels: x16.Kernels(kernelNames)}
}

// idleIndexFor returns the index in Pool.idle for queues with slots of n bytes.
func idleIndexFor(n int64) int {
	if n <= TablesOnly {
		return 1
	}
	return 0
}

// Queue returns a queue with the given number and size of slots. Numbers below 1 mean the defaults. The pool caches one
// closed queue for the next caller that needs about as much memory, even with a different number of slots, so that a
// second load pins and allocates nothing. It also caches one queue with slots of TablesOnly bytes.
func (p *Pool) Queue(slots int, slotBytes int64) (*Queue, error) {
	p.making.Lock() // PrepareQueue may be making this queue
	defer p.making.Unlock()
	return p.takeOrMake(slots, slotBytes)
}

// PrepareQueue makes a queue that the pool caches for the next call of Queue, unless one is already cached. With
// TablesOnly it also loads the kernels, because the first launch of each kernel takes milliseconds. It returns no
// error, because Queue will report it.
func (p *Pool) PrepareQueue(slots int, slotBytes int64) {
	p.making.Lock()
	defer p.making.Unlock()
	p.mu.Lock()
	hasIdle := p.idle[idleIndexFor(slotBytes)] != nil
	p.mu.Unlock()
	if hasIdle {
		return
	}
	if queue, err := p.takeOrMake(slots, slotBytes); err == nil {
		if slotBytes <= TablesOnly {
			var e C.struct_owcu_error
			_ = C.owcu_load_kernels(queue.c, &e)
		}
		queue.Close()
	}
}

// IsMakingQueue reports whether a queue is being made, so that Queue would have to wait.
func (p *Pool) IsMakingQueue() bool {
	if p.making.TryLock() {
		p.making.Unlock()
		return false
	}
	return true
}

// Trim frees the idle queues and the spare memory.
func (p *Pool) Trim() (err error) {
	p.mu.Lock()
	idle := p.idle
	p.idle = [2]*Queue{}
	p.mu.Unlock()
	p.spare.Take().Free()
	for _, queue := range idle {
		if queue != nil {
			queue.end.stop()
			if e := p.mem.FreeNow(queue.tryFree); err == nil {
				err = e
			}
		}
	}
	return err
}

// keep caches a closed queue unless one is already cached, and reports whether it did.
func (p *Pool) keep(q *Queue) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	idle := &p.idle[idleIndexFor(q.size)]
	if *idle != nil {
		return false
	}
	*idle = q
	return true
}

// takeOrMake implements Queue. The caller holds p.making.
func (p *Pool) takeOrMake(slots int, slotBytes int64) (*Queue, error) {
	if slots <= 0 {
		slots = ring.slots
	}
	if slotBytes <= 0 {
		slotBytes = ring.bytes
	}
	if slots > 1024 || slotBytes > 1<<31 {
		return nil, errs.New(errs.ErrArgument,
			"invalid ring of %d slots of %d bytes: expected up to 1024 slots of up to 2 GiB", slots, slotBytes)
	}
	p.mu.Lock()
	idle := &p.idle[idleIndexFor(slotBytes)]
	queue := *idle
	*idle = nil
	p.mu.Unlock()
	if queue != nil {
		if queue.fits(slots, slotBytes) {
			queue.closed, queue.inPlace = false, p.ctx.ReadsInPlace()
			queue.divideIntoSlots(slots, slotStride(slotBytes))
			return queue, nil
		}
		queue.end.stop()
		p.mem.DeferFree(queue.tryFree)
	}
	kernels, err := p.kernels.Get()
	if err != nil {
		return nil, err
	}
	most, n := slots, roundUpToRing(int64(slots)*slotStride(slotBytes))
	if idleIndexFor(slotBytes) == 0 { // the next load may need a different number of slots
		fine, _ := ExchangeRing(math.MaxInt / 3)
		most = max(most, fine)
	}
	pages := p.spare.Take()
	if pages.ShrinkTo(n); pages.N < n {
		pages.Free()
		if pages, err = memory.NewPages(n, p.ctx.NearNode()); err != nil {
			return nil, err
		}
	}
	queue, err = p.newQueue(&pages, most, kernels)
	if errors.Is(err, errs.ErrMemory) {
		// Released tensors or another queue may occupy the memory that is needed for staging.
		p.mem.FreeDeferred()
		if e := p.mem.FreeUnused(); e == nil && pages.P != nil {
			queue, err = p.newQueue(&pages, most, kernels)
		}
	}
	if err != nil {
		pages.Free()
		return nil, p.ctx.AddSizes(err, n, "the staging memory of a load")
	}
	queue.divideIntoSlots(slots, slotStride(slotBytes))
	return queue, nil
}

// newQueue makes a queue with space for `most` slots but without slots. After an error the caller still owns the pages,
// unless newQueue has set *pages to zero.
func (p *Pool) newQueue(pages *memory.Pages, most int, kernels []driver.Handle) (*Queue, error) {
	var e C.struct_owcu_error
	var remainder *C.struct_owcu_queue
	c := C.owcu_queue_new(C.owcu_handle(p.ctx.Handle()), pages.P, C.uint64_t(pages.N), C.int(most),
		cBool(!p.ctx.ReadsInPlace()), (*C.owcu_handle)(unsafe.Pointer(&kernels[0])), &remainder, &e)
	if c == nil {
		if remainder != nil {
			p.mem.DeferFree((&Queue{pool: p, c: remainder, pages: *pages}).tryFree)
			*pages = memory.Pages{}
		}
		return nil, p.ctx.ErrorOf(unsafe.Pointer(&e))
	}
	queue := &Queue{pool: p, c: c, inPlace: p.ctx.ReadsInPlace(), pages: *pages, free: newFreeSlots(most)}
	queue.end = completer{ctx: p.ctx, c: c, free: queue.free, submitted: make(chan *Slot, most),
		ended: make(chan struct{}), drained: make(chan struct{})}
	for i, s := range unsafe.Slice(c.slots, most) {
		queue.all = append(queue.all, &Slot{q: queue, c: s, index: i, reader: anyone})
		queue.all[i].result.failures = map[int]error{}
	}
	spawn.Go("cuda completer", queue.end.run)
	return queue, nil
}
