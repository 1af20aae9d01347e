package cuda

/*
#include "queue.h"
#include "../../../cuda/abi.h"
#include "../../../cuda/abi_crc.h"
#include "../../../cuda/abi_move.h"
*/
import "C"

import (
	"unsafe"

	"github.com/overwire/overwire/gosrc/codec/x16"
	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/tensor"
)

const (
	smallRaw = 4 << 20  // smaller copies do not saturate the link
	fewRaw   = 2        // this many of them cost less than copying through the staging
	fewRuns  = 8        // likewise of runs, of which each is mostly much of a piece
	nearby   = 64 << 10 // above this, tables are copied apart from the piece

	chunkSize = int(unsafe.Sizeof(C.ow_x16_chunk{}))
	segSize   = int(unsafe.Sizeof(C.ow_x16_seg{}))
	moveSize  = int(unsafe.Sizeof(C.ow_move{}))
	castSize  = int(unsafe.Sizeof(C.ow_cast{}))
	partSize  = int(unsafe.Sizeof(C.ow_part{}))
)

// A pieceBuilder turns the decode tasks of a piece into copies, tables and launches, in
// one round or several. It keeps its memory between pieces.
type pieceBuilder struct {
	s                 *Slot
	tasks             []device.DecodeTask
	at                int    // the next task
	begun             bool   // a round was filled
	base              uint64 // address of the piece's first byte for the kernels
	lo, hi            int64
	staged            bool // the bytes [lo, hi) were copied to the staging, or need not be
	pieceNeedsScratch bool // the piece needs scratch
	scratch           bool // this round uses it
	used              int  // bytes of tables
	inScr             int64
	runs              []rawRun // the whole piece, where its tasks are few copies; see Slot.AllowGapWrites
	chunks            []C.ow_x16_chunk
	owner             []int // task of each chunk
	moves             []C.ow_move
	casts             []C.ow_cast
	segs              []C.ow_x16_seg
	parts             []C.ow_part
	crcs              []C.ow_crc_part
	sums              []summedChunk
	copies            []C.struct_owcu_copy
	launches          []launch

	// The batch that is being filled: segments by transform, moves and casts, whose chunks fit in scratch.
	pendingSegs [8][]C.ow_x16_seg
	moved       []C.ow_part
	cast        []C.ow_part
}

// A rawRun is raw tasks that lie in the slot as they do at their destinations: bytes
// [lo, hi) of the piece.
type rawRun struct {
	lo, hi int64
	dst    unsafe.Pointer
}

// A launch is a kernel and its items: in segs, for moves and casts in parts, for checksums in crcs.
type launch struct{ kernel, first, n int }

// checkPiece checks a piece's tasks and decides which bytes a kernel reads, and are copied
// to the staging for that unless it reads them in place. Other raw chunks are copied
// straight to their destinations.
func (b *pieceBuilder) checkPiece(s *Slot, n int64, tasks []device.DecodeTask) {
	b.s, b.tasks, b.at, b.begun, b.staged, b.pieceNeedsScratch, b.base = s, tasks, 0, false, s.isReadInPlace(), false,
		s.dev
	switch {
	case s.onDev != 0: // the caller's view is on the device
		b.base = s.onDev
	case s.view != nil && s.q.inPlace: // registered memory has one address on host and device
		b.base = uint64(uintptr(unsafe.Pointer(unsafe.SliceData(s.view))))
	}
	b.lo, b.hi = n, 0
	small, smallLo, smallHi := 0, n, int64(0)
	for i := range tasks {
		task := &tasks[i]
		if err := b.checkTask(n, task); err != nil {
			s.failures[i] = b.explainBadChunk(task, err)
			continue
		}
		b.pieceNeedsScratch = b.pieceNeedsScratch || b.needsScratch(task)
		lo, hi := int64(task.Src), int64(task.Src)+int64(task.Chunk.Stored)
		switch {
		case task.Chunk.Codec == tensor.CodecX16 || task.View != nil || task.Cast.To != 0:
			b.lo, b.hi = min(b.lo, lo), max(b.hi, hi)
		case hi-lo < smallRaw:
			small++
			smallLo, smallHi = min(smallLo, lo), max(smallHi, hi)
		}
	}
	if b.runs = b.runs[:0]; s.loose && !b.staged && len(s.failures) == 0 && b.findCopyRuns() {
		return
	}
	if small > fewRaw {
		b.lo, b.hi = min(b.lo, smallLo), max(b.hi, smallHi)
	}
	b.lo &^= 15
	if s.onDev != 0 {
		b.lo, b.hi = 0, n
	}
}

