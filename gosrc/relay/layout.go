package relay

// This file describes a group load and the limits of its buffers, divides it into pieces and shares, and gives each
// chunk an offset in a buffer.

import (
	"cmp"
	"math"
	"runtime"
	"slices"
	"unsafe"

	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/device/cuda"
	"github.com/overwire/overwire/gosrc/device/cuda/queue"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/nodes"
	"github.com/overwire/overwire/gosrc/load"
	"github.com/overwire/overwire/gosrc/plan"
	"github.com/overwire/overwire/gosrc/tensor"
	"golang.org/x/sys/unix"
)

// A layout assigns each chunk to a piece, at an offset in a buffer. After it has been made, only its arrivals,
// decodings and task ranges change.
type layout struct {
	spec      *Spec
	seen      *tensor.Index // index of the model
	onGPU     bool
	transport *transport // nil if the caller exchanges the shares

	ix         *tensor.Index // the index with chunks for all shared tensors
	bare       []bool        // indexed by tensor: its chunks exist only in ix, without checksums
	offsets    []chunkOffset // indexed by chunk of ix
	pieces     []loadPiece
	parts      []rankPart       // sorted by piece, and within a piece by rank
	reads      []plan.ChunkRead // chunks that this rank reads, with their destinations; by piece
	fetch      *plan.Plan       // plan of reads
	fetchWants []plan.Want      // wants of fetch, one per read
}

// A loadPiece consists of one share per rank. The ranks read these shares at about the same time. In this package,
// piece means a loadPiece. The pieces of a plan are smaller: each fills one slot with bytes of one loadPiece.
type loadPiece struct {
	share              int64 // space in a buffer for each rank's share
	firstRead, endRead int   // this rank's reads: reads[firstRead:endRead]
	arrival
}

// An arrival is the progress of reading this rank's share of a piece. The relay's mu guards it.
type arrival struct {
	chunksLeft int32         // chunks that have not arrived
	checked    chan struct{} // closed when the share has been read and verified, so others may read it
}

// A rankPart is a rank's share of a piece. This rank's decode tasks for it are tasks[firstTask:endTask].
type rankPart struct {
	firstTask, endTask int
	used               int64 // bytes that other ranks copy; only the share's reader needs the rest
	decoding
}

// A decoding is the progress of decoding a share on this rank. The relay's mu guards it.
type decoding struct {
	isQueued  bool         // also true if there is nothing to decode
	decodeEnd *queue.Event // set when it is queued; nil if there is nothing to wait for
	isDecoded bool
}

// partOf returns a rank's share of a piece.
func (l *layout) partOf(piece, rank int) *rankPart { return &l.parts[piece*l.spec.Ranks+rank] }

// A chunkOffset is the location of a chunk: the number of its part, or -1 if the chunk is not shared, and its offset in
// the part.
type chunkOffset struct {
	part int
	off  int64
}

// RoomForChunk returns the maximum space that a chunk of a model takes in a rank's share. A smaller share cannot hold
// every chunk.
func RoomForChunk(m *load.Model) int64 {
	most := int64(plainChunkBytes)
	for i := range m.Seen().Tensors {
		if t := &m.Seen().Tensors[i]; t.Count > 0 {
			most = max(most, min(int64(t.ChunkBytes), t.Bytes/int64(t.Parts)))
		}
	}
	return most + 2*chunkAlign + shareAlign
}

// indexWithPlainChunks returns the model's index with added raw chunks, without checksums, for plain tensors.
func (l *layout) indexWithPlainChunks(wants []plan.Want) *tensor.Index {
	ix := l.seen
	out := &tensor.Index{Sources: ix.Sources, Tensors: slices.Clone(ix.Tensors)}
	l.bare = make([]bool, len(ix.Tensors))
	most := len(wants) // roughly the number of chunks of plain tensors
	for i := range wants {
		if t := &ix.Tensors[wants[i].Data]; t.Count == 0 && t.Bytes > 0 {
			most += int(t.Bytes / plainChunkBytes)
		}
	}
	out.Chunks = slices.Grow(slices.Clip(ix.Chunks), most)
	for i := range wants {
		if t := &out.Tensors[wants[i].Data]; t.Count == 0 && t.Bytes > 0 {
			l.bare[wants[i].Data] = true
			out.Chunks = chunkPlainTensor(out.Chunks, t)
		}
	}
	return out
}

