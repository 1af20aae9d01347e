// Package plan computes, from an index and the wanted tensors, which bytes to read and how to decode them. It uses no
// I/O, clock, goroutines or randomness.
package plan

import (
	"cmp"
	"math"
	"slices"
	"sort"
	"unsafe"

	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/tensor"
)

// Whole, as Hi0 or Hi1 of a Request, means to the end of the dimension.
const Whole = -1

// A Request asks for a tensor, or for rows [Lo0, Hi0) of dim 0 and [Lo1, Hi1) of dim 1. Dest, if not 0, is the
// caller's memory for exactly the requested bytes. It must stay valid until the load has ended. Python passes a
// Request as six int64 in this order.
type Request struct {
	Tensor             int64
	Dest               uintptr
	Lo0, Hi0, Lo1, Hi1 int64
}

// A Want is a checked Request.
type Want struct {
	Tensor int32   // the requested tensor
	Data   int32   // the tensor that holds the bytes: Tensor, or the target of its Alias
	Shape  []int64 // shape at the destination
	Bytes  int64

	rowBytes               int64 // bytes of a row of the whole tensor, as a matrix with dim 0 as rows
	row0, row1, col0, col1 int64 // requested rows and byte columns
}

// Limits are the limits that the machine and the user set.
type Limits struct {
	Piece int64 // maximum bytes of one read
	Gap   int64 // gaps of up to this many bytes are read, because skipping them takes longer
	Share int64 // minimum bytes of a piece that a worker gets; 0 means one worker per piece
	// Align, if over 1, is a power of two. Pieces begin and end at multiples of it unless the file ends first.
	// Sources that read whole blocks then need no extra copy.
	Align int64
	// InPlace allows runs of raw bytes to be read directly to their destination, which must be host memory.
	InPlace bool
	// Cut allows pieces of PlanStored to end inside a stored chunk. The caller compares the checksum of a chunk
	// when all of its bytes have been read.
	Cut bool
}

// A Piece is one contiguous read for Tasks[First:First+Count]. If InPlace is set, the bytes are read directly to
// their destination. The piece then has one task, and that task is raw.
type Piece struct {
	Source       int32
	First, Count int32
	Off, Len     int64
	InPlace      unsafe.Pointer
}

// A Share is one worker's part of a piece. The worker reads bytes [From, To) of the piece and compares the
// checksums of Tasks[First:First+Count], which lie entirely in that range.
type Share struct {
	Piece        int32
	First, Count int32
	From, To     int64
}

// A Ref names the want that a decode task serves. N is the chunk's number in its tensor, or -1 for the bytes of a
// plain tensor, which have no checksum.
type Ref struct{ Want, N int32 }

// A Plan is the input of a pipeline.
type Plan struct {
	Pieces []Piece
	Shares []Share // in the order of the pieces; every byte of a piece is in one share
	Tasks  []device.DecodeTask
	Refs   []Ref   // indexed by task
	Left   []int32 // indexed by want: number of tasks; a want without tasks is already complete
	Slot   int64   // bytes of the largest piece that needs a slot
	Read   int64   // bytes of all pieces
}

// Check validates requests against an index and returns their wants.
func Check(ix *tensor.Index, reqs []Request) ([]Want, error) {
	wants := make([]Want, len(reqs))
	for i, r := range reqs {
		if r.Tensor < 0 || r.Tensor >= int64(len(ix.Tensors)) {
			return nil, errs.New(errs.ErrArgument, "request %d: invalid tensor number %d: the model has %d tensors",
				i, r.Tensor, len(ix.Tensors))
		}
		if err := wants[i].set(ix, int32(r.Tensor), r); err != nil {
			return nil, &errs.At{Verb: "plan", Source: ix.Sources[ix.Tensors[r.Tensor].Source].URI,
				Tensor: ix.Tensors[r.Tensor].Name, Chunk: -1, Offset: -1, Err: err}
		}
	}
	return wants, nil
}

