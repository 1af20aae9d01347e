package queue

/*
#include "queue.h"
#include "../../../../cuda/abi.h"
#include "../../../../cuda/abi_crc.h"
#include "../../../../cuda/abi_move.h"
*/
import "C"

import (
	"unsafe"

	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/device/cuda/driver"
	"github.com/overwire/overwire/gosrc/device/cuda/memory"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/sizes"
	"github.com/overwire/overwire/gosrc/tensor"
)

const (
	chunkSize = int(unsafe.Sizeof(C.ow_x16_chunk{}))
	segSize   = int(unsafe.Sizeof(C.ow_x16_seg{}))
	moveSize  = int(unsafe.Sizeof(C.ow_move{}))
	castSize  = int(unsafe.Sizeof(C.ow_cast{}))
	partSize  = int(unsafe.Sizeof(C.ow_part{}))
	crcSize   = int(unsafe.Sizeof(C.ow_crc_part{}))
)

// tables holds the work of a round's kernels, and their launches.
type tables struct {
	used     int // bytes
	chunks   []C.ow_x16_chunk
	owner    []int // task number of each chunk
	moves    []C.ow_move
	casts    []C.ow_cast
	segs     []C.ow_x16_seg
	parts    []C.ow_part
	crcs     []C.ow_crc_part
	sums     []summedChunk
	launches []launch

	// The batch being filled: segments by transform, moves, and casts, of chunks that fit in scratch memory together.
	pendingSegs [8][]C.ow_x16_seg
	moved       []C.ow_part
	cast        []C.ow_part
}

// A launch is a kernel and its items, which are in segs, in parts for moves and casts, or in crcs for checksums.
type launch struct{ kernel, first, n int }

// A summedChunk is a chunk of a round whose checksum is compared. Its parts end where the next one's parts begin.
type summedChunk struct {
	slot         *Slot
	task, first  int
	stored, want uint32
}

// reset empties the tables for a new round.
func (t *tables) reset() {
	t.used, t.launches = 0, t.launches[:0]
	t.chunks, t.owner, t.moves, t.segs, t.parts = t.chunks[:0], t.owner[:0], t.moves[:0], t.segs[:0], t.parts[:0]
	t.casts, t.crcs, t.sums = t.casts[:0], t.crcs[:0], t.sums[:0]
}

// haveSpace reports whether n more bytes of tables fit.
func (t *tables) haveSpace(n int) bool {
	// The sums count the launches of this batch and the next, the launch for checksums, and the rounding of the tables.
	return t.used+n+64 <= tableBytes && len(t.launches)+2*(len(t.pendingSegs)+2)+1 <= C.OWCU_LAUNCHES
}

// haveWords reports whether n more status words fit.
func (t *tables) haveWords(n int) bool { return len(t.chunks)+len(t.crcs)+n <= MaxWords }

// addChunk adds an X16 chunk with n segments at src, to be decoded to dst.
func (t *tables) addChunk(owner int, chunk *tensor.Chunk, src, dst uint64, n int) {
	k := len(t.chunks)
	t.chunks = append(t.chunks, C.ow_x16_chunk{
		src: C.uint64_t(src), dst: C.uint64_t(dst), stored: C.uint32_t(chunk.Stored),
		logical: C.uint32_t(chunk.Logical), tiles: C.uint16_t(chunk.SegTiles), status: C.uint32_t(k),
	})
	t.owner = append(t.owner, owner)
	segs := &t.pendingSegs[chunk.Transform-1]
	for i := range n {
		*segs = append(*segs, C.ow_x16_seg{chunk: C.uint32_t(k), seg: C.uint32_t(i)})
	}
}

// countCastParts returns the elements of a task's cast, and the number of parts that it is cut into.
func countCastParts(task *device.DecodeTask) (elements, parts int) {
	n := int(task.Chunk.Logical) / (task.Cast.From.Bits() / 8)
	return n, sizes.CeilDiv(n, C.OW_CAST_PART)
}

// tableBytesOfCast returns how many bytes of tables a task's cast needs.
func tableBytesOfCast(task *device.DecodeTask) int {
	_, parts := countCastParts(task)
	return castSize + parts*partSize
}

// addCast adds the cast of a task's elements at src.
func (t *tables) addCast(task *device.DecodeTask, src uint64) {
	k := C.uint32_t(len(t.casts))
	n, parts := countCastParts(task)
	t.casts = append(t.casts, C.ow_cast{src: C.uint64_t(src), dst: C.uint64_t(uintptr(task.Dst)), n: C.uint64_t(n),
		from: castable[task.Cast.From], to: castable[task.Cast.To]})
	for p := range parts {
		t.cast = append(t.cast, C.ow_part{job: k, part: C.uint32_t(p)})
	}
}

func tableBytesOfMoves(moves []C.ow_move) (n int) {
	for i := range moves {
		n += moveSize + int(C.ow_move_parts(moves[i].width, moves[i].rows))*partSize
	}
	return n
}

func (t *tables) addMoves(moves []C.ow_move) {
	for i := range moves {
		k := C.uint32_t(len(t.moves))
		t.moves = append(t.moves, moves[i])
		for p := range C.uint32_t(C.ow_move_parts(moves[i].width, moves[i].rows)) {
			t.moved = append(t.moved, C.ow_part{job: k, part: p})
		}
	}
}