// layOut divides the stored chunks of the tensors into pieces and shares, in the order of the files. All ranks
// compute the same pieces and shares.
func (l *layout) layOut(limits plan.Limits) error {
	spec := l.spec
	reqs := make([]plan.Request, len(spec.Tensors))
	for i, t := range spec.Tensors {
		reqs[i] = plan.Request{Tensor: t, Hi0: plan.Whole, Hi1: plan.Whole}
	}
	wants, err := plan.Check(l.seen, reqs)
	if err != nil {
		return err
	}
	l.ix = l.indexWithPlainChunks(wants)
	l.offsets = make([]chunkOffset, len(l.ix.Chunks))
	for i := range l.offsets {
		l.offsets[i].part = -1
	}
	all := make([]plan.ChunkOf, 0, len(l.ix.Chunks))
	for i := range wants {
		for n := range l.ix.Tensors[wants[i].Data].Count {
			all = append(all, plan.ChunkOf{Data: wants[i].Data, N: n})
		}
	}
	slices.SortFunc(all, l.compareInFile)
	all = slices.Compact(all) // tied tensors share their chunks
	needed := func(plan.ChunkOf) int32 { return plan.Several }
	if len(spec.Needs) > 0 {
		by, err := plan.NeededBy(l.ix, spec.Ranks, spec.Needs)
		if err != nil {
			return err
		}
		needed = func(c plan.ChunkOf) int32 { return by[l.ix.Tensors[c.Data].First+c.N] }
	}
	pieces, err := plan.Divide(all, spec.Ranks, l.spec.shareSpace()-shareAlign, needed, func(c plan.ChunkOf) int64 {
		return int64(l.chunkAt(c).Stored) + 2*chunkAlign // maximum space in a share
	})
	if err != nil {
		return err
	}
	l.reads = make([]plan.ChunkRead, 0, len(all)/spec.Ranks+len(all)/16)
	for _, rankShares := range pieces {
		l.addPiece(rankShares)
	}
	l.fetch, l.fetchWants = plan.PlanStored(l.ix, l.reads, limits)
	return nil
}

func (l *layout) compareInFile(a, b plan.ChunkOf) int {
	if by := cmp.Compare(l.ix.Tensors[a.Data].Source, l.ix.Tensors[b.Data].Source); by != 0 {
		return by
	}
	return cmp.Or(cmp.Compare(l.chunkAt(a).Off, l.chunkAt(b).Off), cmp.Compare(a.Data, b.Data), cmp.Compare(a.N, b.N))
}

func (l *layout) chunkAt(c plan.ChunkOf) *tensor.Chunk {
	return &l.ix.Chunks[l.ix.Tensors[c.Data].First+c.N]
}

func (l *layout) offsetInPart(c plan.ChunkOf) *chunkOffset {
	return &l.offsets[l.ix.Tensors[c.Data].First+c.N]
}

// gapBefore returns the space in a share between the previous chunk, which ends at pos, and a chunk. last is the
// previous chunk, or nil.
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

