// Package gather lets the ranks of a host hold the stored bytes of a model's blocks together.
//
// The bytes of all blocks are in one file in memory (the store), which all ranks map. Each rank writes, pins and copies
// only its part of each block. All ranks can read all parts, even after a rank has died.
package gather

import (
	"context"
	"math"
	"sync"
	"unsafe"

	"github.com/overwire/overwire/gosrc/device/cuda"
	"github.com/overwire/overwire/gosrc/device/cuda/stream"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/peers"
)

// A Gather is one rank's membership in the group.
//
// The ranks exchange the results of OfferStore, and all pass them to JoinStore. To fetch a block, all ranks call
// MeetRanks, and on GPUs then CopyPart and TakeBlock. All must fetch the same blocks in the same order. If ctx ends too
// early, MeetRanks returns too few blocks, CopyPart returns false and TakeBlock returns 0. The caller can then repeat
// the call with the same arguments. After an error the ranks are out of step, and only ReportFailure, CloseRing and
// Close may be called.
//
// The methods are safe for concurrent use.
type Gather struct {
	mu        sync.Mutex
	gpu       *cuda.Device // nil on the host
	rank      int
	ranks     int
	bytes     int64
	store     *peers.Peers // the memory of rank 0 is the store
	isJoined  bool
	ring      *ring  // nil before OpenRing
	meetCount uint32 // number of blocks for which the ranks have met
}

// BlockParts describes a block's stored bytes, which begin at offset At of the store. Rank r holds Part bytes, from
// byte r*Part of the block. The last parts may be shorter or empty.
type BlockParts struct {
	At, Bytes, Part int64
	Whole           bool // each rank copies all parts from the host
}

// partOf returns the offset and length of a rank's part in the block.
func (p *BlockParts) partOf(rank int) (off, n int64) {
	off = min(int64(rank)*p.Part, p.Bytes)
	return off, min(p.Part, p.Bytes-off)
}

// A ring has this rank's buffers on its GPU, which the other ranks map. Each call of CopyPart makes a piece, which has
// the bytes of a block. Piece n is in buffer n modulo the number of buffers. A rank publishes a piece when its part has
// been copied to the GPU. The other ranks then copy the part to their own buffers, and release the piece. The buffer is
// filled again after all ranks have released the piece in it.
//
// The host waits for copies of parts, and never for decoding or computation.
type ring struct {
	*peers.Peers
	isMapped      bool
	bytes         int64 // of a buffer
	buffers       []buffer
	copyCount     int   // number of pieces for which CopyPart has returned true
	takeCount     int   // the same for TakeBlock
	publishCount  int   // number of pieces that the others can read from this rank
	pullCounts    []int // indexed by rank: number of pieces for which the copy from it has been queued
	releaseCounts []int // indexed by rank: number of pieces that this rank no longer needs from it
}

// A buffer has the stored bytes of a block, and for each rank the stream that copies its part and a mark after the
// copy.
type buffer struct {
	piece   BlockParts
	at      unsafe.Pointer
	streams []uintptr
	marks   []stream.Mark
}

// New makes a rank's Gather, with a store of the given size. gpu is nil on the host.
func New(gpu *cuda.Device, bytes int64, rank, ranks int) (*Gather, error) {
	store, err := peers.New(nil, bytes, rank, ranks) // only the pages that are written take memory
	if err != nil {
		return nil, err
	}
	return &Gather{gpu: gpu, rank: rank, ranks: ranks, bytes: bytes, store: store}, nil
}

// OfferStore returns the store's offer to the other ranks.
func (g *Gather) OfferStore() peers.Offer { return g.store.Offer() }

// JoinStore connects the ranks. offers has the results of their OfferStore in rank order. It returns the address of the
// store in this process.
func (g *Gather) JoinStore(ctx context.Context, offers []peers.Offer) (uintptr, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	err := g.store.Join(offers)
	if err == nil && g.rank != 0 {
		err = g.store.MapMemoryOf(0)
	}
	if err == nil {
		err = g.store.Board.AwaitJoined(ctx)
	}
	g.isJoined = err == nil
	return uintptr(g.store.Memory(0)), ifLate(ctx, err)
}

// MeetRanks announces that this rank fetches a block, and waits until all ranks have announced a block. It returns the
// blocks in rank order. If ctx ends first, it returns fewer.
func (g *Gather) MeetRanks(ctx context.Context, block uint32) ([]uint32, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.isJoined {
		return nil, errs.New(errs.ErrArgument, "the ranks are not connected")
	}
	blocks, err := g.store.Board.MeetAt(ctx, g.meetCount+1, block)
	if len(blocks) == g.ranks {
		g.meetCount++
	}
	return blocks, err
}

