package relay

// This file lays out a group's load in buffers.

import (
	"cmp"
	"math"
	"slices"
	"unsafe"

	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/device/cuda/queue"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/job"
	"github.com/overwire/overwire/gosrc/load"
	"github.com/overwire/overwire/gosrc/plan"
	"github.com/overwire/overwire/gosrc/tensor"
)

// exchangeLayout is what travels in which piece, and where in its buffer.
type exchangeLayout struct {
	ix         *tensor.Index // an index in which all shared tensors have chunks
	bare       []bool        // by tensor: it has chunks there only, without checksums
	places     []chunkPlace  // by number of a chunk in ix
	pieces     []loadPiece
	parts      []rankPart  // by piece, and in that by rank
	spots      []plan.Spot // what this rank reads: chunks, and where in its buffers they go; by piece
	fetch      *plan.Plan  // of reading the spots
	fetchWants []plan.Want // of fetch: a spot each
}

// A loadPiece is what the ranks read at about the same time: a share each. In this package a piece is one of
// these; a plan's pieces are smaller: each fills one slot, with bytes of one of these.
type loadPiece struct {
	share              int64 // the space that a buffer has for each rank's share
	firstSpot, endSpot int   // what this rank reads: spots[firstSpot:endSpot]
	arrival
}

// An arrival is how far this rank's share of a piece is. The relay's mu guards it.
type arrival struct {
	chunksLeft int32         // that have not arrived
	checked    chan struct{} // closed when the share is there, and right: the others may read it
}

// A rankPart is a rank's share of a piece, and this rank's decode tasks of it: tasks[firstTask:endTask].
type rankPart struct {
	firstTask, endTask int
	used               int64 // bytes that other ranks copy: behind them is what its reader alone needs
	decoding
}

// A decoding is how far that of a share is on this rank. The relay's mu guards it.
type decoding struct {
	isQueued  bool         // true, too, if nothing is to be decoded
	decodeEnd *queue.Event // once it is queued; nil: there is nothing to wait for
	isDecoded bool
}

// localRequests are this rank's requests, and their decode tasks.
type localRequests struct {
	tasks  []device.DecodeTask // by piece, and in that by the rank that reads the chunk
	refs   []plan.Ref          // of each task
	wants  []plan.Want
	coming []int32 // by request: decode tasks that have not ended
}

// partOf is a rank's share of a piece.
func (r *Relay) partOf(piece, rank int) *rankPart { return &r.parts[piece*r.spec.Ranks+rank] }

// chunkPlace is where a chunk travels: in which of the parts, -1 if it is not shared, and where in that.
type chunkPlace struct {
	part int
	off  int64
}

const (
	// shareAlign is the alignment of shares in a buffer.
	shareAlign = 256
	// chunkAlign is the alignment of chunks that are aligned in the file: X16 needs
	// it.
	chunkAlign = 16
	// plainChunkBytes is the size of the chunks of plain tensors, which have none in the file.
	plainChunkBytes = 1<<20 - 8<<10
	// maxRanks is more GPUs than any host has. Where the caller exchanges, also between hosts, there may be more.
	maxRanks = 256
	// mostBatches is how many batches of shares a GPU decodes at a time, or waits for the copies of. What is
	// ready meanwhile is the next batch: the decoding of a few chunks takes as long as that of many.
	mostBatches = load.ExchangeBatches - slotsForSums
	// mostReads is how many shares a batch may have: a slot can wait for a stream of each.
	mostReads = 8
	// maxSize is the largest buffer: a decode task has 32 bits for where its chunk lies.
	maxSize = math.MaxUint32
	// maxBuffers is more than any ring has.
	maxBuffers = 64
)

// checkSize checks the size of the buffers, in which each rank has a share, before there is
// memory for them.
func (s *Spec) checkSize() error {
	most := s.Size // in which a decode task finds its chunk
	if s.Mapped {
		most = max(s.Size/int64(s.Ranks)*int64(s.Buffers), s.Size*int64(s.Stages))
	}
	if s.Size > maxSize || most > maxSize || s.Size/shareAlign < int64(s.Ranks) {
		return errs.New(errs.ErrArgument, "relay: buffers of %d bytes for %d ranks: at least %d each, and at most %d",
			s.Size, s.Ranks, shareAlign, maxSize)
	}
	return nil
}

// RoomForChunk is the most that one chunk of a model takes of a buffer for each rank: a smaller
// share holds not every chunk.
func RoomForChunk(m *load.Model) int64 {
	most := int64(plainChunkBytes)
	for i := range m.Seen().Tensors {
		if t := &m.Seen().Tensors[i]; t.Count > 0 {
			most = max(most, min(int64(t.ChunkBytes), t.Bytes/int64(t.Parts)))
		}
	}
	return most + 2*chunkAlign + shareAlign
}