// addPiece adds a piece with these shares. Bytes that are contiguous in the file stay contiguous in the buffer. All
// shares of a piece get the same space. If the caller exchanges them, that is the size of the largest share, so that
// one collective can gather them. Otherwise it is all the available space, because the buffers hold shares of several
// pieces at the same time.
func (l *layout) addPiece(rankShares []plan.RankShare) {
	number, own := len(l.pieces), rankShares[l.spec.Rank].Chunks
	piece := loadPiece{firstRead: len(l.reads), endRead: len(l.reads) + len(own),
		arrival: arrival{chunksLeft: int32(len(own)), checked: make(chan struct{})}}
	for rank := range rankShares {
		part, pos, last := rankPart{}, int64(0), (*tensor.Chunk)(nil)
		for i, c := range rankShares[rank].Chunks {
			chunk := l.chunkAt(c)
			pos += gapBefore(pos, last, chunk)
			*l.offsetInPart(c) = chunkOffset{len(l.parts), pos}
			pos, last = pos+int64(chunk.Stored), chunk
			if i < rankShares[rank].Common {
				part.used = pos
			}
		}
		piece.share = max(piece.share, pos)
		l.parts = append(l.parts, part)
	}
	piece.share = (piece.share + shareAlign - 1) &^ (shareAlign - 1)
	if l.transport != nil {
		piece.share = l.spec.shareSpace()
	}
	l.pieces = append(l.pieces, piece)
	slices.SortFunc(own, l.compareInFile)
	base := l.ringOf(number, l.spec.Rank).addressOf(number)
	for _, c := range own {
		l.reads = append(l.reads, plan.ChunkRead{Data: c.Data, N: c.N, Group: int32(number), Bare: l.bare[c.Data],
			Dst: unsafe.Add(base, l.offsetInPart(c).off)})
	}
	if len(own) == 0 {
		close(piece.checked)
	}
}

// chunkPlainTensor cuts a plain tensor into raw chunks without checksums, and appends them to chunks.
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

// sortTasksByPart sorts a plan's tasks by their parts. `where` holds the part number of each task.
func (l *layout) sortTasksByPart(p *plan.Plan, where []int) {
	if slices.IsSorted(where) {
		return
	}
	next := make([]int, len(l.parts)+1) // indexed by part: index of its next task
	for _, k := range where {
		next[k+1]++
	}
	for k := range l.parts {
		next[k+1] += next[k]
	}
	tasks, refs, parts := slices.Clone(p.Tasks), slices.Clone(p.Refs), slices.Clone(where)
	for from, k := range parts {
		to := next[k]
		next[k]++
		p.Tasks[to], p.Refs[to], where[to] = tasks[from], refs[from], k
	}
}

// A shareRing is memory in which this rank holds shares of one rank, one per piece, until they are decoded.
type shareRing struct {
	base  unsafe.Pointer
	bytes int64
	first int64 // offset of the first share
	step  int64 // distance between shares
	count int   // number of shares
}

// ringOf returns the ring that holds a rank's share of a piece on this rank.
func (l *layout) ringOf(piece, rank int) shareRing {
	s, share := l.spec, l.spec.shareSpace()
	switch {
	case l.transport == nil: // one buffer holds the shares of all ranks
		b := shareRing{base: device.Pointer(uintptr(s.Ring[piece%len(s.Ring)])), bytes: s.Size, count: len(s.Ring)}
		if piece < len(l.pieces) {
			b.first = int64(rank) * l.pieces[piece].share
		}
		return b
	case rank == s.Rank || !l.onGPU:
		return l.ownersRing(rank)
	}
	staging := l.transport.staging
	return shareRing{staging.Ptr, staging.Bytes, int64((rank+s.Ranks-s.Rank-1)%s.Ranks*s.Stages) * share, share,
		s.Stages}
}

// ownersRing returns the ring in which a rank holds the shares that it reads, if there is a transport.
func (l *layout) ownersRing(rank int) shareRing {
	share, n := l.spec.shareSpace(), l.spec.Buffers
	return shareRing{l.transport.Memory(rank), int64(n) * share, 0, share, n}
}

// offsetOf returns the offset of a piece's share from base.
func (b shareRing) offsetOf(piece int) int64 { return b.first + int64(piece%b.count)*b.step }

func (b shareRing) addressOf(piece int) unsafe.Pointer { return unsafe.Add(b.base, b.offsetOf(piece)) }