// findCopyRuns finds the runs of a loose piece without checksums. It reports whether they are few, and
// all that the piece has.
func (b *pieceBuilder) findCopyRuns() bool {
	for i := range b.tasks {
		task := &b.tasks[i]
		lo, hi := int64(task.Src), int64(task.Src)+int64(task.Chunk.Stored)
		k := len(b.runs) - 1
		next := k < 0 || lo < b.runs[k].hi || lo-b.runs[k].hi >= looseGap ||
			unsafe.Add(b.runs[k].dst, lo-b.runs[k].lo) != task.Dst
		if task.Chunk.Codec != tensor.CodecRaw || task.View != nil || task.Cast.To != 0 || b.comparesSum(task) ||
			next && k == fewRuns-1 {
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

// checkTask checks that a task can run. The kernel checks words in a chunk that only
// decoding can check.
func (b *pieceBuilder) checkTask(n int64, task *device.DecodeTask) error {
	c := &task.Chunk
	lo, hi := int64(task.Src), int64(task.Src)+int64(c.Stored)
	if hi > n || task.Dst == nil && c.Logical > 0 {
		return errs.New(errs.ErrArgument, "a task on bytes [%d, %d) of %d, to %p", lo, hi, n, task.Dst)
	}
	if err := checkCast(task); err != nil {
		return err
	}
	switch c.Codec {
	case tensor.CodecRaw:
		if c.Transform != 0 || c.Stored != c.Logical {
			return errs.New(errs.ErrCorrupt, "raw chunk with transform %d, %d bytes of %d", c.Transform, c.Stored,
				c.Logical)
		}
		return nil
	case tensor.CodecX16:
		if (b.base+uint64(lo))%16 != 0 {
			return errs.New(errs.ErrCorrupt, "X16 chunk at %d, which is not a multiple of 16", lo)
		}
		if b.s.onDev != 0 {
			if c.Transform < 1 || c.Transform > C.OW_BYTES || c.SegTiles == 0 || c.Logical > tensor.MaxChunkBytes {
				return errs.New(errs.ErrCorrupt, "X16 chunk of %d bytes with transform %d in segments of %d tiles",
					c.Logical, c.Transform, c.SegTiles)
			}
			return nil
		}
		return x16.Check(b.s.Memory()[lo:hi], *c)
	}
	return errs.New(errs.ErrNotSupported, "codec %d on a GPU", uint8(c.Codec))
}

// hasAllTasks reports whether every task is in a round.
func (b *pieceBuilder) hasAllTasks() bool { return b.begun && b.at == len(b.tasks) }

// fillRound takes the next tasks, as many as the tables hold. scratch is the address of
// scratch memory, if the piece needs it.
func (b *pieceBuilder) fillRound(scratch uint64) {
	b.scratch, b.used, b.inScr = false, 0, 0
	b.chunks, b.owner, b.moves, b.segs, b.parts = b.chunks[:0], b.owner[:0], b.moves[:0], b.segs[:0], b.parts[:0]
	b.casts, b.crcs, b.sums = b.casts[:0], b.crcs[:0], b.sums[:0]
	b.copies, b.launches = b.copies[:0], b.launches[:0]
	for i := range b.runs {
		r := &b.runs[i]
		b.copies = appendCopies(b.copies, deviceAddress(r.dst), unsafe.Pointer(&b.s.Memory()[r.lo]), r.hi-r.lo)
	}
	for ; b.at < len(b.tasks); b.at++ {
		task := &b.tasks[b.at]
		if b.s.failures[b.at] == nil && task.Chunk.Logical > 0 && !b.addTask(task, scratch) {
			break
		}
	}
	b.begun = true
	b.appendLaunches()
}

// addTask adds a task to the round, and reports whether it fits.
func (b *pieceBuilder) addTask(task *device.DecodeTask, scratch uint64) bool {
	before, hasSum := b.used, b.comparesSum(task)
	fits := !hasSum || b.reserveForSum(task)
	switch {
	case !fits || len(b.runs) > 0 || b.s.sumOnly:
	case task.Chunk.Codec == tensor.CodecX16:
		fits = b.addX16(task, scratch)
	default:
		fits = b.addRaw(task, scratch)
	}
	if !fits {
		b.used = before
	} else if hasSum {
		b.addSumParts(task)
	}
	return fits
}

// checkCast checks that the elements of a task's chunk can be cast.
func checkCast(task *device.DecodeTask) error {
	if task.Cast.To == 0 {
		return nil
	}
	if !CanCast(task.Cast) {
		return errs.New(errs.ErrNotSupported, "cast of %v to %v on a GPU", task.Cast.From, task.Cast.To)
	}
	from, to := task.Cast.From.Bits()/8, task.Cast.To.Bits()/8
	if task.View != nil || int(task.Chunk.Logical)%from != 0 || uintptr(task.Dst)%uintptr(to) != 0 {
		return errs.New(errs.ErrArgument, "cast of %d bytes of %v, or a part of them, to %p", task.Chunk.Logical,
			task.Cast.From, task.Dst)
	}
	return nil
}

// needsScratch reports whether a chunk goes through scratch: kernels write whole chunks,
// at multiples of 16, and cast whole elements.
func (b *pieceBuilder) needsScratch(task *device.DecodeTask) bool {
	if task.Cast.To != 0 {
		return task.Chunk.Codec == tensor.CodecX16 || (b.base+uint64(task.Src))%uint64(task.Cast.From.Bits()/8) != 0
	}
	return task.Chunk.Codec == tensor.CodecX16 && (task.View != nil || uintptr(task.Dst)%16 != 0)
}

// addX16 adds an X16 chunk.
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
			return true // the view has no bytes of it
		}
		dst = at
		need += tableBytesOfMoves(moves)
	}
	if !b.tablesHaveSpace(need) || len(b.chunks)+len(b.crcs) == maxWords {
		return false
	}
	if through {
		b.scratch = true
		b.inScr += (int64(task.Chunk.Logical) + 255) &^ 255
		b.addMoves(moves)
		if task.Cast.To != 0 {
			b.addCast(task, dst)
		}
	}
	k := len(b.chunks)
	b.chunks = append(b.chunks, C.ow_x16_chunk{
		src: C.uint64_t(b.base + uint64(task.Src)), dst: C.uint64_t(dst), stored: C.uint32_t(task.Chunk.Stored),
		logical: C.uint32_t(task.Chunk.Logical), tiles: C.uint16_t(task.Chunk.SegTiles), status: C.uint32_t(k),
	})
	b.owner = append(b.owner, b.at)
	segs := &b.pendingSegs[task.Chunk.Transform-1]
	for i := range n {
		*segs = append(*segs, C.ow_x16_seg{chunk: C.uint32_t(k), seg: C.uint32_t(i)})
	}
	b.used += need
	return true
}