// indexWithPlainChunks is the model's index with chunks for plain tensors, too: raw ones without
// a checksum.
func (r *Relay) indexWithPlainChunks(wants []plan.Want) *tensor.Index {
	ix := r.model.Seen()
	out := &tensor.Index{Sources: ix.Sources, Tensors: slices.Clone(ix.Tensors)}
	r.bare = make([]bool, len(ix.Tensors))
	most := len(wants) // chunks of plain tensors, about
	for i := range wants {
		if t := &ix.Tensors[wants[i].Data]; t.Count == 0 && t.Bytes > 0 {
			most += int(t.Bytes / plainChunkBytes)
		}
	}
	out.Chunks = slices.Grow(slices.Clip(ix.Chunks), most)
	for i := range wants {
		if t := &out.Tensors[wants[i].Data]; t.Count == 0 && t.Bytes > 0 {
			r.bare[wants[i].Data] = true
			out.Chunks = chunkPlainTensor(out.Chunks, t)
		}
	}
	return out
}

// layOut divides the stored chunks of the tensors into pieces and shares, in the
// order of the files. All ranks that exchange compute the same pieces and shares.
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
	r.ix = r.indexWithPlainChunks(wants)
	r.places = make([]chunkPlace, len(r.ix.Chunks))
	for i := range r.places {
		r.places[i].part = -1
	}
	all := make([]plan.ChunkOf, 0, len(r.ix.Chunks))
	for i := range wants {
		for n := range r.ix.Tensors[wants[i].Data].Count {
			all = append(all, plan.ChunkOf{Data: wants[i].Data, N: n})
		}
	}
	slices.SortFunc(all, r.compareInFile)
	all = slices.Compact(all) // tied tensors share their chunks
	needed := func(plan.ChunkOf) int32 { return plan.Several }
	if len(spec.Needs) > 0 {
		by, err := plan.NeededBy(r.ix, spec.Ranks, spec.Needs)
		if err != nil {
			return err
		}
		needed = func(c plan.ChunkOf) int32 { return by[r.ix.Tensors[c.Data].First+c.N] }
	}
	pieces, err := plan.Divide(all, spec.Ranks, r.shareSpace()-shareAlign, needed, func(c plan.ChunkOf) int64 {
		return int64(r.chunkAt(c).Stored) + 2*chunkAlign // the most that it takes of a share
	})
	if err != nil {
		return err
	}
	r.spots = make([]plan.Spot, 0, len(all)/spec.Ranks+len(all)/16)
	for _, rankShares := range pieces {
		r.addPiece(rankShares)
	}
	r.sharesLeft, r.decoded, r.queued = len(r.parts), make([]int, spec.Ranks), make([]int, spec.Ranks)
	if r.sharesLeft == 0 {
		close(r.lastDecode)
	}
	r.fetch, r.fetchWants = plan.PlanStored(r.ix, r.spots, r.machine.Limits())
	return nil
}

// shareSpace is what a buffer has for each rank.
func (r *Relay) shareSpace() int64 { return r.spec.Size / int64(r.spec.Ranks) &^ (shareAlign - 1) }

func (r *Relay) compareInFile(a, b plan.ChunkOf) int {
	if by := cmp.Compare(r.ix.Tensors[a.Data].Source, r.ix.Tensors[b.Data].Source); by != 0 {
		return by
	}
	return cmp.Or(cmp.Compare(r.chunkAt(a).Off, r.chunkAt(b).Off), cmp.Compare(a.Data, b.Data), cmp.Compare(a.N, b.N))
}

func (r *Relay) chunkAt(c plan.ChunkOf) *tensor.Chunk {
	return &r.ix.Chunks[r.ix.Tensors[c.Data].First+c.N]
}

func (r *Relay) placeOf(c plan.ChunkOf) *chunkPlace { return &r.places[r.ix.Tensors[c.Data].First+c.N] }

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

// addPiece adds the piece that has these shares. What is contiguous in the file stays contiguous in
// the buffer. All shares have the same space: where the caller exchanges, that of the largest,
// so that one collective gathers them; else all that there is, since those of several pieces
// are in their buffers at the same time.
func (r *Relay) addPiece(rankShares []plan.RankShare) {
	number, own := len(r.pieces), rankShares[r.spec.Rank].Chunks
	piece := loadPiece{firstSpot: len(r.spots), endSpot: len(r.spots) + len(own),
		arrival: arrival{chunksLeft: int32(len(own)), checked: make(chan struct{})}}
	for rank := range rankShares {
		part, pos, last := rankPart{}, int64(0), (*tensor.Chunk)(nil)
		for i, c := range rankShares[rank].Chunks {
			chunk := r.chunkAt(c)
			pos += gapBefore(pos, last, chunk)
			*r.placeOf(c) = chunkPlace{len(r.parts), pos}
			pos, last = pos+int64(chunk.Stored), chunk
			if i < rankShares[rank].Common {
				part.used = pos
			}
		}
		piece.share = max(piece.share, pos)
		r.parts = append(r.parts, part)
	}
	piece.share = (piece.share + shareAlign - 1) &^ (shareAlign - 1)
	if r.carrier != nil {
		piece.share = r.shareSpace()
	}
	r.pieces = append(r.pieces, piece)
	slices.SortFunc(own, r.compareInFile)
	base := r.ringOf(number, r.spec.Rank).addressOf(number)
	for _, c := range own {
		r.spots = append(r.spots, plan.Spot{Data: c.Data, N: c.N, Group: int32(number), Bare: r.bare[c.Data],
			Dst: unsafe.Add(base, r.placeOf(c).off)})
	}
	if len(own) == 0 {
		close(piece.checked)
	}
}

