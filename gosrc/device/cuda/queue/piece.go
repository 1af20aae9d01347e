package queue

/*
#include "queue.h"
#include "../../../../cuda/abi.h"
#include "../../../../cuda/abi_crc.h"
#include "../../../../cuda/abi_move.h"
*/
import "C"

import (
	"errors"
	"hash/crc32"
	"unsafe"

	"github.com/overwire/overwire/gosrc/codec/x16"
	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/device/cuda/memory"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/tensor"
)

const (
	SmallRaw = 4 << 20  // smaller copies do not saturate the link
	fewRaw   = 2        // up to this many small copies cost less than a copy to the staging memory
	FewRuns  = 8        // up to this many copies of runs, which are larger parts of a piece, cost less
	nearby   = 64 << 10 // tables this close to the piece are copied together with it
)

// A pieceBuilder converts the decode tasks of a piece to copies, tables and launches, in one or more rounds. Its memory
// is reused for later pieces.
type pieceBuilder struct {
	s                 *Slot
	tasks             []device.DecodeTask
	at                int    // the next task
	begun             bool   // a round has been filled
	base              uint64 // device address of the piece's first byte
	lo, hi            int64
	staged            bool // the bytes [lo, hi) are in the staging memory or are not needed there
	pieceNeedsScratch bool // the piece needs scratch memory
	scratch           bool // this round uses scratch memory
	inScr             int64
	runs              []rawRun // cover the whole piece if it needs only a few copies; see Slot.AllowGapWrites
	copies            []C.struct_owcu_copy
	t                 tables
}

// A rawRun is bytes [lo, hi) of the piece. Its raw tasks have the same layout in the slot as at their destinations.
type rawRun struct {
	lo, hi int64
	dst    unsafe.Pointer
}

// checkPiece checks a piece's tasks and determines which bytes kernels read. These bytes are copied to the staging
// memory unless kernels read them in place. Other raw chunks are copied directly to their destinations.
func (b *pieceBuilder) checkPiece(s *Slot, n int64, tasks []device.DecodeTask) {
	b.s, b.tasks, b.at, b.begun, b.staged, b.pieceNeedsScratch, b.base = s, tasks, 0, false, s.isReadInPlace(), false,
		s.mem.dev
	switch {
	case s.mem.onDev != 0: // the caller's view is in device memory
		b.base = s.mem.onDev
	case s.mem.view != nil && s.q.inPlace: // registered memory has one address on host and device
		b.base = uint64(uintptr(unsafe.Pointer(unsafe.SliceData(s.mem.view))))
	}
	b.lo, b.hi = n, 0
	small, smallLo, smallHi := 0, n, int64(0)
	for i := range tasks {
		task := &tasks[i]
		if err := b.checkTask(n, task); err != nil {
			s.result.failures[i] = b.explainBadChunk(task, err)
			continue
		}
		b.pieceNeedsScratch = b.pieceNeedsScratch || b.needsScratch(task)
		lo, hi := int64(task.Src), int64(task.Src)+int64(task.Chunk.Stored)
		switch {
		case task.Chunk.Codec == tensor.CodecX16 || task.View != nil || task.Cast.To != 0:
			b.lo, b.hi = min(b.lo, lo), max(b.hi, hi)
		case hi-lo < SmallRaw:
			small++
			smallLo, smallHi = min(smallLo, lo), max(smallHi, hi)
		}
	}
	if b.runs = b.runs[:0]; s.modes.loose && !b.staged && len(s.result.failures) == 0 && b.findCopyRuns() {
		return
	}
	if small > fewRaw {
		b.lo, b.hi = min(b.lo, smallLo), max(b.hi, smallHi)
	}
	b.lo &^= 15
	if s.mem.onDev != 0 {
		b.lo, b.hi = 0, n
	}
}

// findCopyRuns finds the runs of a loose piece without checksums. It reports whether there are only a few and they
// cover the whole piece.
func (b *pieceBuilder) findCopyRuns() bool {
	for i := range b.tasks {
		task := &b.tasks[i]
		lo, hi := int64(task.Src), int64(task.Src)+int64(task.Chunk.Stored)
		k := len(b.runs) - 1
		next := k < 0 || lo < b.runs[k].hi || lo-b.runs[k].hi >= GapLimit ||
			unsafe.Add(b.runs[k].dst, lo-b.runs[k].lo) != task.Dst
		if task.Chunk.Codec != tensor.CodecRaw || task.View != nil || task.Cast.To != 0 || b.comparesSum(task) ||
			next && k == FewRuns-1 {
			b.runs = b.runs[:0]
			return false
		}
		if next {
			b.runs = append(b.runs, rawRun{lo, hi, task.Dst})
		} else {
			b.runs[k].hi = hi
		}
	}
	return len(b.runs) > 0
}

