package plan

// This file plans reads of stored bytes.

import (
	"unsafe"

	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/tensor"
)

// A Spot is where a stored chunk goes. Data is the tensor that contains it, N its
// number there; Bare: it has no checksum. A piece has spots of one group only.
type Spot struct {
	Data, N int32
	Group   int32
	Bare    bool
	Dst     unsafe.Pointer
}

// PlanStored plans how to read chunks to their spots as they are stored: checksums are
// compared, and nothing is decoded. Each spot has a want of its own. Spots are in
// the order of their sources and offsets, and of groups.
func PlanStored(ix *tensor.Index, spots []Spot, lim Limits) (*Plan, []Want) {
	wants := make([]Want, len(spots))
	m := newMaker(ix, wants, len(spots), lim)
	m.p.Pieces = make([]Piece, 0, len(spots))
	begin := 0
	for i := range spots {
		s := &spots[i]
		if s.Group != spots[begin].Group {
			m.joinIntoPieces(begin, i)
			begin = i
		}
		t := &ix.Tensors[s.Data]
		c := ix.Chunks[int64(t.First)+int64(s.N)]
		c.Logical, c.Codec, c.Transform, c.SegTiles = c.Stored, tensor.CodecRaw, 0, 0
		n := int64(c.Stored)
		wants[i] = Want{Tensor: s.Data, Data: s.Data, Bytes: n}
		number := s.N
		if s.Bare {
			number = -1
		}
		m.add(int32(i), number, t.Source, c.Off, n >= inPlaceMin, device.DecodeTask{Chunk: c, Dst: s.Dst})
	}
	m.joinIntoPieces(begin, len(spots))
	m.splitPieces()
	return m.p, wants
}