// chunkPlainTensor cuts a plain tensor into raw chunks without checksums, behind chunks.
func chunkPlainTensor(chunks []tensor.Chunk, t *tensor.Tensor) []tensor.Chunk {
	const size = plainChunkBytes
	t.First, t.ChunkBytes, t.Parts = int32(len(chunks)), size, 1
	chunks = slices.Grow(chunks, int((t.Bytes+size-1)/size))
	for at := int64(0); at < t.Bytes; at += size {
		n := uint32(min(size, t.Bytes-at))
		chunks = append(chunks, tensor.Chunk{Off: t.Off + at, Stored: n, Logical: n, Codec: tensor.CodecRaw})
	}
	t.Count = int32(len(chunks)) - t.First
	return chunks
}

// sortTasksByPart sorts a plan's tasks by the parts that they are in, whose numbers are `where`.
func (r *Relay) sortTasksByPart(p *plan.Plan, where []int) {
	if slices.IsSorted(where) {
		return
	}
	next := make([]int, len(r.parts)+1) // by part: where its next task goes
	for _, k := range where {
		next[k+1]++
	}
	for k := range r.parts {
		next[k+1] += next[k]
	}
	tasks, refs, parts := slices.Clone(p.Tasks), slices.Clone(p.Refs), slices.Clone(where)
	for from, k := range parts {
		to := next[k]
		next[k]++
		p.Tasks[to], p.Refs[to], where[to] = tasks[from], refs[from], k
	}
}

// Aim sets what this rank wants: requests as those of a load, of shared tensors,
// each with a destination. It is called once, before anything is decoded; an error
// leaves the relay as it was.
func (r *Relay) Aim(reqs []plan.Request) error {
	if err := r.awaitLayout(); err != nil {
		return err
	}
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
			return errNotShared(i)
		}
	}
	tasksPlan := plan.Tasks(r.ix, wants, dest)
	where := make([]int, len(tasksPlan.Tasks))
	for i := range tasksPlan.Tasks {
		at := r.placeOf(plan.ChunkOf{Data: wants[tasksPlan.Refs[i].Want].Data, N: tasksPlan.Refs[i].N})
		if at.part < 0 {
			return errNotShared(int(tasksPlan.Refs[i].Want))
		}
		piece, rank := at.part/r.spec.Ranks, at.part%r.spec.Ranks
		stored := int64(tasksPlan.Tasks[i].Chunk.Stored)
		if r.carrier != nil && rank != r.spec.Rank && at.off+stored > r.parts[at.part].used { // it does not travel
			return errNotShared(int(tasksPlan.Refs[i].Want))
		}
		off := r.ringOf(piece, rank).offsetOf(piece) + at.off
		if off > maxSize-stored {
			return errs.New(errs.ErrEngine, "relay: request %d has a chunk at %d of a buffer",
				tasksPlan.Refs[i].Want, off)
		}
		tasksPlan.Tasks[i].Src = uint32(off)
		where[i] = at.part
	}
	for i, n := range tasksPlan.Left {
		if n == 0 && wants[i].Bytes > 0 { // plain, so without chunks
			return errNotShared(i)
		}
	}
	r.sortTasksByPart(tasksPlan, where)
	r.mu.Lock()
	defer r.mu.Unlock()
	if job.IsClosed(r.aimed) {
		return errs.New(errs.ErrArgument, "relay: it has its requests")
	}
	next := 0
	for k := range r.parts { // also of those that have none: pieces are decoded as a whole, too
		for r.parts[k].firstTask = next; next < len(where) && where[next] == k; next++ {
		}
		r.parts[k].endTask = next
	}
	r.tasks, r.refs, r.coming = tasksPlan.Tasks, tasksPlan.Refs, tasksPlan.Left
	for i, n := range tasksPlan.Left {
		if n == 0 { // it has no bytes
			r.job.Tensors.Add(1)
			r.landings.Add(i)
		}
	}
	for i := range wants {
		r.job.TotalBytes.Add(wants[i].Bytes)
	}
	r.job.TotalTensors.Store(int64(len(wants)))
	r.wants = wants
	close(r.aimed)
	return nil
}

func errNotShared(request int) error {
	return errs.New(errs.ErrArgument, "relay: request %d is for a tensor that this group does not share", request)
}
