package plan

// This file plans reads of chunks in stored form.

import (
	"unsafe"

	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/tensor"
)

// A ChunkRead is a stored chunk to read, and its destination. Data is the tensor that contains the chunk, and N the
// chunk's number there. Bare means that it has no checksum. All reads of a piece are of the same group.
type ChunkRead struct {
	Data, N int32
	Group   int32
	Bare    bool
	Dst     unsafe.Pointer
}

// PlanStored plans how to read chunks to their destinations in stored form, without decoding them. The pipeline
// compares their checksums, except if lim.Cut leaves that to the caller. There is one want per read. Reads must be
// ordered by group, then by source and offset.
func PlanStored(ix *tensor.Index, reads []ChunkRead, lim Limits) (*Plan, []Want) {
	wants := make([]Want, len(reads))
	m := newMaker(ix, wants, len(reads), lim)
	m.p.Pieces = make([]Piece, 0, len(reads))
	group, begin := int32(0), 0
	var growing Piece
	for i := range reads {
		s := &reads[i]
		if s.Group != group {
			m.joinIntoPieces(begin, len(m.pos))
			group, begin, growing = s.Group, len(m.pos), Piece{}
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
		if lim.Cut {
			m.addCutTasks(&growing, int32(i), number, t.Source, device.DecodeTask{Chunk: c, Dst: s.Dst})
			continue
		}
		m.add(int32(i), number, t.Source, c.Off, n >= inPlaceMin, device.DecodeTask{Chunk: c, Dst: s.Dst})
	}
	m.joinIntoPieces(begin, len(m.pos))
	m.splitPieces()
	return m.p, wants
}

// pageBytes aligns the ends of pieces that cut chunks, so that the next read begins on a page boundary.
const pageBytes = 4096

// addCutTasks adds a task for each part of a chunk, which is cut where pieces end. All pieces of a contiguous run
// except the last have almost lim.Piece bytes. growing predicts the last piece that joinIntoPieces will make.
func (m *maker) addCutTasks(growing *Piece, want, number, source int32, task device.DecodeTask) {
	begin := task.Chunk.Off
	for off, end := begin, begin+int64(task.Chunk.Stored); off < end; {
		n := min(end, m.endOfPiece(growing, source, off)) - off
		growing.Len = off + n - growing.Off
		task.Chunk.Off, task.Chunk.Stored, task.Chunk.Logical = off, uint32(n), uint32(n)
		m.add(want, number, source, off, false, task)
		m.p.Tasks[len(m.p.Tasks)-1].Summed = false
		task.Dst = unsafe.Add(task.Dst, n)
		off += n
	}
}

// endOfPiece returns the largest possible end of the piece that will contain the byte at off. If that byte does not fit
// in the growing piece, growing becomes the next piece.
func (m *maker) endOfPiece(growing *Piece, source int32, off int64) int64 {
	p := growing
	if p.Len == 0 || p.Source != source || off < p.Off || off-(p.Off+p.Len) > m.lim.Gap || off >= m.endOf(p) {
		*p = Piece{Source: source, Off: m.alignDown(off)}
	}
	return m.endOf(p)
}

// endOf returns the largest possible end of a piece. It may be inside a chunk.
func (m *maker) endOf(p *Piece) int64 {
	end := p.Off + m.lim.Piece
	if pages := end &^ (pageBytes - 1); pages > p.Off {
		return pages
	}
	return end
}