// checkTask checks that a task can run. Contents that can only be checked by decoding are left to the kernel.
func (b *pieceBuilder) checkTask(n int64, task *device.DecodeTask) error {
	c := &task.Chunk
	lo, hi := int64(task.Src), int64(task.Src)+int64(c.Stored)
	if hi > n || task.Dst == nil && c.Logical > 0 {
		return errs.New(errs.ErrArgument, "invalid task on bytes [%d, %d) of a piece of %d bytes, to %p",
			lo, hi, n, task.Dst)
	}
	if err := checkCast(task); err != nil {
		return err
	}
	switch c.Codec {
	case tensor.CodecRaw:
		if c.Transform != 0 || c.Stored != c.Logical {
			return errs.New(errs.ErrCorrupt,
				"raw chunk has transform %d and stores %d of %d bytes: expected transform 0 and all bytes",
				c.Transform, c.Stored, c.Logical)
		}
		return nil
	case tensor.CodecX16:
		if (b.base+uint64(lo))%16 != 0 {
			return errs.New(errs.ErrCorrupt, "X16 chunk at offset %d: expected a multiple of 16", lo)
		}
		if b.s.mem.onDev != 0 {
			if c.Transform < 1 || c.Transform > C.OW_BYTES || c.SegTiles == 0 || c.Logical > tensor.MaxChunkBytes {
				return errs.New(errs.ErrCorrupt,
					"invalid X16 chunk of %d bytes with transform %d in segments of %d tiles",
					c.Logical, c.Transform, c.SegTiles)
			}
			return nil
		}
		return x16.Check(b.s.Memory()[lo:hi], *c)
	}
	return errs.New(errs.ErrNotSupported, "codec %d is not supported on a GPU", uint8(c.Codec))
}

// hasAllTasks reports whether every task has been added to a round.
func (b *pieceBuilder) hasAllTasks() bool { return b.begun && b.at == len(b.tasks) }

// fillRound adds as many of the next tasks as fit in the tables. scratch is the address of scratch memory if the piece
// needs it.
func (b *pieceBuilder) fillRound(scratch uint64) {
	b.scratch, b.inScr, b.copies = false, 0, b.copies[:0]
	b.t.reset()
	for i := range b.runs {
		r := &b.runs[i]
		b.copies = appendCopies(b.copies, C.owcu_ptr(uintptr(r.dst)), unsafe.Pointer(&b.s.Memory()[r.lo]), r.hi-r.lo)
	}
	for ; b.at < len(b.tasks); b.at++ {
		task := &b.tasks[b.at]
		if b.s.result.failures[b.at] == nil && task.Chunk.Logical > 0 && !b.addTask(task, scratch) {
			break
		}
	}
	b.begun = true
	b.t.appendLaunches()
}

// addTask adds a task to the round and reports whether it fits.
func (b *pieceBuilder) addTask(task *device.DecodeTask, scratch uint64) bool {
	before, hasSum := b.t.used, b.comparesSum(task)
	fits := !hasSum || b.t.reserveForSum(task)
	switch {
	case !fits || len(b.runs) > 0 || b.s.modes.sumOnly:
	case task.Chunk.Codec == tensor.CodecX16:
		fits = b.addX16(task, scratch)
	default:
		fits = b.addRaw(task, scratch)
	}
	if !fits {
		b.t.used = before
	} else if hasSum {
		b.t.addSumParts(b.s, b.at, task, b.addressOf(task))
	}
	return fits
}

// checkCast checks that the elements of a task's chunk can be cast.
func checkCast(task *device.DecodeTask) error {
	if task.Cast.To == 0 {
		return nil
	}
	if !CanCast(task.Cast) {
		return errs.New(errs.ErrNotSupported, "cannot cast %v to %v on a GPU", task.Cast.From, task.Cast.To)
	}
	from, to := task.Cast.From.Bits()/8, task.Cast.To.Bits()/8
	if task.View != nil || int(task.Chunk.Logical)%from != 0 || uintptr(task.Dst)%uintptr(to) != 0 {
		return errs.New(errs.ErrArgument,
			"invalid cast of %d bytes of %v to %p: expected a whole chunk, whole elements and aligned memory",
			task.Chunk.Logical, task.Cast.From, task.Dst)
	}
	return nil
}

