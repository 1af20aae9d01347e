package relay

// How far the pieces of a group's load are on this rank.

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/overwire/overwire/gosrc/device/cuda/queue"
	"github.com/overwire/overwire/gosrc/job"
)

// progress is how far a relay is. mu guards everything but recycled, and the arrivals and decodings of the layout.
type progress struct {
	job        *job.Job
	lay        *layout
	mu         sync.Mutex
	recycled   atomic.Int64  // pieces with a buffer that may be filled again: [0, recycled); readers ask without mu
	queued     []int         // by rank: pieces for which the decoding of that rank's share is queued: [0, queued)
	decoded    []int         // by rank: pieces with that rank's share decoded: [0, decoded)
	sharesLeft int           // that were not decoded
	lastDecode chan struct{} // closed when sharesLeft is 0
	published  int           // pieces with a share of this rank that can be read: [0, published)
	taken      int           // pieces with a share of this rank that no other rank needs: [0, taken)
	err        error         // the first
	ours       bool          // err is not about bytes that another rank has read
}

// begin begins with the pieces of the layout.
func (p *progress) begin() {
	p.mu.Lock()
	defer p.mu.Unlock()
	ranks := p.lay.spec.Ranks
	p.sharesLeft, p.decoded, p.queued = len(p.lay.parts), make([]int, ranks), make([]int, ranks)
	if p.sharesLeft == 0 {
		close(p.lastDecode)
	}
}

// firstError is the first error.
func (p *progress) firstError() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.err
}

// failWith records the first error and ends the job. ours: it is not about bytes that another rank has read.
func (p *progress) failWith(err error, ours bool) {
	p.mu.Lock()
	if p.err == nil {
		p.err, p.ours = err, ours
		if t := p.lay.transport; t != nil && job.IsClosed(t.joined) {
			t.Board.ReportFailure()
		}
	}
	p.mu.Unlock()
	p.job.Cancel()
}

// markJoined says that the ranks are connected, and what of this one they may read.
func (p *progress) markJoined() {
	p.mu.Lock()
	defer p.mu.Unlock()
	t := p.lay.transport
	close(t.joined)
	t.Board.Publish(p.published)
	if p.err != nil {
		t.Board.ReportFailure()
	}
}

// countChunk counts a chunk of this rank's share of a piece that has arrived, and reports whether it is the last.
func (p *progress) countChunk(piece int) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	each := &p.lay.pieces[piece]
	each.chunksLeft--
	return each.chunksLeft == 0
}

// makeReadable lets the others read this rank's share of a piece.
func (p *progress) makeReadable(piece int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	close(p.lay.pieces[piece].checked)
	t := p.lay.transport
	if t == nil {
		return
	}
	for p.published < len(p.lay.pieces) && job.IsClosed(p.lay.pieces[p.published].checked) {
		p.published++
	}
	if job.IsClosed(t.joined) {
		t.Board.Publish(p.published)
	}
}

// eventBeforeFill is the event after which a rank's share of a piece may be written to where this rank has it: the
// end of the decoding of the share that was there before, which is queued. nil: there is nothing to wait for.
func (p *progress) eventBeforeFill(piece, rank int) *queue.Event {
	buffers := p.lay.ringOf(piece, rank).count
	if piece < buffers {
		return nil
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if part := p.lay.partOf(piece-buffers, rank); !part.isDecoded { // else its slot may have a later batch by now
		return part.decodeEnd
	}
	return nil
}

// hasStagingFor reports whether a rank's share of a piece may be pulled behind the decoding of the earlier share
// that has its staging: whether that decoding is queued.
func (p *progress) hasStagingFor(piece, from int) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.queued[from] > piece-p.lay.spec.Stages
}

// markQueued says that the decoding of shares, which ends with the event, is queued; nil: there is nothing
// to wait for. If this rank's share is among them, its buffer may be filled again unless other ranks need it.
func (p *progress) markQueued(of shares, end *queue.Event) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for rank := of.firstRank; rank < of.endRank; rank++ {
		part := p.lay.partOf(of.piece, rank)
		part.isQueued, part.decodeEnd = true, end
		for p.queued[rank] < len(p.lay.pieces) && p.lay.partOf(p.queued[rank], rank).isQueued {
			p.queued[rank]++
		}
	}
	p.recycleOwnBuffers()
}

// recycleOwnBuffers lets the readers fill again those of this rank's buffers that have their decoding queued and that
// no other rank needs. p.mu is held.
func (p *progress) recycleOwnBuffers() {
	free := p.queued[p.lay.spec.Rank]
	if p.lay.transport != nil {
		free = min(free, p.taken)
	}
	p.recycled.Store(int64(free))
}

// recycleTaken says that the other ranks need no share of this rank of the pieces [0, taken), and reports whether that
// is new.
func (p *progress) recycleTaken(taken int) bool {
	taken = min(taken, len(p.lay.pieces))
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.taken == taken {
		return false
	}
	p.taken = taken
	p.recycleOwnBuffers()
	return true
}

// markDecoded says that the decoding of shares has ended, and tells their owners that this rank needs them no more.
func (p *progress) markDecoded(of shares) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for rank := of.firstRank; rank < of.endRank; rank++ {
		p.lay.partOf(of.piece, rank).isDecoded = true
		p.sharesLeft--
		for p.decoded[rank] < len(p.lay.pieces) && p.lay.partOf(p.decoded[rank], rank).isDecoded {
			p.decoded[rank]++
		}
		if t := p.lay.transport; t != nil && rank != p.lay.spec.Rank {
			t.Board.ReleasePieces(rank, p.decoded[rank])
		}
	}
	if p.sharesLeft == 0 {
		close(p.lastDecode)
	}
}

// hasMovedAll reports whether this rank has decoded everything, and no other needs what it has read.
func (p *progress) hasMovedAll() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	t := p.lay.transport
	return p.sharesLeft == 0 && (t == nil || job.IsClosed(t.joined) && p.taken == len(p.lay.pieces))
}

// profile is what a relay counts of its own work.
type profile struct {
	pulled     atomic.Int64 // bytes copied from other ranks
	driver     atomic.Int64 // nanoseconds in calls of the driver that submit fetches, copies and decodes
	flight     atomic.Int64 // bytes submitted for fetching that have not arrived
	mostFlight atomic.Int64
}

// countDriverTime counts the time of calls of the driver since began.
func (p *profile) countDriverTime(began time.Time) { p.driver.Add(int64(time.Since(began))) }

// countFlight counts bytes that are submitted for fetching, or have arrived if n is negative.
func (p *profile) countFlight(n int64) {
	now := p.flight.Add(n)
	for most := p.mostFlight.Load(); now > most && !p.mostFlight.CompareAndSwap(most, now); most = p.mostFlight.Load() {
	}
}
