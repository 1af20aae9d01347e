package relay

// This file divides a group's load into pieces and shares.

import (
	"cmp"
	"math"
	"slices"
	"unsafe"

	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/load"
	"github.com/overwire/overwire/gosrc/plan"
	"github.com/overwire/overwire/gosrc/tensor"
)

// chunkOf names a chunk: its tensor and number.
type chunkOf struct{ data, n int32 }

// relayed is where a chunk travels: in which piece, and where in its buffer; piece
// is -1 for a chunk that is not shared.
type relayed struct {
	piece int
	off   int64
}

const (
	// shareAlign is the alignment of shares in a buffer.
	shareAlign = 256
	// chunkAlign is the alignment of chunks that are aligned in the file: X16 needs
	// it.
	chunkAlign = 16
	// bareBytes is the size of the chunks of plain tensors, which have none in the
	// file: four of them fit in a slot, with what aligns them.
	bareBytes = 1<<20 - 8<<10
	// finePiece is the least of a rank's share of a piece. A piece is decoded when all of
	// it has been read: with shares of 32 MiB ranks waited longer for each other.
	finePiece = 16 << 20
	// fewChunks is as many as a rank's share of a piece has, about.
	fewChunks = 24
	// maxRanks is more GPUs than any host has: of several hosts, as many ranks exchange as
	// have a share.
	maxRanks = 256
	// maxSize is the largest buffer: a decode task has 32 bits for where its chunk lies.
	maxSize = math.MaxUint32
	// maxBuffers is more than any ring has.
	maxBuffers = 64
)

// largest is the stored bytes of the largest chunk that a tensor has in the files, 0 where
// all are plain. A number that is none of a tensor is false; layOut refuses it.
func (s *Spec) largest(ix *tensor.Index) (most int64, ok bool) {
	for _, n := range s.Tensors {
		if n < 0 || n >= int64(len(ix.Tensors)) {
			return 0, false
		}
		t := &ix.Tensors[n]
		if t.Alias >= 0 {
			t = &ix.Tensors[t.Alias]
		}
		for _, c := range ix.Chunks[t.First : t.First+t.Count] {
			most = max(most, int64(c.Stored))
		}
	}
	return most, true
}

// checkSize checks the size of the buffers, in which each rank has a share, before there is
// memory for them.
func (s *Spec) checkSize() error {
	if s.Size > maxSize || s.Size/shareAlign < int64(s.Widest) {
		return errs.New(errs.ErrArgument, "relay: buffers of %d bytes for %d ranks: at least %d for each, and at most %d", s.Size, s.Widest, shareAlign, int64(maxSize))
	}
	return nil
}

// Room is the most that one chunk of a model takes of a buffer for each rank: a smaller
// share holds not every chunk.
func Room(m *load.Model) int64 {
	most := int64(bareBytes)
	for i := range m.Seen().Tensors {
		if t := &m.Seen().Tensors[i]; t.Count > 0 {
			most = max(most, min(int64(t.ChunkBytes), t.Bytes/int64(t.Parts)))
		}
	}
	return most + 2*chunkAlign + shareAlign
}

// chunked is the model's index with chunks for plain tensors, too: raw ones without
// a checksum.
func (r *Relay) chunked(wants []plan.Want) *tensor.Index {
	ix := r.model.Seen()
	out := &tensor.Index{Sources: ix.Sources, Tensors: ix.Tensors, Chunks: ix.Chunks}
	r.bare = make([]bool, len(ix.Tensors))
	plain := 0 // how many chunks, about
	for i := range wants {
		if t := &ix.Tensors[wants[i].Data]; t.Count == 0 && t.Bytes > 0 {
			plain += int(t.Bytes/bareBytes) + 1
		}
	}
	if plain > 0 {
		out.Tensors = slices.Clone(ix.Tensors)
		out.Chunks = append(make([]tensor.Chunk, 0, len(ix.Chunks)+plain), ix.Chunks...)
	}
	for i := range wants {
		t := &out.Tensors[wants[i].Data]
		if t.Count > 0 || t.Bytes == 0 {
			continue
		}
		r.bare[wants[i].Data] = true
		out.Chunks = cutBare(out.Chunks, t, r.bareChunk(wants[i].Data))
	}
	return out
}

// divideRing divides the memory of the ring into more and smaller buffers, as long as many
// chunks fit in each rank's share.
func (r *Relay) divideRing() {
	s := r.spec
	most, ok := s.largest(r.model.Seen())
	if !ok {
		return
	}
	least := max(finePiece, 8*max(bareBytes, most)) * int64(s.Widest)
	for s.Size/2 >= least && s.Size/2%shareAlign == 0 && s.Buffers <= maxBuffers/2 {
		s.Size, s.Buffers = s.Size/2, s.Buffers*2
	}
}