// addRaw adds a raw chunk: by a kernel if that reads those bytes, else by a copy of its own.
func (b *pieceBuilder) addRaw(task *device.DecodeTask, scratch uint64) bool {
	if task.Cast.To != 0 {
		return b.addRawCast(task, scratch)
	}
	lo, hi := int64(task.Src), int64(task.Src)+int64(task.Chunk.Stored)
	if lo < b.lo || hi > b.hi {
		if len(b.copies)+3+int((hi-lo)/registerAlignment) > C.OWCU_COPIES-8 {
			return false
		}
		b.copies = appendCopies(b.copies, deviceAddress(task.Dst), unsafe.Pointer(&b.s.Memory()[lo]), hi-lo)
		return true
	}
	moves := b.splitIntoMoves(task, b.base+uint64(lo), uint64(uintptr(task.Dst)))
	need := tableBytesOfMoves(moves)
	if !b.tablesHaveSpace(need) {
		return false
	}
	b.addMoves(moves)
	b.used += need
	return true
}

// splitIntoMoves splits a task's bytes into moves: one, or for a view whole rows and a
// partial row at either end.
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

// addRawCast adds a raw chunk whose elements are cast from where the kernels read it, or
// from scratch if they are not aligned to their size there.
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
	if !b.tablesHaveSpace(need) {
		return false
	}
	if moves != nil {
		b.scratch = true
		b.inScr += (int64(task.Chunk.Logical) + 255) &^ 255
		b.addMoves(moves)
	}
	b.addCast(task, src)
	b.used += need
	return true
}