func (w *Want) set(ix *tensor.Index, n int32, r Request) error {
	t := &ix.Tensors[n]
	w.Tensor, w.Data = n, n
	if t.Alias >= 0 {
		w.Data = t.Alias
		// Package unpack presents such aliases as plain tensors.
		if to := &ix.Tensors[w.Data]; to.Parts > 1 && to.RowBits() != t.RowBits() {
			return errs.New(errs.ErrEngine, "the alias has shape %v, but %q is stored in column parts of shape %v",
				t.Shape, to.Name, to.Shape)
		}
	}
	d0, d1 := int64(1), int64(1)
	if len(t.Shape) > 0 {
		d0 = t.Shape[0]
	}
	if len(t.Shape) > 1 {
		d1 = t.Shape[1]
	}
	lo0, hi0, ok0 := checkRange(r.Lo0, r.Hi0, d0)
	lo1, hi1, ok1 := checkRange(r.Lo1, r.Hi1, d1)
	if !ok0 || !ok1 {
		return errs.New(errs.ErrArgument, "invalid slice [%d:%d, %d:%d] of shape %v",
			r.Lo0, r.Hi0, r.Lo1, r.Hi1, t.Shape)
	}
	w.Shape = t.Shape
	w.Bytes = t.Bytes
	if d0 == 0 || t.Bytes == 0 { // empty; the ranges have been checked above
		w.Shape = sliced(t.Shape, hi0-lo0, hi1-lo1)
		w.Bytes = 0
		return nil
	}
	if lo0 == 0 && hi0 == d0 && lo1 == 0 && hi1 == d1 {
		w.rowBytes, w.row1, w.col1 = t.Bytes, 1, t.Bytes
		if ix.Tensors[w.Data].Parts > 1 {
			w.rowBytes, w.row1, w.col1 = t.Bytes/d0, d0, t.Bytes/d0
		}
		return nil
	}
	if len(t.Shape) == 0 {
		return errs.New(errs.ErrArgument, "cannot slice a tensor of rank 0")
	}
	w.Shape = sliced(t.Shape, hi0-lo0, hi1-lo1)
	bits := int64(t.DType.Bits())
	cell := int64(1) // elements with the same index in dims 0 and 1
	for _, d := range t.Shape[min(2, len(t.Shape)):] {
		cell *= d
	}
	rowBits, cellBits := d1*cell*bits, cell*bits
	switch {
	case rowBits%8 == 0 && lo1*cellBits%8 == 0 && hi1*cellBits%8 == 0:
		w.rowBytes, w.row0, w.row1 = rowBits/8, lo0, hi0
		w.col0, w.col1 = lo1*cellBits/8, hi1*cellBits/8
	case lo1 == 0 && hi1 == d1 && lo0*rowBits%8 == 0 && hi0*rowBits%8 == 0:
		// Rows end within a byte, so treat all of them as one run of bytes.
		w.rowBytes, w.row0, w.row1, w.col1 = 1, lo0*rowBits/8, hi0*rowBits/8, 1
	default:
		return errs.New(errs.ErrArgument, "slice [%d:%d, %d:%d] of %v %v does not begin and end on whole bytes", lo0,
			hi0, lo1, hi1, t.DType, t.Shape)
	}
	w.Bytes = (w.row1 - w.row0) * (w.col1 - w.col0)
	return nil
}

// checkRange resolves Whole and reports whether a range of a dimension is valid.
func checkRange(lo, hi, dim int64) (int64, int64, bool) {
	if hi == Whole {
		hi = dim
	}
	return lo, hi, 0 <= lo && lo <= hi && hi <= dim
}

func sliced(shape []int64, n0, n1 int64) []int64 {
	s := slices.Clone(shape)
	if len(s) > 0 {
		s[0] = n0
	}
	if len(s) > 1 {
		s[1] = n1
	}
	return s
}

// SourceRange returns the byte range [off, off+w.Bytes) of the source that holds the want. ok is false if the want is
// not contiguous there or is stored in chunks.
func (w *Want) SourceRange(ix *tensor.Index) (off int64, ok bool) {
	t := &ix.Tensors[w.Data]
	if t.Count != 0 || (w.col1-w.col0 != w.rowBytes && w.row1-w.row0 > 1) {
		return 0, false
	}
	return t.Off + w.row0*w.rowBytes + w.col0, true
}

// Make plans how to read the wants to their destinations. It skips wants with a nil destination.
func Make(ix *tensor.Index, wants []Want, dest []unsafe.Pointer, lim Limits) *Plan {
	m := newMaker(ix, wants, tasksOf(ix, wants, dest), lim)
	for i := range wants {
		if dest[i] == nil || wants[i].Bytes == 0 {
			continue
		}
		t := &ix.Tensors[wants[i].Data]
		if t.Cuts != nil {
			m.lim.Align = 0 // the bytes are not those of a file
		}
		if t.Count == 0 {
			m.addPlainTasks(int32(i), &wants[i], t, dest[i])
		} else {
			m.addChunkTasks(int32(i), &wants[i], t, dest[i])
		}
	}
	m.order()
	m.joinIntoPieces(0, len(m.pos))
	m.splitPieces()
	return m.p
}