// pieceOfTask returns the piece that a task of fetch belongs to.
func (l *layout) pieceOfTask(task int32) int { return int(l.reads[l.fetch.Refs[task].Want].Group) }

// countBuffers returns how many pieces can have a buffer for this rank's share at the same time.
func (l *layout) countBuffers() int {
	if l.transport != nil {
		return l.spec.Buffers
	}
	return len(l.spec.Ring)
}

// planRequests plans this rank's requests, which must have a destination and be for shared tensors. where holds the
// part number of each task.
func (l *layout) planRequests(reqs []plan.Request) (p *plan.Plan, wants []plan.Want, where []int, err error) {
	dest := make([]unsafe.Pointer, len(reqs))
	for i := range reqs {
		dest[i] = device.Pointer(reqs[i].Dest)
	}
	if wants, err = plan.Check(l.ix, reqs); err != nil {
		return nil, nil, nil, err
	}
	shared := make([]bool, len(l.ix.Tensors))
	for _, t := range l.spec.Tensors {
		shared[t] = true
	}
	for i := range wants { // a name must be shared even if it is an alias of a shared tensor
		if !shared[wants[i].Tensor] {
			return nil, nil, nil, errNotShared(i)
		}
	}
	p = plan.Tasks(l.ix, wants, dest)
	where = make([]int, len(p.Tasks))
	for i := range p.Tasks {
		want := int(p.Refs[i].Want)
		at := l.offsetInPart(plan.ChunkOf{Data: wants[want].Data, N: p.Refs[i].N})
		if at.part < 0 {
			return nil, nil, nil, errNotShared(want)
		}
		piece, rank := at.part/l.spec.Ranks, at.part%l.spec.Ranks
		stored := int64(p.Tasks[i].Chunk.Stored)
		if l.transport != nil && rank != l.spec.Rank && at.off+stored > l.parts[at.part].used { // the chunk is not sent
			return nil, nil, nil, errNotShared(want)
		}
		off := l.ringOf(piece, rank).offsetOf(piece) + at.off
		if off > maxSize-stored {
			return nil, nil, nil, errs.New(errs.ErrEngine,
				"group load: request %d has a chunk at offset %d of a buffer, which exceeds 32 bits", want, off)
		}
		p.Tasks[i].Src = uint32(off)
		where[i] = at.part
	}
	for i, n := range p.Left {
		if n == 0 && wants[i].Bytes > 0 { // a plain tensor that is not shared, so it has no chunks
			return nil, nil, nil, errNotShared(i)
		}
	}
	l.sortTasksByPart(p, where)
	return p, wants, where, nil
}

// assignTasks sets the task range of each part. Parts without tasks get an empty range, because pieces are decoded as
// a whole. The caller holds progress.mu.
func (l *layout) assignTasks(where []int) {
	next := 0
	for k := range l.parts {
		for l.parts[k].firstTask = next; next < len(where) && where[next] == k; next++ {
		}
		l.parts[k].endTask = next
	}
}

func errNotShared(request int) error {
	return errs.New(errs.ErrArgument, "group load: request %d is for a tensor that this group does not share", request)
}

// A Spec describes what the ranks of a group load together. Tensors and Size must be equal on all ranks of the group.
type Spec struct {
	Tensors []int64 `json:"tensors"` // shared as whole tensors
	// Ring has the addresses of buffers of Size bytes on the device. They must stay valid until the job has ended.
	Ring []uint64 `json:"ring"`
	Size int64    `json:"size"`
	// Mapped makes the engine move the shares between ranks, after Join. It allocates memory for Buffers shares that
	// this rank has read, which the other ranks map, and on a GPU also staging memory for Stages shares of each other
	// rank. The caller then only sets the requests (Aim).
	Mapped  bool `json:"exchange"`
	Buffers int  `json:"buffers"`
	Stages  int  `json:"stages"`
	// Needs, if Mapped is set, are the slices that each rank of this host needs. Dest of each request holds the rank.
	// Slices may overlap. Without Needs, every rank needs everything. If only one rank needs a slice, that rank
	// reads it.
	Needs []plan.Request `json:"-"`
	Ranks int            `json:"ranks"` // number of ranks in the group
	Here  int            `json:"here"`  // how many of them are on this host; 0 means all
	Rank  int            `json:"rank"`  // this rank, in [0, Ranks)
	load.Options
}