// needsScratch reports whether a chunk must be decoded to scratch memory first. Kernels write only whole chunks, to
// multiples of 16, and cast only aligned elements.
func (b *pieceBuilder) needsScratch(task *device.DecodeTask) bool {
	if task.Cast.To != 0 {
		return task.Chunk.Codec == tensor.CodecX16 || (b.base+uint64(task.Src))%uint64(task.Cast.From.Bits()/8) != 0
	}
	return task.Chunk.Codec == tensor.CodecX16 && (task.View != nil || uintptr(task.Dst)%16 != 0)
}

// addX16 adds an X16 chunk to the tables. It returns false if they have too little space left.
func (b *pieceBuilder) addX16(task *device.DecodeTask, scratch uint64) bool {
	through := b.needsScratch(task)
	n := x16.Segments(task.Chunk)
	need := chunkSize + n*segSize
	dst := uint64(uintptr(task.Dst))
	var moves []C.ow_move
	if through {
		at := b.placeInScratch(task, scratch)
		if task.Cast.To != 0 {
			need += tableBytesOfCast(task)
		} else if moves = b.splitIntoMoves(task, at, dst); len(moves) == 0 {
			return true // no bytes of the chunk are wanted
		}
		dst = at
		need += tableBytesOfMoves(moves)
	}
	if !b.t.haveSpace(need) || !b.t.haveWords(1) {
		return false
	}
	if through {
		b.scratch = true
		b.inScr += (int64(task.Chunk.Logical) + 255) &^ 255
		b.t.addMoves(moves)
		if task.Cast.To != 0 {
			b.t.addCast(task, dst)
		}
	}
	b.t.addChunk(b.at, &task.Chunk, b.base+uint64(task.Src), dst, n)
	b.t.used += need
	return true
}

// addRaw adds a raw chunk. If it is in the bytes that kernels read, a kernel moves it. Otherwise it is copied.
func (b *pieceBuilder) addRaw(task *device.DecodeTask, scratch uint64) bool {
	if task.Cast.To != 0 {
		return b.addRawCast(task, scratch)
	}
	lo, hi := int64(task.Src), int64(task.Src)+int64(task.Chunk.Stored)
	if lo < b.lo || hi > b.hi {
		if len(b.copies)+3+int((hi-lo)/memory.RegisterAlignment()) > C.OWCU_COPIES-8 {
			return false
		}
		b.copies = appendCopies(b.copies, C.owcu_ptr(uintptr(task.Dst)), unsafe.Pointer(&b.s.Memory()[lo]), hi-lo)
		return true
	}
	moves := b.splitIntoMoves(task, b.base+uint64(lo), uint64(uintptr(task.Dst)))
	need := tableBytesOfMoves(moves)
	if !b.t.haveSpace(need) {
		return false
	}
	b.t.addMoves(moves)
	b.t.used += need
	return true
}

// splitIntoMoves splits a task's bytes into moves. A view may need one move for its whole rows and one for a partial
// row at each end.
func (b *pieceBuilder) splitIntoMoves(task *device.DecodeTask, src, dst uint64) (out []C.ow_move) {
	if task.View == nil {
		return []C.ow_move{{src: C.uint64_t(src), dst: C.uint64_t(dst), width: C.uint32_t(task.Chunk.Logical), rows: 1}}
	}
	task.View.Runs(int64(task.Chunk.Logical), func(to, from, n int64) {
		if k := len(out) - 1; k >= 0 && out[k].width == C.uint32_t(n) {
			m := &out[k]
			end := func(base, pitch C.uint64_t) uint64 { return uint64(base) + uint64(m.rows)*uint64(pitch) }
			if m.rows == 1 {
				m.src_pitch, m.dst_pitch = C.uint64_t(src+uint64(from))-m.src, C.uint64_t(dst+uint64(to))-m.dst
			}
			if end(m.src, m.src_pitch) == src+uint64(from) && end(m.dst, m.dst_pitch) == dst+uint64(to) {
				m.rows++
				return
			}
		}
		out = append(out, C.ow_move{src: C.uint64_t(src + uint64(from)), dst: C.uint64_t(dst + uint64(to)),
			width: C.uint32_t(n), rows: 1})
	})
	return out
}