type maker struct {
	ix    *tensor.Index
	lim   Limits
	wants []Want
	p     *Plan
	pos   []place // indexed by task; sorted with the tasks
}

// tasksOf estimates the number of tasks of the wants that have a destination. Slices may need fewer tasks, and plain
// tensors more.
func tasksOf(ix *tensor.Index, wants []Want, dest []unsafe.Pointer) int {
	tasks := 0
	for i := range wants {
		if dest[i] != nil {
			tasks += max(1, int(ix.Tensors[wants[i].Data].Count))
		}
	}
	return tasks
}

// newMaker returns a maker with space for a number of tasks.
func newMaker(ix *tensor.Index, wants []Want, tasks int, lim Limits) *maker {
	p := &Plan{Tasks: make([]device.DecodeTask, 0, tasks), Refs: make([]Ref, 0, tasks), Left: make([]int32, len(wants))}
	return &maker{ix: ix, lim: lim, wants: wants, p: p, pos: make([]place, 0, tasks)}
}

// A place is the location of a task's stored bytes in its source.
type place struct {
	source   int32
	task     int32
	off, len int64
	inPlace  bool
}

func (m *maker) add(want, n, source int32, off int64, inPlace bool, j device.DecodeTask) {
	j.Summed = n >= 0
	m.pos = append(m.pos, place{source, int32(len(m.p.Tasks)), off, int64(j.Chunk.Stored), inPlace})
	m.p.Tasks = append(m.p.Tasks, j)
	m.p.Refs = append(m.p.Refs, Ref{want, n})
	m.p.Left[want]++
}

// addChunkTasks adds the tasks of a tensor that is stored in chunks: one task per chunk that contains wanted bytes.
func (m *maker) addChunkTasks(want int32, w *Want, t *tensor.Tensor, dest unsafe.Pointer) {
	w.each(m.ix, func(n int32, to int64, v *device.View) {
		if v != nil {
			own := *v
			v = &own
		}
		j := device.DecodeTask{Chunk: m.ix.Chunks[t.First+n], Dst: unsafe.Add(dest, to), View: v}
		m.add(want, n, t.Source, j.Chunk.Off, v == nil && j.Chunk.Codec == tensor.CodecRaw &&
			j.Chunk.Logical >= inPlaceMin, j)
	})
}

// Tasks returns a plan without pieces, for bytes that another plan reads. It has the decode tasks of wants whose
// tensors are stored in chunks, in the order of the wants.
func Tasks(ix *tensor.Index, wants []Want, dest []unsafe.Pointer) *Plan {
	m := newMaker(ix, wants, tasksOf(ix, wants, dest), Limits{})
	for i := range wants {
		m.addChunkTasks(int32(i), &wants[i], &ix.Tensors[wants[i].Data], dest[i])
	}
	return m.p
}

// EachChunk calls do with the number of each chunk that contains wanted bytes. The want's tensor must be stored in
// chunks.
func (w *Want) EachChunk(ix *tensor.Index, do func(n int32)) {
	w.each(ix, func(n int32, _ int64, _ *device.View) { do(n) })
}

// each calls do with the number of each chunk that contains wanted bytes. If the whole chunk is wanted and is
// contiguous at the destination, to is its offset there. Otherwise v is a view that is valid until do returns.
func (w *Want) each(ix *tensor.Index, do func(n int32, to int64, v *device.View)) {
	t := &ix.Tensors[w.Data]
	if w.Bytes == 0 || t.Count == 0 {
		return
	}
	parts := int64(max(1, t.Parts))
	partBytes := t.Bytes / parts
	perPart := int64(t.Count) / parts
	partRow := w.rowBytes / parts
	v := device.View{Row: partRow, Row0: w.row0, Row1: w.row1, Col0: w.col0, Col1: w.col1}
	for part := range parts {
		v.Col = part * partRow
		if parts > 1 && (v.Col >= w.col1 || v.Col+partRow <= w.col0) {
			continue
		}
		first := w.row0 * partRow / int64(t.ChunkBytes)
		last := (w.row1*partRow - 1) / int64(t.ChunkBytes)
		for k := first; k <= last; k++ {
			v.At = k * int64(t.ChunkBytes)
			n := min(int64(t.ChunkBytes), partBytes-v.At)
			switch {
			case w.col0 == v.Col && w.col1 == v.Col+partRow && v.At >= w.row0*partRow && v.At+n <= w.row1*partRow:
				do(int32(part*perPart+k), v.At-w.row0*partRow, nil)
			case v.Any(n):
				do(int32(part*perPart+k), 0, &v)
			}
		}
	}
}

