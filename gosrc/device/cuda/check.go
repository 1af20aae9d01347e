package cuda

/*
#include "../../../cuda/abi_crc.h"
*/
import "C"

import (
	"errors"
	"hash/crc32"
	"sync"
	"unsafe"

	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/tensor"
)

// This file compares the checksums of stored bytes where the device has them: its
// kernel sums parts of the chunks (cuda/crc.cuh), and the host adds these up.

const (
	crcPoly = 0x82f63b78 // CRC-32C's polynomial; the lowest bit of a word is its highest power of x
	crcOne  = 0x80000000
	crcSize = int(unsafe.Sizeof(C.ow_crc_part{}))
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// A summedChunk is a chunk of a round whose checksum is compared. Its parts end where those
// of the next one begin.
type summedChunk struct {
	slot         *Slot
	task, first  int
	stored, want uint32
}

// multiplyCRC is the product of two polynomials.
func multiplyCRC(a, b uint32) (p uint32) {
	for ; a != 0; a <<= 1 {
		if a&crcOne != 0 {
			p ^= b
		}
		b = b>>1 ^ crcPoly&-(b&1)
	}
	return p
}

// crcPowers are powers of x.
type crcPowers struct {
	bytes [C.OW_CRC_PART]uint32                             // [n]: x^(8 n)
	parts [4][tensor.MaxChunkBytes/C.OW_CRC_PART + 1]uint32 // [k][n]: x^(8 n OW_CRC_PART - 8 k)
}

var powers = sync.OnceValue(func() *crcPowers {
	table := &crcPowers{}
	v := uint32(crcOne)
	for n := range table.bytes {
		table.bytes[n] = v
		v = multiplyCRC(crcOne>>8, v)
	}
	part := v
	v = crcOne
	for n := range table.parts[0] {
		table.parts[0][n] = v
		v = multiplyCRC(part, v)
	}
	for k := range table.parts[1:] {
		for n, v := range table.parts[k] {
			for range 8 { // divided by x
				v = (v^crcPoly&-(v>>31))<<1 | v>>31
			}
			table.parts[k+1][n] = v
		}
	}
	return table
})

// CanCheck reports whether Submit compares checksums: where the bytes are copied to the
// device. From a coherent device's slots the kernels would read them twice.
func (q *Queue) CanCheck() bool { return !q.inPlace }

// CheckOnSubmit makes the slot's next Submit compare the checksums of its tasks that have one.
func (s *Slot) CheckOnSubmit() { s.checks = true }

// SumOnly makes the slot's next Submit only compare the checksums of its tasks, whose bytes are in
// device memory (ViewDevice): it writes nothing to their destinations.
func (s *Slot) SumOnly() { s.sumOnly = true }

// comparesSum is whether the device compares a task's checksum.
func (b *pieceBuilder) comparesSum(task *device.DecodeTask) bool {
	return b.s.sumOnly || b.s.checks && task.Summed && !b.s.isReadInPlace()
}

// countCRCParts is into how many parts a task's chunk is cut.
func countCRCParts(task *device.DecodeTask) int {
	return (int(task.Chunk.Stored) + C.OW_CRC_PART - 1) / C.OW_CRC_PART
}

// addSumParts adds the parts of the next task's chunk. They are cut from its end on, so that they
// have whole parts behind them.
func (b *pieceBuilder) addSumParts(task *device.DecodeTask) {
	lo, n := int64(task.Src), uint64(task.Chunk.Stored)
	at := uint64(uintptr(task.Dst)) // copied straight there
	if lo >= b.lo && lo+int64(n) <= b.hi {
		at = b.base + uint64(lo)
	}
	b.sums = append(b.sums, summedChunk{b.s, b.at, len(b.crcs), task.Chunk.Stored, task.Chunk.Sum})
	behind := &powers().parts[-(at+n)&3]
	for k, end := 0, n; end > 0; k++ {
		size := min(end, C.OW_CRC_PART)
		end -= size
		b.crcs = append(b.crcs, C.ow_crc_part{src: C.uint64_t(at + end), bytes: C.uint32_t(size),
			behind: C.uint32_t(behind[k])})
	}
}

// reserveForSum reports whether the parts of a task's chunk fit, beside a word of its own, and
// reserves their space in the tables.
func (b *pieceBuilder) reserveForSum(task *device.DecodeTask) bool {
	n := countCRCParts(task)
	if !b.tablesHaveSpace(n*crcSize) || len(b.chunks)+len(b.crcs)+n >= maxWords {
		return false
	}
	b.used += n * crcSize
	return true
}

// compareSums turns the words of a round's parts into errors.
func (b *pieceBuilder) compareSums(words []uint32) {
	for i, c := range b.sums {
		end := len(words)
		if i+1 < len(b.sums) {
			end = b.sums[i+1].first
		}
		// A CRC begins with ones, which the bytes move on, and its bits are inverted.
		pow := powers()
		sum := ^multiplyCRC(^uint32(0), multiplyCRC(pow.bytes[c.stored%C.OW_CRC_PART],
			pow.parts[0][c.stored/C.OW_CRC_PART]))
		for _, w := range words[c.first:end] {
			sum ^= w
		}
		if sum != c.want {
			c.slot.failures[c.task] = errs.NewMismatch(c.want, sum)
		}
	}
}

// explainBadChunk is err, which says that stored bytes are no chunk, or that they are not those
// that were written.
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
