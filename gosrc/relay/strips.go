package relay

// This file has columns of plain tensors, which ranks copy from each other's memory
// straight to where they belong.

import (
	"slices"
	"unsafe"

	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/device/cuda"
	"github.com/overwire/overwire/gosrc/plan"
	"github.com/overwire/overwire/gosrc/tensor"
)

// A strip is bytes in the share of another rank that one copy of rows brings to a
// request's destination.
type strip struct {
	dst         unsafe.Pointer
	src         int64 // in the share
	pitch       int64 // from row to row of the share; those at the destination lie dense
	width, rows int64
	want        int32
	chunks      int32
	logical     int64 // bytes of the chunks
}

// rowBytesOfStrips finds the tensors whose columns are copied so: plain ones of which some
// rank needs columns, and no other name of them needs whole. It returns the bytes of
// their rows, and 0 for others.
func (r *Relay) rowBytesOfStrips(wants []plan.Want) []int64 {
	rows := make([]int64, len(r.model.Seen().Tensors))
	users := make([]int, len(rows))
	columns := map[int64]bool{} // tensors of which some rank needs columns
	for _, n := range r.spec.Needs {
		if n.Lo1 != 0 || n.Hi1 != plan.Whole {
			columns[n.Tensor] = true
		}
	}
	for i := range wants {
		users[wants[i].Data]++
		t := &r.model.Seen().Tensors[wants[i].Tensor]
		if columns[int64(wants[i].Tensor)] && t.Alias < 0 && t.Count == 0 && len(t.Shape) > 1 && t.Shape[0] > 0 &&
			t.Bytes%t.Shape[0] == 0 {
			if row := t.Bytes / t.Shape[0]; row > 0 && row <= plainChunkBytes {
				rows[wants[i].Data] = row
			}
		}
	}
	for data, n := range users {
		if n > 1 {
			rows[data] = 0
		}
	}
	return rows
}

// plainChunkSize is the size of the chunks of a plain tensor: whole rows where strips of
// them are copied.
func (r *Relay) plainChunkSize(data int32) int64 {
	if row := r.stripRowBytes[data]; row > 0 {
		return plainChunkBytes / row * row
	}
	return plainChunkBytes
}

// addStrip makes strips of a decode task whose chunk lies in another rank's share of a
// piece, joined with the last where both lie behind each other.
func (p *rankPart) addStrip(j *device.DecodeTask, off int64, want int32) {
	s := strip{dst: j.Dst, src: off, pitch: int64(j.Chunk.Logical), width: int64(j.Chunk.Logical), rows: 1, want: want,
		chunks: 1, logical: int64(j.Chunk.Logical)}
	if v := j.View; v != nil {
		first := max(v.At/v.Row, v.Row0)
		last := min((v.At+int64(j.Chunk.Logical))/v.Row, v.Row1)
		s.pitch, s.width, s.rows = v.Row, v.Col1-v.Col0, last-first
		s.dst = unsafe.Add(j.Dst, (first-v.Row0)*s.width)
		s.src += first*v.Row - v.At + v.Col0
	}
	if n := len(p.strips); n > 0 {
		q := &p.strips[n-1]
		if q.want == s.want && q.pitch == s.pitch && q.width == s.width && q.src+q.rows*q.pitch == s.src &&
			unsafe.Add(q.dst, q.rows*q.width) == s.dst {
			q.rows, q.chunks, q.logical = q.rows+s.rows, q.chunks+1, q.logical+s.logical
			return
		}
	}
	p.strips = append(p.strips, s)
}

// divertStrips takes the tasks of chunks that come as strips out of a plan, whose parts are
// `where`.
func (r *Relay) divertStrips(p *plan.Plan, where []int, wants []plan.Want) []int {
	if r.target.GPU == nil || !r.hasStrips() {
		return where
	}
	n := 0
	for i := range p.Tasks {
		data := wants[p.Refs[i].Want].Data
		if rank := where[i] % r.spec.Ranks; r.stripRowBytes[data] > 0 && rank != r.spec.Rank {
			place := r.placeOf(plan.ChunkOf{Data: data, N: p.Refs[i].N})
			r.parts[where[i]].addStrip(&p.Tasks[i], place.off%r.shareSpace(), p.Refs[i].Want)
			continue
		}
		p.Tasks[n], p.Refs[n], where[n] = p.Tasks[i], p.Refs[i], where[i]
		n++
	}
	p.Tasks, p.Refs = p.Tasks[:n], p.Refs[:n]
	return where[:n]
}

// pullStrips queues the copies of a rank's strips of a piece.
func (r *Relay) pullStrips(piece, from int) error {
	c, p := r.carrier, r.partOf(piece, from)
	share := r.ownersShareAt(piece, from)
	for i := range p.strips {
		s := &p.strips[i]
		at := unsafe.Add(share, s.src)
		err := r.target.GPU.CopyRows(cuda.Order{Stream: c.streams[from]}, uint64(uintptr(s.dst)), uint64(s.width),
			uint64(uintptr(at)), uint64(s.pitch), s.width, s.rows)
		if err != nil {
			return err
		}
		r.pulled.Add(s.width * s.rows)
	}
	return nil
}

// landStrips counts the strips of shares of a piece, whose copies have ended.
func (r *Relay) landStrips(piece, firstRank, endRank int) {
	for rank := firstRank; rank < endRank; rank++ {
		for _, s := range r.partOf(piece, rank).strips {
			r.countChunks(s.want, s.chunks, s.logical)
		}
	}
}

// isCopiedAsStrips reports whether columns of a chunk are copied.
func (r *Relay) isCopiedAsStrips(c plan.ChunkOf) bool { return r.stripRowBytes[c.Data] > 0 }

// hasStrips reports whether columns of any tensor are copied.
func (r *Relay) hasStrips() bool {
	return slices.ContainsFunc(r.stripRowBytes, func(row int64) bool { return row > 0 })
}

// chunkPlainTensor cuts a plain tensor into raw chunks without checksums, behind chunks.
func chunkPlainTensor(chunks []tensor.Chunk, t *tensor.Tensor, size int64) []tensor.Chunk {
	t.First, t.ChunkBytes, t.Parts = int32(len(chunks)), uint32(size), 1
	chunks = slices.Grow(chunks, int((t.Bytes+size-1)/size))
	for at := int64(0); at < t.Bytes; at += size {
		n := uint32(min(size, t.Bytes-at))
		chunks = append(chunks, tensor.Chunk{Off: t.Off + at, Stored: n, Logical: n, Codec: tensor.CodecRaw})
	}
	t.Count = int32(len(chunks)) - t.First
	return chunks
}
