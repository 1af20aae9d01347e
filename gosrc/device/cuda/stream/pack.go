package stream

/*
#include "pack.h"
#include "../../../../cuda/abi_batch.h"
*/
import "C"

import (
	"errors"
	"unsafe"

	"github.com/overwire/overwire/gosrc/codec/blocksum"
	"github.com/overwire/overwire/gosrc/device/cuda/memory"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/sizes"
)

const (
	packRows = 1024 // maximum ranges in a slot
	tailRoom = (blocksum.MaxTail + 15) &^ 15
	itemSize = int(unsafe.Sizeof(C.ow_batch_item{}))
	// A chunk of 1 MiB has eight segments, and each gets a warp. Blocks have twice as many threads as in a large
	// batch, because few blocks run at the same time and each one must be fast.
	packThreads = 256
	leastSlots  = 3
)

// packSlot is the maximum number of bytes that a slot encodes. Tests make it smaller.
var packSlot int64 = 16 << 20

// A Packer encodes device memory and copies it to pinned host memory, in the slots of a ring. Slots are independent.
// For each slot, call Encode, QueueFetches and Wait, in this order. A Packer uses separate streams and does not
// wait for other work, so work that writes the memory must have ended before.
type Packer struct {
	on     *Streams
	arena  *arena
	slot   int64
	pinned int64 // bytes per slot in the arena's pinned memory, for items and sums
	encode C.owcu_handle
	hash   C.owcu_handle
}

// NewPacker returns a Packer, which the caller must close. sums enables QueueSums. If device memory is short, it uses
// less memory, down to an eighth.
func NewPacker(d *Batches, sums bool) (*Packer, error) {
	kernels, err := d.kernels.Get()
	if err != nil {
		return nil, err
	}
	p := &Packer{on: d.on, slot: packSlot, pinned: int64(packRows * itemSize),
		encode: C.owcu_handle(kernels[batchEncode])}
	if sums {
		p.hash = C.owcu_handle(kernels[batchHash])
		p.pinned = sizes.RoundUp(2*p.pinned+p.slot/blocksum.Block*blocksum.Sum+packRows*tailRoom, 4096)
	}
	for n := C.OWCU_PACK_SLOTS; ; n /= 2 {
		p.arena, err = newArena(d.on, int64(n)*p.pinned, int64(n)*p.slot, n+C.OWCU_PACK_COPIERS, n, n, "encoding")
		if !errors.Is(err, errs.ErrMemory) || n/2 < leastSlots {
			return p, err
		}
	}
}

// Close waits for the packer's work and frees it.
func (p *Packer) Close() { _ = p.on.mem.FreeNow(p.arena.tryFree) } // if the driver rejects that, the reaper tries again

// SlotCount returns the number of slots.
func (p *Packer) SlotCount() int { return int(p.arena.c.nevents) }

// SlotBytes returns the maximum number of bytes that a slot encodes, with each range rounded up to 16.
func (p *Packer) SlotBytes() int64 { return p.slot }

// DeviceBytes returns how much device memory the packer takes.
func (p *Packer) DeviceBytes() int64 { return int64(p.SlotCount()) * p.slot }

// Encode encodes ranges with the X16 kernel and waits. A range stays unchanged if it has no transform, is not aligned
// to 16, or gains too little.
func (p *Packer) Encode(slot int, all []PackedRange) error {
	base := slot * int(p.pinned)
	items := unsafe.Slice((*C.ow_batch_item)(unsafe.Add(p.arena.pages.P, base)), packRows)[:0:packRows]
	var rows []int
	offset := int64(0)
	for i := range all {
		r := &all[i]
		r.Stored, r.Tiles, r.at = r.N, 0, r.Src
		if r.Transform == 0 || r.Src%16 != 0 {
			continue
		}
		room := (r.N + 15) &^ 15
		if len(rows) == packRows || offset+room > p.slot {
			return errs.New(errs.ErrArgument, "%d ranges do not fit in a slot of %d bytes", len(all), p.slot)
		}
		at := uint64(p.arena.c.device) + uint64(int64(slot)*p.slot+offset)
		items = append(items, C.ow_batch_item{src: C.uint64_t(r.Src), src_len: C.uint64_t(r.N), dst: C.uint64_t(at),
			dst_cap: C.uint64_t(r.N), arg: C.uint32_t(r.Transform)})
		rows = append(rows, i)
		offset += room
	}
	if len(rows) == 0 {
		return nil
	}
	err := p.on.call(func(e *C.struct_owcu_error) C.int {
		return C.owcu_pack_launch(p.on.c, &p.arena.c, C.int(slot), p.encode, p.arena.c.mapped+C.owcu_ptr(base),
			C.uint32_t(len(rows)), packThreads, e)
	})
	if err == nil {
		err = p.Wait(slot)
	}
	if err != nil {
		return err
	}
	for k, i := range rows {
		it, r := &items[k], &all[i]
		switch {
		case it.status == C.OW_BATCH_GAIN:
		case it.status != 0 || it.written == 0 || int64(it.written) >= r.N:
			return errs.New(errs.ErrEngine, "cuda:%d: a chunk of %d bytes was encoded to %d, status %d",
				p.on.ctx.Index(), r.N, it.written, it.status)
		default:
			r.Stored, r.Tiles, r.at = int64(it.written), uint16(it.arg>>16), uint64(it.dst)
		}
	}
	return nil
}