const (
	// shareAlign is the alignment of shares in a buffer.
	shareAlign = 256
	// chunkAlign is the alignment of chunks that are aligned in the file. X16 needs it.
	chunkAlign = 16
	// plainChunkBytes is the size of the chunks that plain tensors are cut into.
	plainChunkBytes = 1<<20 - 8<<10
	// maxRanks exceeds the number of GPUs of any host. If the caller exchanges the shares, there may be more ranks,
	// on several hosts.
	maxRanks = 256
	// slotsForSums is the number of slots of the decoding queue that are reserved for comparing checksums.
	slotsForSums = 2
	// mostBatches is the maximum number of batches of shares that a GPU decodes or waits for. Shares that become ready
	// in the meantime form the next batch, because decoding a few chunks takes as long as decoding many.
	mostBatches = load.ExchangeBatches - slotsForSums
	// mostReads is the maximum number of shares in a batch. A slot can wait for that many streams.
	mostReads = 8
	// maxSize is the maximum size of a buffer. A decode task stores its chunk's offset in 32 bits.
	maxSize = math.MaxUint32
	// maxBuffers exceeds the number of buffers of any ring.
	maxBuffers = 64
)

// checkSize checks the size of the buffers before memory is allocated for them. A buffer holds a share of each rank.
func (s *Spec) checkSize() error {
	most := s.Size // upper bound of a chunk's offset in a decode task
	if s.Mapped {
		most = max(s.Size/int64(s.Ranks)*int64(s.Buffers), s.Size*int64(s.Stages))
	}
	if s.Size > maxSize || most > maxSize || s.Size/shareAlign < int64(s.Ranks) {
		return errs.New(errs.ErrArgument,
			"group load: invalid buffers of %d bytes for %d ranks: expected at least %d per rank, and at most %d",
			s.Size, s.Ranks, shareAlign, maxSize)
	}
	return nil
}

// shareSpace returns the space for each rank's share in a buffer.
func (s *Spec) shareSpace() int64 { return s.Size / int64(s.Ranks) &^ (shareAlign - 1) }

// shares identifies the shares of the ranks [firstRank, endRank) of a piece.
type shares struct{ piece, firstRank, endRank int }

// coresAndRanks returns how many cores this rank reads on, and how many ranks share them. On a host with several
// NUMA nodes these are the cores of its GPU's node.
func coresAndRanks(gpu *cuda.Device, spec *Spec) (cores, ranks int) {
	var may unix.CPUSet
	var place *nodes.Place
	if gpu != nil && gpu.NearNode() != nil && unix.SchedGetaffinity(0, &may) == nil {
		place = gpu.NearNode()
	}
	return countCores(cmp.Or(spec.Here, spec.Ranks), runtime.NumCPU(), place, &may, nodes.System)
}

// countCores implements coresAndRanks for a number of ranks. It counts the cores of the place that are in `may`, or all
// cores of the process if there are none. root is the directory of the host's sysfs.
func countCores(ranks, cores int, place *nodes.Place, may *unix.CPUSet, root string) (mine, with int) {
	if near, all := place.Within(may); near.Count() > 0 {
		return near.Count(), ranksSharing(place.Ranks(ranks), near.Count(), all)
	}
	return cores, ranksSharing(ranks, cores, nodes.Online(root))
}

// ranksSharing returns how many ranks share the cores that this process may run on: all ranks, or 1 if a launcher has
// given each rank its own part of the host's cores.
func ranksSharing(ranks, cores, all int) int {
	if all >= ranks && cores <= all/ranks {
		return 1
	}
	return ranks
}