// addRawCast adds the cast of a raw chunk. If its elements are not aligned to their size, they are first moved to
// scratch memory.
func (b *pieceBuilder) addRawCast(task *device.DecodeTask, scratch uint64) bool {
	src := b.base + uint64(task.Src)
	need := tableBytesOfCast(task)
	var moves []C.ow_move
	if b.needsScratch(task) {
		at := b.placeInScratch(task, scratch)
		moves = b.splitIntoMoves(task, src, at)
		need += tableBytesOfMoves(moves)
		src = at
	}
	if !b.t.haveSpace(need) {
		return false
	}
	if moves != nil {
		b.scratch = true
		b.inScr += (int64(task.Chunk.Logical) + 255) &^ 255
		b.t.addMoves(moves)
	}
	b.t.addCast(task, src)
	b.t.used += need
	return true
}

// placeInScratch returns the task's address in scratch memory. If the memory is full, chunks that were placed there
// earlier are launched first.
func (b *pieceBuilder) placeInScratch(task *device.DecodeTask, scratch uint64) uint64 {
	if b.inScr+int64(task.Chunk.Logical) > scratchBytes {
		b.t.appendLaunches()
		b.inScr = 0
	}
	return scratch + uint64(b.inScr)
}

// writeRound writes the round into the slot's pinned memory and its C struct.
func (b *pieceBuilder) writeRound() {
	s := b.s
	size := b.t.size()
	table := unsafe.Add(s.mem.host, -size)
	dev := s.mem.dev - uint64(size)
	near := !s.isReadInPlace() && len(b.runs) == 0
	if !near {
		// Kernels read the tables in host memory. A copy would have to wait for copies of other queues, which occupy
		// the link for milliseconds, or would interrupt the copies of runs.
		dev = uint64(s.c.status) + headBytes - uint64(size)
	}
	b.t.write(table, unsafe.Add(s.mem.host, -headBytes), dev, s.c)
	copies := s.c.copies[:0]
	if size > 0 && near {
		upto := int64(0)
		if !b.staged && b.lo <= nearby && b.hi > b.lo && s.mem.view == nil {
			upto, b.staged = b.hi, true
		}
		copies = append(copies, C.struct_owcu_copy{dst: C.owcu_ptr(dev), src: table, n: C.uint64_t(int64(size) + upto)})
		if !b.staged && b.hi > b.lo {
			b.staged = true
			copies = appendCopies(copies, C.owcu_ptr(s.mem.dev+uint64(b.lo)),
				unsafe.Pointer(&s.Memory()[b.lo]), b.hi-b.lo)
		}
	}
	copies = append(copies, b.copies...)
	s.c.early = C.uint32_t(len(b.copies))
	s.c.ncopies = C.uint32_t(len(copies))
}

// appendCopies adds a copy from pinned memory, split where separately registered parts meet.
func appendCopies(all []C.struct_owcu_copy, dst C.owcu_ptr, src unsafe.Pointer, n int64) []C.struct_owcu_copy {
	for n > 0 {
		k := min(n, memory.RegisterAlignment()-int64(uintptr(src)%uintptr(memory.RegisterAlignment())))
		all = append(all, C.struct_owcu_copy{dst: dst, src: src, n: C.uint64_t(k)})
		dst, src, n = dst+C.owcu_ptr(k), unsafe.Add(src, k), n-k
	}
	return all
}

// comparesSum reports whether the device compares a task's checksum.
func (b *pieceBuilder) comparesSum(task *device.DecodeTask) bool {
	return b.s.modes.sumOnly || b.s.modes.checks && task.Summed && !b.s.isReadInPlace()
}

// addressOf returns the device address of a task's stored bytes.
func (b *pieceBuilder) addressOf(task *device.DecodeTask) uint64 {
	lo, n := int64(task.Src), int64(task.Chunk.Stored)
	if lo >= b.lo && lo+n <= b.hi {
		return b.base + uint64(lo)
	}
	return uint64(uintptr(task.Dst)) // copied directly to the destination
}

// explainBadChunk returns a checksum mismatch in place of an error for an invalid chunk, if its stored bytes do not
// match their checksum.
func (b *pieceBuilder) explainBadChunk(task *device.DecodeTask, err error) error {
	if !errors.Is(err, errs.ErrCorrupt) || !b.comparesSum(task) {
		return err
	}
	storedBytes := b.s.Memory()[task.Src:][:task.Chunk.Stored]
	if sum := crc32.Checksum(storedBytes, castagnoli); sum != task.Chunk.Sum {
		return errs.NewMismatch(task.Chunk.Sum, sum)
	}
	return err
}
