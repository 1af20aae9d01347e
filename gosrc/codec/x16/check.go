package x16

// Checks chunks before they are decoded on a GPU.

import (
	"encoding/binary"

	"github.com/overwire/overwire/gosrc/tensor"
)

// target is a placeholder for a destination: Check only uses its length and never touches its memory.
var target [tensor.MaxChunkBytes]byte

// Check checks everything that Decode checks before it decodes words: the header, the table, the directory and the
// initial states of the segments. This ensures that a GPU never gets inconsistent tables. c is the chunk's record.
// Any error is errs.ErrCorrupt. It is safe for concurrent use.
func Check(src []byte, c tensor.Chunk) error {
	if c.Logical > tensor.MaxChunkBytes || uint64(len(src)) != uint64(c.Stored) {
		return corruptError("a chunk with %d stored and %d logical bytes got a buffer of %d bytes",
			c.Stored, c.Logical, len(src))
	}
	d := decoders.Get().(*decoder)
	defer decoders.Put(d)
	err := d.chunk.parse(target[:c.Logical:c.Logical], src, c.Transform, c.SegTiles)
	d.chunk.dst = nil
	for seg := 0; err == nil && seg < d.chunk.segs; seg++ {
		at := d.chunk.segmentOffset(seg)
		low := ^uint32(0)
		for l := range lanes {
			low = min(low, binary.LittleEndian.Uint32(src[at+4*l:]))
		}
		if low < start {
			err = corruptError("segment %d begins with state %d, expected at least 65536", seg, low)
		}
	}
	d.chunk.src = nil
	return err
}

// Segments returns the number of segments of a chunk, which are the work items of a GPU. It is at least 1, because
// one warp must copy the tail. The chunk must have passed Check.
func Segments(c tensor.Chunk) int {
	tiles := int(c.Logical) * 8 / forms[c.Transform].bits / tileSyms
	return max(1, (tiles+int(c.SegTiles)-1)/int(c.SegTiles))
}