// placeInScratch returns the task's address in scratch. Earlier chunks there may
// have to be launched first.
func (b *pieceBuilder) placeInScratch(task *device.DecodeTask, scratch uint64) uint64 {
	if b.inScr+int64(task.Chunk.Logical) > scratchBytes {
		b.appendLaunches()
		b.inScr = 0
	}
	return scratch + uint64(b.inScr)
}

// tableBytesOfCast is how many bytes of tables a task's cast needs.
func tableBytesOfCast(task *device.DecodeTask) int {
	n := int(task.Chunk.Logical) / (task.Cast.From.Bits() / 8)
	return castSize + (n+C.OW_CAST_PART-1)/C.OW_CAST_PART*partSize
}

// addCast adds the cast of a task's elements at src.
func (b *pieceBuilder) addCast(task *device.DecodeTask, src uint64) {
	k := C.uint32_t(len(b.casts))
	n := int(task.Chunk.Logical) / (task.Cast.From.Bits() / 8)
	b.casts = append(b.casts, C.ow_cast{src: C.uint64_t(src), dst: C.uint64_t(uintptr(task.Dst)), n: C.uint64_t(n),
		from: castable[task.Cast.From], to: castable[task.Cast.To]})
	for p := range (n + C.OW_CAST_PART - 1) / C.OW_CAST_PART {
		b.cast = append(b.cast, C.ow_part{job: k, part: C.uint32_t(p)})
	}
}

func tableBytesOfMoves(moves []C.ow_move) (n int) {
	for i := range moves {
		n += moveSize + int(C.ow_move_parts(moves[i].width, moves[i].rows))*partSize
	}
	return n
}

// tablesHaveSpace reports whether n more bytes of tables fit.
func (b *pieceBuilder) tablesHaveSpace(n int) bool {
	// The launches of this batch and the next, that of the checksums, and the tables' rounding.
	return b.used+n+64 <= tableBytes && len(b.launches)+2*(len(b.pendingSegs)+2)+1 <= C.OWCU_LAUNCHES
}

func (b *pieceBuilder) addMoves(moves []C.ow_move) {
	for i := range moves {
		k := C.uint32_t(len(b.moves))
		b.moves = append(b.moves, moves[i])
		for p := range C.uint32_t(C.ow_move_parts(moves[i].width, moves[i].rows)) {
			b.moved = append(b.moved, C.ow_part{job: k, part: p})
		}
	}
}

// appendLaunches adds the launches of a batch: decode, then move, then cast.
func (b *pieceBuilder) appendLaunches() {
	for t := range b.pendingSegs {
		if n := len(b.pendingSegs[t]); n > 0 {
			b.launches = append(b.launches, launch{t, len(b.segs), n})
			b.segs = append(b.segs, b.pendingSegs[t]...)
			b.pendingSegs[t] = b.pendingSegs[t][:0]
		}
	}
	if n := len(b.moved); n > 0 {
		b.launches = append(b.launches, launch{kernelMove, len(b.parts), n})
		b.parts = append(b.parts, b.moved...)
		b.moved = b.moved[:0]
	}
	if n := len(b.cast); n > 0 {
		b.launches = append(b.launches, launch{kernelCast, len(b.parts), n})
		b.parts = append(b.parts, b.cast...)
		b.cast = b.cast[:0]
	}
}