// layOut divides the stored chunks of the tensors into pieces and shares, in the
// order of the files. All ranks compute the same pieces, and all ranks of a host
// the same shares.
func (r *Relay) layOut() error {
	spec := r.spec
	reqs := make([]plan.Request, len(spec.Tensors))
	for i, t := range spec.Tensors {
		reqs[i] = plan.Request{Tensor: t, Hi0: plan.Whole, Hi1: plan.Whole}
	}
	wants, err := plan.Check(r.model.Seen(), reqs)
	if err != nil {
		return err
	}
	r.strips = r.stripes(wants)
	r.ix = r.chunked(wants)
	r.at = make([]relayed, len(r.ix.Chunks))
	for i := range r.at {
		r.at[i].piece = -1
	}
	all := make([]chunkOf, 0, len(r.ix.Chunks))
	for i := range wants {
		for n := range r.ix.Tensors[wants[i].Data].Count {
			c := chunkOf{wants[i].Data, n}
			if at := r.place(c); at.piece < 0 { // tied tensors share their chunks
				at.piece = 0
				all = append(all, c)
			}
		}
	}
	if !slices.IsSortedFunc(all, r.inFile) {
		slices.SortFunc(all, r.inFile)
	}
	r.spots = make([]plan.Spot, 0, len(all)/spec.Ranks+len(all)/16)
	if spec.divided() {
		need, err := r.needs(wants)
		if err == nil {
			err = r.layOutCuts(all, need)
		}
		if err != nil {
			return err
		}
		r.fetch, r.shares = plan.Stored(r.ix, r.spots, r.machine.Limits())
		return nil
	}
	for begin := 0; begin < len(all); {
		// Take as many chunks as fit, however much the shares of all ranks are
		// padded. A sixteenth stays free, unless a chunk needs it: shares then fill
		// slots whose size is a power of two.
		sum, largest, end := int64(0), int64(0), begin
		for ; end < len(all); end++ {
			n := roomOf(r.chunk(all[end]))
			if end > begin && sum+n+int64(spec.Widest)*(max(largest, n)+shareAlign) > spec.Size-spec.Size/16 {
				break
			}
			sum, largest = sum+n, max(largest, n)
		}
		if end == begin+1 && int64(spec.Widest)*(sum+shareAlign) > spec.Size {
			return errs.New(errs.ErrArgument, "relay: buffers of %d bytes are too small for a chunk of %d and %d ranks", spec.Size, sum, spec.Widest)
		}
		r.piece(r.evenly(all[begin:end], sum))
		begin = end
	}
	r.fetch, r.shares = plan.Stored(r.ix, r.spots, r.machine.Limits())
	return nil
}

// inFile compares the places of chunks in the files.
func (r *Relay) inFile(a, b chunkOf) int {
	if by := cmp.Compare(r.ix.Tensors[a.data].Source, r.ix.Tensors[b.data].Source); by != 0 {
		return by
	}
	return cmp.Or(cmp.Compare(r.chunk(a).Off, r.chunk(b).Off), cmp.Compare(a.data, b.data), cmp.Compare(a.n, b.n))
}

func (r *Relay) chunk(c chunkOf) *tensor.Chunk {
	return &r.ix.Chunks[r.ix.Tensors[c.data].First+c.n]
}

func (r *Relay) place(c chunkOf) *relayed { return &r.at[r.ix.Tensors[c.data].First+c.n] }

// roomOf is the most that a chunk takes of a share.
func roomOf(c *tensor.Chunk) int64 { return int64(c.Stored) + 2*chunkAlign }

// A share is what one rank reads of a piece: the first chunks are common, for all, those
// of strips behind the others.
type share struct {
	chunks []chunkOf
	common int
	bytes  int64
}

// evenly divides the chunks of a piece into shares of about equal size.
func (r *Relay) evenly(chunks []chunkOf, sum int64) []share {
	shares, ranks := make([]share, r.spec.Ranks), int64(r.spec.Ranks)
	for i := range shares {
		shares[i].chunks = make([]chunkOf, 0, len(chunks)/r.spec.Ranks+1)
	}
	rank, passed := int64(0), int64(0)
	for _, c := range chunks {
		for rank+1 < ranks && passed*ranks >= sum*(rank+1) {
			rank++
		}
		s := &shares[rank]
		s.chunks, s.common = append(s.chunks, c), s.common+1
		passed += roomOf(r.chunk(c))
	}
	return shares
}

// gapBefore is the space before a chunk in a share, behind the last one, which ends at
// pos; nil: there is none.
func gapBefore(pos int64, last, chunk *tensor.Chunk) int64 {
	gap := int64(-1)
	if last != nil {
		gap = chunk.Off - (last.Off + int64(last.Stored))
	}
	if gap < 0 || gap >= chunkAlign {
		gap = -pos&(chunkAlign-1) + chunk.Off%chunkAlign
	}
	return gap
}