// OpenRing makes this rank's buffers, and returns its offer to the other ranks.
func (g *Gather) OpenRing(buffers int, bytes int64) (peers.Offer, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.gpu == nil || g.ring != nil || buffers < 1 || bytes < 1 || bytes > math.MaxInt64/int64(buffers) {
		return peers.Offer{}, errs.New(errs.ErrArgument, "cannot make %d buffers of %d bytes: expected at least one "+
			"buffer and one byte, a GPU, and no ring yet", buffers, bytes)
	}
	p, err := peers.New(g.gpu, int64(buffers)*bytes, g.rank, g.ranks)
	if err != nil {
		return peers.Offer{}, err
	}
	r := &ring{Peers: p, bytes: bytes, buffers: make([]buffer, buffers), pullCounts: make([]int, g.ranks),
		releaseCounts: make([]int, g.ranks)}
	g.ring = r
	for n := range r.buffers {
		b := &r.buffers[n]
		b.at, b.marks = unsafe.Add(p.Memory(g.rank), int64(n)*bytes), make([]stream.Mark, g.ranks)
		for range g.ranks {
			s, err := g.gpu.NewStream()
			if err != nil {
				return peers.Offer{}, err
			}
			b.streams = append(b.streams, s)
		}
	}
	return p.Offer(), nil
}

// JoinRing maps the buffers of the other ranks. offers has the results of their OpenRing in rank order.
// errs.ErrNotSupported means that the GPUs cannot map each other's memory. All pieces must then be Whole.
func (g *Gather) JoinRing(ctx context.Context, offers []peers.Offer) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.ring == nil {
		return errNoRing()
	}
	err := g.ring.Join(offers)
	if err == nil {
		err = g.ring.MapOthers(ctx)
	}
	g.ring.isMapped = err == nil
	if err != nil {
		g.ring.Board.ReportFailure() // the others may be waiting for their turn
	}
	return ifLate(ctx, err)
}

// CopyPart waits until a buffer is free, and queues the copy of this rank's part of a piece. The copy waits for the
// work that is now queued on the stream after, which decodes the earlier pieces.
func (g *Gather) CopyPart(ctx context.Context, p BlockParts, after uintptr) (bool, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	r := g.ring
	if r == nil || r.copyCount-r.takeCount >= len(r.buffers) {
		return false, errNoRing()
	}
	if err := g.checkParts(&p); err != nil {
		return false, err
	}
	last := r.copyCount - len(r.buffers) // the piece that is in the buffer now
	if ok, err := g.awaitCopies(ctx, p.Whole, func() (bool, error) { return r.isReleased(g.rank, last), nil }); !ok {
		return false, err
	}
	b, previous := &r.buffers[r.copyCount%len(r.buffers)], &r.buffers[max(0, r.copyCount-1)%len(r.buffers)]
	b.piece = p
	for rank, s := range b.streams {
		// Two copies at a time would share the link, and the one that is needed first would be late.
		if err := g.gpu.MakeStreamWait(s, after, previous.streams[rank]); err != nil {
			return false, err
		}
		if rank == g.rank || p.Whole {
			if err := g.queueCopy(b, rank, unsafe.Add(g.store.Memory(0), p.At)); err != nil {
				return false, err
			}
		}
	}
	r.copyCount++
	return true, nil
}

// TakeBlock waits until all parts of the oldest piece are on a GPU, and makes a stream wait for their copies to this
// rank's buffer. It returns the address of the buffer. The caller must queue the work that reads the buffer before the
// call of CopyPart that fills it again.
func (g *Gather) TakeBlock(ctx context.Context, on uintptr) (uintptr, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	r := g.ring
	if r == nil || r.takeCount == r.copyCount {
		return 0, errNoRing()
	}
	b := &r.buffers[r.takeCount%len(r.buffers)]
	if ok, err := g.awaitCopies(ctx, b.piece.Whole, func() (bool, error) { return g.pullParts(b) }); !ok {
		return 0, err
	}
	if err := g.gpu.MakeStreamWait(on, b.streams...); err != nil {
		return 0, err
	}
	r.takeCount++
	return uintptr(b.at), nil
}

// pullParts queues the copies of other ranks' parts that can be read, and reports whether all are queued and the other
// ranks can read this rank's part.
func (g *Gather) pullParts(b *buffer) (all bool, err error) {
	r := g.ring
	all = r.publishCount > r.takeCount
	for rank := range r.pullCounts {
		if rank == g.rank || r.pullCounts[rank] > r.takeCount {
			continue
		}
		if r.Board.CountPublished(rank) <= r.takeCount {
			all = false
			continue
		}
		from := unsafe.Add(r.Memory(rank), uintptr(b.at)-uintptr(r.Memory(g.rank)))
		if err := g.queueCopy(b, rank, from); err != nil {
			return false, err
		}
		r.pullCounts[rank]++
	}
	return all, nil
}

