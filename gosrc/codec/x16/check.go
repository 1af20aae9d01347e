package x16

import (
	"encoding/binary"

	"github.com/overwire/overwire/gosrc/tensor"
)

// room stands for destinations that are only measured, never touched: it costs
// addresses, not memory.
var room [tensor.MaxChunkBytes]byte

// Check does what Decode does before it decodes a word: it checks the header,
// the table, the directory and the segments' first states of a chunk of c, so
// that a GPU is never given tables that make no sense. Any error is
// fault.ErrCorrupt. It is safe for concurrent use.
func Check(src []byte, c tensor.Chunk) error {
	if c.Logical > tensor.MaxChunkBytes || uint64(len(src)) != uint64(c.Stored) {
		return corrupt("chunk of %d -> %d bytes in %d", c.Stored, c.Logical, len(src))
	}
	d := decoders.Get().(*decoder)
	defer decoders.Put(d)
	err := d.parse(room[:c.Logical:c.Logical], src, c.Transform, c.SegTiles)
	d.dst = nil
	for seg := 0; err == nil && seg < d.segs; seg++ {
		at := d.offset(seg)
		low := ^uint32(0)
		for l := range lanes {
			low = min(low, binary.LittleEndian.Uint32(src[at+4*l:]))
		}
		if low < start {
			err = corrupt("segment %d begins with state %d", seg, low)
		}
	}
	d.src = nil
	return err
}

// Segments is how many segments a chunk of c has, the work items of a GPU: at
// least one, whose warp copies the tail. The chunk has passed Check.
func Segments(c tensor.Chunk) int {
	tiles := int(c.Logical) * 8 / forms[c.Transform].bits / tileSyms
	return max(1, (tiles+int(c.SegTiles)-1)/int(c.SegTiles))
}