// piece adds a piece of these shares. What is contiguous in the file stays contiguous in
// the buffer. All shares have the space of the largest, so that one collective gathers them.
func (r *Relay) piece(shares []share) {
	number := len(r.pieces)
	p := relayPiece{landed: make(chan struct{}), checked: make(chan struct{}), begin: len(r.spots), used: make([]int64, len(shares)), beside: make([]bool, len(shares))}
	for rank := range shares {
		s := &shares[rank]
		pos := int64(0)
		var last *tensor.Chunk
		for i, c := range s.chunks {
			chunk := r.chunk(c)
			pos += gapBefore(pos, last, chunk)
			*r.place(c) = relayed{number, pos}
			pos, last = pos+int64(chunk.Stored), chunk
			switch {
			case i >= s.common:
			case r.isStrip(c):
				p.beside[rank] = true
			default:
				p.used[rank] = pos
			}
		}
		p.share = max(p.share, pos)
		if rank == r.spec.Rank {
			own := s.chunks
			if !slices.IsSortedFunc(own, r.inFile) {
				own = slices.Clone(own)
				slices.SortFunc(own, r.inFile)
			}
			for _, c := range own {
				r.spots = append(r.spots, plan.Spot{Data: c.data, N: c.n, Group: int32(number), Bare: r.bare[c.data]})
			}
			p.left = int32(len(own))
		}
	}
	p.share = (p.share + shareAlign - 1) &^ (shareAlign - 1)
	base := device.Pointer(uintptr(r.spec.Ring[number%len(r.spec.Ring)]))
	for rank := range shares {
		for _, c := range shares[rank].chunks {
			r.place(c).off += int64(rank) * p.share
		}
	}
	for i := range r.spots[p.begin:] {
		s := &r.spots[p.begin+i]
		s.Dst = unsafe.Add(base, r.place(chunkOf{s.Data, s.N}).off)
	}
	if p.unread = p.left; p.left == 0 {
		close(p.landed)
		close(p.checked)
	}
	r.pieces = append(r.pieces, p)
}

// byPiece sorts a plan's tasks by the pieces that they are in, which are `where`.
func (r *Relay) byPiece(p *plan.Plan, where []int) {
	if slices.IsSorted(where) {
		return
	}
	next := make([]int, len(r.pieces)+1) // by piece: where its next task goes
	for _, k := range where {
		next[k+1]++
	}
	for k := range r.pieces {
		next[k+1] += next[k]
	}
	tasks, refs, pieces := slices.Clone(p.Tasks), slices.Clone(p.Refs), slices.Clone(where)
	for from, k := range pieces {
		to := next[k]
		next[k]++
		p.Tasks[to], p.Refs[to], where[to] = tasks[from], refs[from], k
	}
}

// Aim sets what this rank wants: requests as those of a load, of shared tensors,
// each with a destination. It is called once, before the first Decode; an error
// leaves the relay as it was.
func (r *Relay) Aim(reqs []plan.Request) error {
	dest := make([]unsafe.Pointer, len(reqs))
	for i := range reqs {
		dest[i] = device.Pointer(reqs[i].Dest)
	}
	wants, err := plan.Check(r.ix, reqs)
	if err != nil {
		return err
	}
	shared := make([]bool, len(r.ix.Tensors))
	for _, t := range r.spec.Tensors {
		shared[t] = true
	}
	for i := range wants { // the chunks of an alias travel as the rows of its tensor want it
		if !shared[wants[i].Tensor] {
			return doesNotTravel(i)
		}
	}
	p := plan.Tasks(r.ix, wants, dest)
	where := make([]int, len(p.Tasks))
	for i := range p.Tasks {
		at := r.place(chunkOf{wants[p.Refs[i].Want].Data, p.Refs[i].N})
		if at.piece < 0 {
			return doesNotTravel(int(p.Refs[i].Want))
		}
		if at.off > maxSize-int64(p.Tasks[i].Chunk.Stored) {
			return errs.New(errs.ErrEngine, "relay: request %d has a chunk at %d of a buffer", p.Refs[i].Want, at.off)
		}
		p.Tasks[i].Src = uint32(at.off)
		where[i] = at.piece
	}
	for i, n := range p.Left {
		if n == 0 && wants[i].Bytes > 0 { // plain, so without chunks
			return doesNotTravel(i)
		}
	}
	r.byPiece(p, where)
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.aimed {
		return errs.New(errs.ErrArgument, "relay: it has its requests")
	}
	where = r.divert(p, where, wants)
	for i, k := range where {
		piece := &r.pieces[k]
		if piece.last == 0 {
			piece.first = i
		}
		piece.last = i + 1
	}
	r.jobs, r.refs, r.coming = p.Tasks, p.Refs, p.Left
	for i, n := range p.Left {
		if n == 0 { // it has no bytes
			r.job.Tensors.Add(1)
			r.here.Add(i)
		}
	}
	for i := range wants {
		r.job.TotalBytes.Add(wants[i].Bytes)
	}
	r.job.TotalTensors.Store(int64(len(wants)))
	r.wants, r.aimed = wants, true
	if r.carrier != nil {
		close(r.carrier.aimed)
	}
	return nil
}

func doesNotTravel(request int) error {
	return errs.New(errs.ErrArgument, "relay: request %d is of a tensor that does not travel", request)
}