// inPlaceMin is the minimum size of a raw run that is read directly to its destination and not through a slot.
const inPlaceMin = 128 << 10

// addPlainTasks adds the tasks of a plain tensor. A contiguous run is cut at the piece size. Columns are read
// row by row if rows are long, and in bands of whole rows if rows are short.
func (m *maker) addPlainTasks(want int32, w *Want, t *tensor.Tensor, dest unsafe.Pointer) {
	raw := func(off, n int64) tensor.Chunk {
		return tensor.Chunk{Off: off, Stored: uint32(n), Logical: uint32(n), Codec: tensor.CodecRaw}
	}
	if off, ok := w.SourceRange(m.ix); ok {
		for at, n := int64(0), int64(0); at < w.Bytes; at += n {
			n = min(m.bytesToCut(off+at, t), w.Bytes-at)
			m.add(want, -1, t.Source, off+at, n >= inPlaceMin,
				device.DecodeTask{Chunk: raw(off+at, n), Dst: unsafe.Add(dest, at)})
		}
		return
	}
	width := w.col1 - w.col0
	if width >= inPlaceMin || w.rowBytes-width > m.lim.Gap {
		for r := w.row0; r < w.row1; r++ {
			for at, n := int64(0), int64(0); at < width; at += n {
				off := t.Off + r*w.rowBytes + w.col0 + at
				n = min(m.bytesToCut(off, t), width-at)
				m.add(want, -1, t.Source, off, n >= inPlaceMin,
					device.DecodeTask{Chunk: raw(off, n), Dst: unsafe.Add(dest, (r-w.row0)*width+at)})
			}
		}
		return
	}
	band := max(1, m.lim.Piece/w.rowBytes)
	for r := w.row0; r < w.row1; r += band {
		rows := min(band, w.row1-r)
		at := r * w.rowBytes
		m.add(want, -1, t.Source, t.Off+at, false, device.DecodeTask{Chunk: raw(t.Off+at, rows*w.rowBytes), Dst: dest,
			View: &device.View{At: at, Row: w.rowBytes, Row0: w.row0, Row1: w.row1, Col0: w.col0, Col1: w.col1}})
	}
}

// block returns the tensor's block size, or 0 if blocks are too large for a piece.
func (m *maker) block(t *tensor.Tensor) int64 {
	most := m.lim.Piece
	if m.lim.InPlace { // no slot is needed
		most = max(most, tensor.MaxChunkBytes)
	}
	if t.Block > most {
		return 0
	}
	return t.Block
}

// bytesToCut returns how many bytes of a tensor, from off on, go into one piece. The piece then ends with a block, at a
// cut, or at a multiple of Align.
func (m *maker) bytesToCut(off int64, t *tensor.Tensor) int64 {
	if b := m.block(t); b > 0 {
		return max(1, m.lim.Piece/b)*b - (off-t.Off)%b
	}
	if at := off - t.Off; len(t.Cuts) > 0 {
		k := sort.Search(len(t.Cuts), func(k int) bool { return t.Cuts[k] > at+m.lim.Piece })
		if k > 0 && t.Cuts[k-1] > at {
			return t.Cuts[k-1] - at
		}
		if m.lim.InPlace && k < len(t.Cuts) { // no slot is needed
			return t.Cuts[k] - at
		}
	}
	if m.lim.Align > 1 {
		if n := m.lim.Piece - off&(m.lim.Align-1); n > 0 {
			return n
		}
	}
	return m.lim.Piece
}

// alignDown and alignUp return the multiples of Align around off. alignUp stops at the end of source s.
func (m *maker) alignDown(off int64) int64 { return off &^ (max(1, m.lim.Align) - 1) }

func (m *maker) alignUp(off int64, s int32) int64 {
	return max(off, min(m.alignDown(off+max(1, m.lim.Align)-1), m.ix.Sources[s].Size))
}