// reserveForSum reserves space for the parts of a task's chunk and a status word for each. It reports whether they fit.
func (t *tables) reserveForSum(task *device.DecodeTask) bool {
	n := sizes.CeilDiv(int(task.Chunk.Stored), C.OW_CRC_PART)
	if !t.haveSpace(n*crcSize) || !t.haveWords(n+1) {
		return false
	}
	t.used += n * crcSize
	return true
}

// addSumParts adds the parts of a task's chunk, which is at device address `at`. Parts are cut from the end of the
// chunk, so that each one is followed only by whole parts.
func (t *tables) addSumParts(slot *Slot, index int, task *device.DecodeTask, at uint64) {
	n := uint64(task.Chunk.Stored)
	t.sums = append(t.sums, summedChunk{slot, index, len(t.crcs), task.Chunk.Stored, task.Chunk.Sum})
	behind := &powers().parts[-(at+n)&3]
	for k, end := 0, n; end > 0; k++ {
		size := min(end, C.OW_CRC_PART)
		end -= size
		t.crcs = append(t.crcs, C.ow_crc_part{src: C.uint64_t(at + end), bytes: C.uint32_t(size),
			behind: C.uint32_t(behind[k])})
	}
}

// appendLaunches adds the launches of the batch: decode, then move, then cast.
func (t *tables) appendLaunches() {
	for k := range t.pendingSegs {
		if n := len(t.pendingSegs[k]); n > 0 {
			t.launches = append(t.launches, launch{k, len(t.segs), n})
			t.segs = append(t.segs, t.pendingSegs[k]...)
			t.pendingSegs[k] = t.pendingSegs[k][:0]
		}
	}
	t.moved = t.appendParts(kernelMove, t.moved)
	t.cast = t.appendParts(kernelCast, t.cast)
}

// appendParts adds a launch of parts, and returns the emptied slice.
func (t *tables) appendParts(kernel int, parts []C.ow_part) []C.ow_part {
	if n := len(parts); n > 0 {
		t.launches = append(t.launches, launch{kernel, len(t.parts), n})
		t.parts = append(t.parts, parts...)
	}
	return parts[:0]
}

// size returns the size of the tables in bytes, rounded up so that the bytes after them are aligned.
func (t *tables) size() int {
	return sizes.RoundUp(len(t.chunks)*chunkSize+len(t.moves)*moveSize+len(t.casts)*castSize+len(t.segs)*segSize+
		len(t.parts)*partSize+len(t.crcs)*crcSize, 16)
}

// write writes the tables, which kernels read at dev, and the slot's launches. head is the address of the slot's status
// words.
func (t *tables) write(table, head unsafe.Pointer, dev uint64, slot *C.struct_owcu_slot) {
	if n := len(t.crcs); n > 0 {
		t.launches = append(t.launches, launch{kernelCRC, 0, n})
	}
	n := memory.CopyTable(table, 0, t.chunks)
	moves := n
	n += memory.CopyTable(table, n, t.moves)
	segs := n
	n += memory.CopyTable(table, n, t.segs)
	parts := n
	n += memory.CopyTable(table, n, t.parts)
	casts := n
	n += memory.CopyTable(table, n, t.casts)
	crcs := n
	memory.CopyTable(table, n, t.crcs)
	clear(unsafe.Slice((*uint32)(head), len(t.chunks)))
	slot.nlaunches = C.uint32_t(len(t.launches))
	at := func(offset int) C.owcu_ptr { return C.owcu_ptr(dev + uint64(offset)) }
	for i, l := range t.launches {
		c := C.struct_owcu_launch{kernel: C.uint32_t(l.kernel), n: C.uint32_t(l.n)}
		switch l.kernel {
		case kernelMove:
			c.a, c.b = at(moves), at(parts+l.first*partSize)
		case kernelCast:
			c.a, c.b = at(casts), at(parts+l.first*partSize)
		case kernelCRC:
			c.a, c.b = at(crcs), slot.status+C.owcu_ptr(4*len(t.chunks))
		default:
			c.a, c.b = at(0), at(segs+l.first*segSize)
		}
		slot.launches[i] = c
	}
}

// collectErrors converts the status words of a finished round to errors of the slot's tasks.
func (t *tables) collectErrors(s *Slot) {
	words := unsafe.Slice((*uint32)(unsafe.Add(s.mem.host, -headBytes)), len(t.chunks)+len(t.crcs))
	for i, w := range words[:len(t.chunks)] {
		if w != 0 {
			s.result.failures[t.owner[i]] = errs.New(errs.ErrCorrupt, "X16: %s", driver.StatusText(w))
		}
	}
	words = words[len(t.chunks):]
	for i, c := range t.sums {
		end := len(words)
		if i+1 < len(t.sums) {
			end = t.sums[i+1].first
		}
		sum := crcOfZeros(c.stored)
		for _, w := range words[c.first:end] {
			sum ^= w
		}
		if sum != c.want {
			c.slot.result.failures[c.task] = errs.NewMismatch(c.want, sum)
		}
	}
}
