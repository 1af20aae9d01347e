package relay

// This file tracks the progress of a group load's pieces on this rank.

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/overwire/overwire/gosrc/device/cuda/queue"
	"github.com/overwire/overwire/gosrc/job"
)

// progress is the progress of a relay. mu guards all fields except recycled, and also the arrivals and decodings of
// the layout.
type progress struct {
	job        *job.Job
	lay        *layout
	mu         sync.Mutex
	recycled   atomic.Int64  // buffers of the pieces [0, recycled) may be refilled; read without mu
	queued     []int         // indexed by rank: decoding of its shares of the pieces [0, queued) is queued
	decoded    []int         // indexed by rank: its shares of the pieces [0, decoded) are decoded
	sharesLeft int           // shares that are not decoded yet
	lastDecode chan struct{} // closed when sharesLeft is 0
	published  int           // this rank's shares of the pieces [0, published) can be read
	taken      int           // this rank's shares of the pieces [0, taken) are no longer needed by other ranks
	err        error         // the first error
	ours       bool          // err does not concern bytes read by another rank
}

// begin initializes the counts for the pieces of the layout.
func (p *progress) begin() {
	p.mu.Lock()
	defer p.mu.Unlock()
	ranks := p.lay.spec.Ranks
	p.sharesLeft, p.decoded, p.queued = len(p.lay.parts), make([]int, ranks), make([]int, ranks)
	if p.sharesLeft == 0 {
		close(p.lastDecode)
	}
}

func (p *progress) firstError() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.err
}

// failWith records an error if it is the first one, and ends the job. ours means that the error does not concern bytes
// read by another rank.
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

// markJoined records that the ranks are connected, and publishes the pieces that they can already read from this rank.
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

// countChunk counts an arrived chunk of this rank's share of a piece, and reports whether it is the last one.
func (p *progress) countChunk(piece int) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	each := &p.lay.pieces[piece]
	each.chunksLeft--
	return each.chunksLeft == 0
}

// makeReadable allows other ranks to read this rank's share of a piece.
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

// eventBeforeFill returns the event to wait for before a rank's share of a piece may be written to this rank's memory.
// It marks the end of decoding the share that is there now. nil means that there is nothing to wait for.
func (p *progress) eventBeforeFill(piece, rank int) *queue.Event {
	buffers := p.lay.ringOf(piece, rank).count
	if piece < buffers {
		return nil
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if part := p.lay.partOf(piece-buffers, rank); !part.isDecoded { // if it is decoded, a later batch may use its slot
		return part.decodeEnd
	}
	return nil
}

// hasStagingFor reports whether a rank's share of a piece may be pulled. The decoding of the share that is now in the
// same staging memory must be queued.
func (p *progress) hasStagingFor(piece, from int) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.queued[from] > piece-p.lay.spec.Stages
}

// markQueued records that the decoding of shares is queued and ends with the event end, or nil if there is nothing to
// wait for. If this rank's share is among them, its buffer may be refilled unless other ranks need it.
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

// recycleOwnBuffers allows readers to refill this rank's buffers if their decoding is queued and no other rank
// needs them. The caller holds p.mu.
func (p *progress) recycleOwnBuffers() {
	free := p.queued[p.lay.spec.Rank]
	if p.lay.transport != nil {
		free = min(free, p.taken)
	}
	p.recycled.Store(int64(free))
}

// recycleTaken records that other ranks no longer need this rank's shares of the pieces [0, taken), and reports
// whether that is new.
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

// markDecoded records that shares have been decoded, and tells their owners that this rank no longer needs them.
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

// hasMovedAll reports whether this rank has decoded everything and no other rank needs its shares.
func (p *progress) hasMovedAll() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	t := p.lay.transport
	return p.sharesLeft == 0 && (t == nil || job.IsClosed(t.joined) && p.taken == len(p.lay.pieces))
}

// profile counts the bytes and times of a relay.
type profile struct {
	pulled     atomic.Int64 // bytes copied from other ranks
	driver     atomic.Int64 // nanoseconds in driver calls that submit fetches, copies and decodes
	flight     atomic.Int64 // bytes submitted to the GPU that have not arrived yet
	mostFlight atomic.Int64
}

// countDriverTime adds the time since began to the time of driver calls.
func (p *profile) countDriverTime(began time.Time) { p.driver.Add(int64(time.Since(began))) }

// countFlight adds bytes submitted to the GPU. A negative n subtracts bytes that have arrived.
func (p *profile) countFlight(n int64) {
	now := p.flight.Add(n)
	for most := p.mostFlight.Load(); now > most && !p.mostFlight.CompareAndSwap(most, now); most = p.mostFlight.Load() {
	}
}