// order sorts the tasks by source and offset.
func (m *maker) order() {
	byPlace := func(a, b place) int {
		return cmp.Or(cmp.Compare(a.source, b.source), cmp.Compare(a.off, b.off), cmp.Compare(a.task, b.task))
	}
	if slices.IsSortedFunc(m.pos, byPlace) {
		return
	}
	slices.SortFunc(m.pos, byPlace)
	tasks, refs := make([]device.DecodeTask, len(m.p.Tasks)), make([]Ref, len(m.p.Refs))
	for i := range m.pos {
		tasks[i], refs[i] = m.p.Tasks[m.pos[i].task], m.p.Refs[m.pos[i].task]
	}
	m.p.Tasks, m.p.Refs = tasks, refs
}

// joinIntoPieces joins neighbouring tasks of [from, to) into pieces. Tasks that read the same
// bytes (tied tensors) share a piece.
func (m *maker) joinIntoPieces(from, to int) {
	p := m.p
	var cur *Piece
	for i := from; i < to; i++ {
		at := &m.pos[i]
		begin, end := m.alignDown(at.off), m.alignUp(at.off+at.len, at.source)
		if end-begin > m.lim.Piece { // the aligned piece would not fit in a slot
			begin, end = at.off, at.off+at.len
		}
		alone := m.lim.InPlace && at.inPlace && !(i > 0 && m.pos[i-1].off == at.off &&
			m.pos[i-1].source == at.source) &&
			!(i+1 < len(m.pos) && m.pos[i+1].off == at.off && m.pos[i+1].source == at.source)
		if alone {
			p.Pieces = append(p.Pieces, Piece{Source: at.source, First: int32(i), Count: 1, Off: at.off, Len: at.len,
				InPlace: p.Tasks[i].Dst})
			p.Read += at.len
			cur = nil
			continue
		}
		if cur != nil && cur.Source == at.source && at.off >= cur.Off && at.off-(cur.Off+cur.Len) <= m.lim.Gap &&
			max(end, cur.Off+cur.Len)-cur.Off <= max(m.lim.Piece, cur.Len) {
			p.Read -= cur.Len
			cur.Len = max(cur.Len, end-cur.Off)
			cur.Count++
		} else {
			p.Pieces = append(p.Pieces, Piece{Source: at.source, First: int32(i), Count: 1, Off: begin,
				Len: end - begin})
			cur = &p.Pieces[len(p.Pieces)-1]
		}
		p.Tasks[i].Src = uint32(min(at.off-cur.Off, math.MaxUint32))
		p.Read += cur.Len
		p.Slot = max(p.Slot, cur.Len)
	}
}

// splitPieces divides pieces into shares. A share begins with a task, because one worker must compute a whole
// checksum. Only bytes without a checksum may be cut anywhere.
func (m *maker) splitPieces() {
	p := m.p
	p.Shares = make([]Share, 0, len(p.Pieces))
	for k := range p.Pieces {
		piece := &p.Pieces[k]
		cur := Share{Piece: int32(k), First: piece.First}
		next := func(at int64, first int32) {
			cur.To, cur.Count = at, first-cur.First
			p.Shares = append(p.Shares, cur)
			cur = Share{Piece: int32(k), First: first, From: at}
		}
		have := int64(0) // end of the tasks seen so far
		for i := piece.First; m.lim.Share > 0 && piece.InPlace == nil && i < piece.First+piece.Count; i++ {
			j := &p.Tasks[i]
			at := int64(j.Src)
			if at >= have && at-cur.From >= m.lim.Share {
				next(at, i)
			}
			end := at + int64(j.Chunk.Stored)
			t := &m.ix.Tensors[m.wants[p.Refs[i].Want].Data]
			switch b := m.block(t); {
			case b > 0:
				for cut := at + b - (m.pos[i].off-t.Off)%b; cut < end; cut += b {
					if at >= have && cut-cur.From >= m.lim.Share {
						next(cut, i+1)
					}
				}
			case len(t.Cuts) > 0 && at >= have:
				from := at - (m.pos[i].off - t.Off) // where the tensor begins, relative to the piece
				first := sort.Search(len(t.Cuts), func(k int) bool { return from+t.Cuts[k] > at })
				for _, cut := range t.Cuts[first:] {
					if from+cut >= end {
						break
					}
					if from+cut-cur.From >= m.lim.Share {
						next(from+cut, i+1)
					}
				}
			case p.Refs[i].N < 0 && at >= have:
				for end-cur.From >= 2*m.lim.Share {
					next(cur.From+m.lim.Share, i+1)
				}
			}
			have = max(have, end)
		}
		next(piece.Len, piece.First+piece.Count)
	}
}