// writeRound writes the round into the slot's pinned memory and its C struct.
func (b *pieceBuilder) writeRound() {
	slot := b.s
	head := unsafe.Add(slot.host, -headBytes)
	size := len(b.chunks)*chunkSize + len(b.moves)*moveSize + len(b.casts)*castSize + len(b.segs)*segSize +
		len(b.parts)*partSize + len(b.crcs)*crcSize
	size = (size + 15) &^ 15
	table := unsafe.Add(slot.host, -size)
	device := slot.dev - uint64(size)
	near := !slot.isReadInPlace() && len(b.runs) == 0
	if !near {
		// The kernels read the tables in host memory: a copy would wait for copies of other
		// queues, which occupy the link for milliseconds, or interrupt those of runs.
		device = uint64(slot.c.status) + headBytes - uint64(size)
	}
	if n := len(b.crcs); n > 0 {
		b.launches = append(b.launches, launch{kernelCRC, 0, n})
	}
	var at [6]int
	n := 0
	at[0], n = n, n+copyTable(table, n, b.chunks)
	at[1], n = n, n+copyTable(table, n, b.moves)
	at[2], n = n, n+copyTable(table, n, b.segs)
	at[3], n = n, n+copyTable(table, n, b.parts)
	at[4], n = n, n+copyTable(table, n, b.casts)
	at[5], _ = n, n+copyTable(table, n, b.crcs)
	clear(unsafe.Slice((*uint32)(head), len(b.chunks)))

	copies := slot.c.copies[:0]
	if size > 0 && near {
		upto := int64(0)
		if !b.staged && b.lo <= nearby && b.hi > b.lo && slot.view == nil {
			upto, b.staged = b.hi, true
		}
		copies = append(copies, C.struct_owcu_copy{dst: C.owcu_ptr(device), src: table,
			n: C.uint64_t(int64(size) + upto)})
		if !b.staged && b.hi > b.lo {
			b.staged = true
			copies = appendCopies(copies, C.owcu_ptr(slot.dev+uint64(b.lo)),
				unsafe.Pointer(&slot.Memory()[b.lo]), b.hi-b.lo)
		}
	}
	copies = append(copies, b.copies...)
	slot.c.early = C.uint32_t(len(b.copies))
	slot.c.ncopies = C.uint32_t(len(copies))
	slot.c.nlaunches = C.uint32_t(len(b.launches))
	for i, l := range b.launches {
		c := C.struct_owcu_launch{kernel: C.uint32_t(l.kernel), n: C.uint32_t(l.n)}
		switch l.kernel {
		case kernelMove:
			c.a, c.b = C.owcu_ptr(device+uint64(at[1])), C.owcu_ptr(device+uint64(at[3]+l.first*partSize))
		case kernelCast:
			c.a, c.b = C.owcu_ptr(device+uint64(at[4])), C.owcu_ptr(device+uint64(at[3]+l.first*partSize))
		case kernelCRC:
			c.a, c.b = C.owcu_ptr(device+uint64(at[5])), slot.c.status+C.owcu_ptr(4*len(b.chunks))
		default:
			c.a, c.b = C.owcu_ptr(device+uint64(at[0])), C.owcu_ptr(device+uint64(at[2]+l.first*segSize))
		}
		slot.c.launches[i] = c
	}
}

// appendCopies adds a copy from pinned memory, in as many pieces as it has seams.
func appendCopies(all []C.struct_owcu_copy, dst C.owcu_ptr, src unsafe.Pointer, n int64) []C.struct_owcu_copy {
	for n > 0 {
		k := min(n, registerAlignment-int64(uintptr(src)%uintptr(registerAlignment)))
		all = append(all, C.struct_owcu_copy{dst: dst, src: src, n: C.uint64_t(k)})
		dst, src, n = dst+C.owcu_ptr(k), unsafe.Add(src, k), n-k
	}
	return all
}

// copyTable copies a table to p+off and returns its length in bytes.
func copyTable[T any](p unsafe.Pointer, off int, table []T) int {
	copy(unsafe.Slice((*T)(unsafe.Add(p, off)), len(table)), table)
	return len(table) * int(unsafe.Sizeof(*new(T)))
}

// collectErrors turns the status words of a finished round into errors.
func (b *pieceBuilder) collectErrors() {
	words := unsafe.Slice((*uint32)(unsafe.Add(b.s.host, -headBytes)), len(b.chunks)+len(b.crcs))
	for i, w := range words[:len(b.chunks)] {
		if w != 0 {
			b.s.failures[b.owner[i]] = errs.New(errs.ErrCorrupt, "X16: %s", statusText(w))
		}
	}
	b.compareSums(words[len(b.chunks):])
}