// queueCopy queues the copy of a rank's part. from is the address of the whole piece.
func (g *Gather) queueCopy(b *buffer, rank int, from unsafe.Pointer) error {
	off, n := b.piece.partOf(rank)
	to, at := uint64(uintptr(b.at)+uintptr(off)), uint64(uintptr(from)+uintptr(off))
	if err := g.gpu.Copy(stream.Order{Stream: b.streams[rank]}, to, at, n, false); err != nil {
		return err
	}
	return g.gpu.SetMark(&b.marks[rank], b.streams[rank])
}

// awaitCopies polls until ready returns true. If the piece is whole, it does not wait. It returns false if ctx has
// ended, and an error if another rank has failed, is gone or has closed.
func (g *Gather) awaitCopies(ctx context.Context, whole bool, ready func() (bool, error)) (bool, error) {
	var pace peers.Pacer
	for !whole {
		err := g.announceCopies()
		if err == nil {
			var ok bool
			if ok, err = ready(); ok || err != nil {
				return ok, err
			}
			err = g.store.Board.CheckPresent()
		}
		if err != nil || ctx.Err() != nil {
			return false, err
		}
		pace.RestUnless(false)
	}
	return true, nil
}

// announceCopies publishes and releases parts after their copies have ended.
func (g *Gather) announceCopies() error {
	r := g.ring
	hasEnded := func(piece, rank int) (bool, error) {
		return g.gpu.HasPassed(&r.buffers[piece%len(r.buffers)].marks[rank])
	}
	for r.publishCount < r.copyCount {
		ok, err := hasEnded(r.publishCount, g.rank)
		if !ok {
			return err
		}
		r.publishCount++
		r.Board.Publish(r.publishCount)
	}
	for rank := range r.releaseCounts {
		for rank != g.rank && r.releaseCounts[rank] < r.pullCounts[rank] {
			ok, err := hasEnded(r.releaseCounts[rank], rank)
			if err != nil {
				return err
			}
			if !ok {
				break
			}
			r.releaseCounts[rank]++
			r.Board.ReleasePieces(rank, r.releaseCounts[rank])
		}
	}
	return nil
}

// isReleased reports whether all copies of a piece have ended, on all ranks.
func (r *ring) isReleased(own, piece int) bool {
	for rank, n := range r.releaseCounts {
		if rank != own && n <= piece {
			return false
		}
	}
	return r.publishCount > piece && r.Board.CountTaken() > piece
}

// ReportFailure tells the other ranks that this one has failed.
func (g *Gather) ReportFailure() { g.store.Board.ReportFailure() }

// CloseRing waits for this rank's copies and frees its buffers.
func (g *Gather) CloseRing() {
	g.mu.Lock()
	defer g.mu.Unlock()
	r := g.ring
	if r == nil {
		return
	}
	g.ring = nil
	for n := range r.buffers {
		for _, s := range r.buffers[n].streams {
			g.gpu.SyncAndFreeStream(s)
		}
		for rank := range r.buffers[n].marks {
			g.gpu.FreeMark(&r.buffers[n].marks[rank])
		}
	}
	leavePeers(r.Peers)
}

// Close frees everything, and waits briefly for the other ranks. Those that are late can still read the store.
func (g *Gather) Close() {
	g.CloseRing()
	g.mu.Lock()
	defer g.mu.Unlock()
	leavePeers(g.store)
}

// leavePeers ends and closes this process's membership. Memory that others still use is freed after they have ended.
func leavePeers(p *peers.Peers) {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	_ = p.End(ctx, true)
	p.Close()
}

// ifLate returns err. If err only says that ctx has ended, it returns an errs.ErrIO instead.
func ifLate(ctx context.Context, err error) error {
	if err != nil && err == context.Cause(ctx) {
		return errs.New(errs.ErrIO, "the other ranks of this host have not joined in time")
	}
	return err
}

// checkParts returns an error if a block is outside the store, or is larger than a buffer.
func (g *Gather) checkParts(p *BlockParts) error {
	if p.At < 0 || p.Bytes < 0 || p.Part <= 0 || p.Bytes > g.ring.bytes || p.At > g.bytes-p.Bytes ||
		p.Part < (p.Bytes+int64(g.ranks)-1)/int64(g.ranks) || !p.Whole && !g.ring.isMapped || !g.isJoined {
		return errs.New(errs.ErrArgument, "invalid block: %d bytes at %d in parts of %d: expected at most %d bytes "+
			"in %d parts, in a store of %d, on connected ranks", p.Bytes, p.At, p.Part, g.ring.bytes, g.ranks, g.bytes)
	}
	return nil
}

func errNoRing() error {
	return errs.New(errs.ErrArgument, "there is no ring, no free buffer, or no piece to take")
}
