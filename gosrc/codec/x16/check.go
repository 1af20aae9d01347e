package x16

// Checks chunks before a GPU decodes them.

import (
	"encoding/binary"

	"github.com/overwire/overwire/gosrc/tensor"
)

// target stands for a destination that is measured but never touched: it takes addresses, not memory.
var target [tensor.MaxChunkBytes]byte

// Check checks everything that Decode checks before it decodes a word: the header, the table, the directory and
// the segments' first states of a chunk of c. So a GPU never gets inconsistent tables. Any error is
// errs.ErrCorrupt. It is safe for concurrent use.
func Check(src []byte, c tensor.Chunk) error {
	if c.Logical > tensor.MaxChunkBytes || uint64(len(src)) != uint64(c.Stored) {
		return corruptError("a chunk of %d -> %d bytes got a buffer of %d bytes", c.Stored, c.Logical, len(src))
	}
	d := decoders.Get().(*decoder)
	defer decoders.Put(d)
	err := d.parseChunk(target[:c.Logical:c.Logical], src, c.Transform, c.SegTiles)
	d.dst = nil
	for seg := 0; err == nil && seg < d.segs; seg++ {
		at := d.segmentOffset(seg)
		low := ^uint32(0)
		for l := range lanes {
			low = min(low, binary.LittleEndian.Uint32(src[at+4*l:]))
		}
		if low < start {
			err = corruptError("segment %d begins with state %d", seg, low)
		}
	}
	d.src = nil
	return err
}

// Segments returns the number of segments of a chunk of c, which are the work items of a GPU. It is at least one,
// because a warp must copy the tail. The chunk must have passed Check.
func Segments(c tensor.Chunk) int {
	tiles := int(c.Logical) * 8 / forms[c.Transform].bits / tileSyms
	return max(1, (tiles+int(c.SegTiles)-1)/int(c.SegTiles))
}