// QueueSums queues the computation of the block sums of ranges with Hash set. SumsAndTail returns them after Wait.
// Encode may be called immediately after QueueSums. The Packer must have been made with sums.
func (p *Packer) QueueSums(slot int, all []PackedRange) error {
	base := slot*int(p.pinned) + packRows*itemSize
	items := unsafe.Slice((*C.ow_batch_item)(unsafe.Add(p.arena.pages.P, base)), packRows)[:0:packRows]
	at, end := base+packRows*itemSize, (slot+1)*int(p.pinned)
	for i := range all {
		r := &all[i]
		if !r.Hash {
			continue
		}
		n := int(r.N/blocksum.Block*blocksum.Sum) + r.Tail
		if len(items) == packRows || at+n > end || r.Src%8 != 0 {
			return errs.New(errs.ErrArgument,
				"the sums of %d ranges do not fit in a slot of %d bytes, or a range is not aligned to 8", len(all),
				p.slot)
		}
		items = append(items, C.ow_batch_item{src: C.uint64_t(r.Src), src_len: C.uint64_t(r.N),
			dst: C.uint64_t(p.arena.c.mapped) + C.uint64_t(at), dst_cap: C.uint64_t(n), arg: C.uint32_t(r.Tail)})
		r.sums = unsafe.Slice((*byte)(unsafe.Add(p.arena.pages.P, at)), n)
		at += (n + 15) &^ 15
	}
	if len(items) == 0 {
		return nil
	}
	return p.on.call(func(e *C.struct_owcu_error) C.int {
		return C.owcu_pack_launch(p.on.c, &p.arena.c, C.int(slot), p.hash, p.arena.c.mapped+C.owcu_ptr(base),
			C.uint32_t(len(items)), packThreads, e)
	})
}

// QueueFetches queues the copies of encoded ranges to their destinations in pinned memory.
func (p *Packer) QueueFetches(slot int, all []PackedRange) error {
	var copies []C.struct_owcu_fetch
	for i := range all {
		r := &all[i]
		for offset := int64(0); offset < r.Stored; {
			to := unsafe.Add(r.To, offset)
			n := min(r.Stored-offset, memory.RegisterAlignment()-int64(uintptr(to)%uintptr(memory.RegisterAlignment())))
			copies = append(copies, C.struct_owcu_fetch{dst: to, src: C.owcu_ptr(r.at + uint64(offset)),
				n: C.uint64_t(n)})
			offset += n
		}
	}
	return p.queueCopies(slot, copies)
}

func (p *Packer) queueCopies(slot int, copies []C.struct_owcu_fetch) error {
	return p.on.call(func(e *C.struct_owcu_error) C.int {
		return C.owcu_pack_fetch(p.on.c, &p.arena.c, C.int(slot), C.uint64_t(len(copies)), unsafe.SliceData(copies), e)
	})
}

// Wait waits for the last work of a slot.
func (p *Packer) Wait(slot int) error {
	return p.on.call(func(e *C.struct_owcu_error) C.int { return C.owcu_pack_wait(p.on.c, &p.arena.c, C.int(slot), e) })
}

// CopySamples copies n bytes from each address to the host and calls got with them. got must not retain the bytes.
// No slot may be in use.
func (p *Packer) CopySamples(at []uint64, n int64, got func(i int, b []byte)) error {
	most := int(p.arena.pages.N / n)
	for first := 0; first < len(at); first += most {
		part := at[first:min(len(at), first+most)]
		copies := make([]C.struct_owcu_fetch, len(part))
		for i, src := range part {
			copies[i] = C.struct_owcu_fetch{dst: unsafe.Add(p.arena.pages.P, int64(i)*n), src: C.owcu_ptr(src),
				n: C.uint64_t(n)}
		}
		if err := p.queueCopies(0, copies); err != nil {
			return err
		}
		if err := p.Wait(0); err != nil {
			return err
		}
		for i := range part {
			got(first+i, unsafe.Slice((*byte)(copies[i].dst), n))
		}
	}
	return nil
}
