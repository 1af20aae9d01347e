package bitstream

import (
	"encoding/binary"
	"hash/crc32"
	"slices"

	"github.com/overwire/overwire/gosrc/internal/crc"
)

// Checksums of Native streams, as nvCOMP 6 computes them; found by what it wrote
// of small inputs. They are CRC-32 (IEEE) of lines of 32 bytes that 32 lanes
// work on at once, put together with lengths that fit whole rounds only:
//
//	chunk   lines are those of the memory it lies in, at multiples of 32; what
//	        stands before the first belongs to it. Lane j has lines j, j+32, ...
//	        one behind the other. The lanes' sums are combined as if each, but
//	        the first, had as many bytes as whole rounds give. What stands
//	        behind the last line goes on from there. Without a line: CRC-32.
//	header  everything before the payload, with the sum itself zero. There are as
//	        many threads as make up blocks of 1024 bytes, and line i of them is
//	        combined as if (threads-1-i) * L bytes followed, where L is the
//	        bytes of all by threads, rounded down. What stands behind the last
//	        line is xored as a sum of its own. This held up to 7,272 bytes; from
//	        8 KiB on it is not compared.
//
// A stored chunk lies where it stands in the stream, and a chunk's content in the
// content, if nvCOMP allocated that. What lay elsewhere on the GPU has the sums of
// there, which nvCOMP itself refuses: they are taken as well. Contents of chunks
// that begin at no multiple of 32 of the content are not compared: of their sums
// some are as told above and some are not.
const (
	lineBytes = 32
	lanes     = 32
)

// sumKind says what the checksums of a stream are.
type sumKind uint8

const (
	sumNone  sumKind = iota
	sumCRC           // plain CRC-32: ours, behind the mark 'w'
	sumLanes         // nvCOMP 6's
)

// of is the checksum of bytes that stand at a place of a stream or content.
func (k sumKind) of(p []byte, at int64) uint32 {
	if k == sumLanes {
		return laneSum(p, int(at%lineBytes))
	}
	return crc32.ChecksumIEEE(p)
}

// holds says whether a sum is that of a chunk's content.
func (k sumKind) holds(p []byte, at int64, sum uint32) bool {
	if k != sumLanes {
		return k.of(p, at) == sum
	}
	if at%lineBytes != 0 {
		return true
	}
	for shift := range lineBytes {
		if laneSum(p, shift) == sum {
			return true
		}
	}
	return false
}

// laneSum is nvCOMP's checksum of a chunk that lies `at` bytes behind a multiple
// of 32.
func laneSum(p []byte, at int) uint32 {
	front := -at & (lineBytes - 1)
	lines := (len(p) - front) / lineBytes
	if len(p) < front || lines < 1 {
		return crc32.ChecksumIEEE(p)
	}
	end := front + lines*lineBytes
	power := crc.Power(uint64(lines / lanes * lineBytes * 8))
	var sum uint32
	for lane := range min(lanes, lines) {
		var c uint32
		if lane == 0 {
			c = crc32.ChecksumIEEE(p[:front])
		}
		for from := front + lane*lineBytes; from < end; from += lanes * lineBytes {
			c = crc32.Update(c, crc32.IEEETable, p[from:from+lineBytes])
		}
		sum = crc.Times(power, sum) ^ c
	}
	return crc32.Update(sum, crc32.IEEETable, p[end:])
}

// headSum is nvCOMP's checksum of everything before the payload.
func headSum(p []byte) uint32 {
	head := slices.Clone(p)
	binary.LittleEndian.PutUint32(head[headSumAt:], 0)
	lines := len(head) / lineBytes
	threads := (len(head) + lanes*lineBytes - 1) / (lanes * lineBytes) * lanes
	power := crc.Power(uint64(len(head) / threads * 8))
	var sum uint32
	for line := range threads {
		sum = crc.Times(power, sum)
		if line < lines {
			sum ^= crc32.ChecksumIEEE(head[line*lineBytes:][:lineBytes])
		}
	}
	return sum ^ crc32.ChecksumIEEE(head[lines*lineBytes:])
}

// headKnown is the most bytes before a payload whose checksum is compared.
const headKnown = 8 << 10

// headSumAt is where a header of version 6 has its checksum.
const headSumAt = 48

// sumsOf is what is written into streams of a version.
func sumsOf(version int) sumKind {
	if version == 6 {
		return sumLanes
	}
	return sumCRC
}
