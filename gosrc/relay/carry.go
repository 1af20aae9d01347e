package relay

// This file has relays whose pieces the engine itself brings from rank to rank, over
// memory that the processes of a host map of each other.

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/device/cuda"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/spawn"
	"github.com/overwire/overwire/gosrc/peers"
)

// A carrier brings the pieces of a relay from rank to rank. No rank decodes what was not
// compared with its checksum where it was read.
//
// A rank reads its shares into memory that the other ranks map, one by one, while the first
// shares are read. It publishes a piece when its share was checked and has arrived there. Each
// other rank waits for that by itself, copies the share to memory of its own (staging), on a
// stream for each rank, and decodes behind the copy; columns of plain tensors (strips) it copies
// to where these belong. On the host it decodes where the bytes are. Then it says that it needs
// the share no more. A rank fills its memory again when all others have said so, whatever they
// have of other ranks: one that reads late delays only what it reads.
type carrier struct {
	*peers.Peers
	staging device.Memory // on a GPU: spec.Stages shares of each other rank
	streams []uintptr     // on a GPU, by rank
	joined  chan struct{}
	mapped  []chan struct{} // by rank: closed when its memory is mapped
	aimed   chan struct{}
	gone    bool // disconnected
	work    sync.WaitGroup
	waits   []atomic.Int64 // by rank: nanoseconds; see Report.Waited
	own     chan ranksRead // what is on its way to this rank's GPU, or there, of its own shares
	pulls   chan ranksRead // likewise of the others'

	// Guarded by the relay's mu.
	asked     bool // Join was called
	live      bool // joined
	published int  // pieces whose shares of this rank have arrived: [0, published)
	taken     int  // pieces whose shares of this rank no other rank needs: [0, taken)
}

func (r *Relay) makeCarrier() error {
	spec, gpu := r.spec, r.target.GPU
	if spec.Buffers < 1 || spec.Buffers > maxBuffers || gpu != nil && spec.Stages < 1 || spec.Stages > maxBuffers ||
		len(spec.Ring) > 0 {
		return errs.New(errs.ErrArgument, "relay: %d and %d shares of %d bytes for %d ranks, and %d buffers",
			spec.Buffers, spec.Stages, spec.Size, spec.Ranks, len(spec.Ring))
	}
	p, err := peers.New(gpu, int64(spec.Buffers)*r.shareSpace(), spec.Rank, spec.Ranks)
	if err != nil {
		return err
	}
	c := &carrier{Peers: p, joined: make(chan struct{}), aimed: make(chan struct{}),
		waits: make([]atomic.Int64, spec.Ranks), own: make(chan ranksRead, spec.Buffers),
		pulls: make(chan ranksRead, spec.Ranks*spec.Stages)}
	r.carrier = c
	for range spec.Ranks {
		c.mapped = append(c.mapped, make(chan struct{}))
	}
	if gpu == nil {
		return nil
	}
	staging, err := gpu.Alloc([]int64{int64(spec.Stages*(spec.Ranks-1)) * r.shareSpace()}) // of one rank: none
	if err != nil {
		return err
	}
	c.staging = staging[0]
	for range spec.Ranks {
		stream, err := gpu.NewStream()
		if err != nil {
			return err
		}
		c.streams = append(c.streams, stream)
	}
	return nil
}

// A shareRing is memory in which this rank has shares of a rank, of a piece each, until they are decoded.
type shareRing struct {
	base  unsafe.Pointer
	bytes int64
	first int64 // where the first share begins
	step  int64 // from share to share
	count int   // of shares
}

// ringOf is where this rank finds a rank's share of a piece.
func (r *Relay) ringOf(piece, rank int) shareRing {
	s, share := r.spec, r.shareSpace()
	switch {
	case r.carrier == nil: // a buffer for all ranks
		b := shareRing{base: device.Pointer(uintptr(s.Ring[piece%len(s.Ring)])), bytes: s.Size, count: len(s.Ring)}
		if piece < len(r.pieces) {
			b.first = int64(rank) * r.pieces[piece].share
		}
		return b
	case rank == s.Rank || r.target.GPU == nil:
		return shareRing{r.carrier.Memory(rank), int64(s.Buffers) * share, 0, share, s.Buffers}
	}
	staging := r.carrier.staging
	return shareRing{staging.Ptr, staging.Bytes, int64((rank+s.Ranks-s.Rank-1)%s.Ranks*s.Stages) * share, share,
		s.Stages}
}

// offsetOf is where in the memory the share of a piece begins.
func (b shareRing) offsetOf(piece int) int64 { return b.first + int64(piece%b.count)*b.step }

// localShareAt is the address of that share.
func (r *Relay) localShareAt(piece, rank int) unsafe.Pointer {
	b := r.ringOf(piece, rank)
	return unsafe.Add(b.base, b.offsetOf(piece))
}

// ownersShareAt is where a rank itself has its share of a piece, where the engine exchanges.
func (r *Relay) ownersShareAt(piece, rank int) unsafe.Pointer {
	return unsafe.Add(r.carrier.Memory(rank), int64(piece%r.spec.Buffers)*r.shareSpace())
}

// closeCarrier waits for the pulls in flight, and for the other ranks to end theirs; when ctx
// has ended, not long. Once is enough.
func (r *Relay) closeCarrier(ctx context.Context) {
	c := r.carrier
	if c == nil || c.gone {
		return
	}
	c.gone = true
	for _, s := range c.streams {
		r.target.GPU.SyncAndFreeStream(s)
	}
	c.streams = nil
	c.staging.Release()
	r.mu.Lock()
	good := r.err == nil
	r.mu.Unlock()
	if err := c.End(ctx, good); err != nil {
		r.failWith(r.model.PlaceError("stage", err), true)
	}
	c.Close()
}

// Offer is for the other ranks of the host.
func (r *Relay) Offer() (peers.Offer, error) {
	if r.carrier == nil {
		return peers.Offer{}, errs.New(errs.ErrArgument, "relay: it does not exchange by itself")
	}
	return r.carrier.Offer(), nil
}

// Join connects the relay with those of the other ranks, by their offers in order; it then maps
// their memory. An error ends the job, also one that comes later; one of ErrNotSupported
// says that the ranks cannot reach each other's memory (Report.Unmapped).
func (r *Relay) Join(offers []peers.Offer) error {
	c := r.carrier
	r.mu.Lock()
	if c == nil || c.asked || r.shut || r.err != nil {
		defer r.mu.Unlock()
		if r.err != nil {
			return r.err
		}
		return errs.New(errs.ErrArgument,
			"relay: it cannot join: the caller exchanges the shares, or it has joined or ended already")
	}
	c.asked = true
	r.busy.Add(1)
	r.mu.Unlock()
	defer r.busy.Done()
	if err := c.Join(offers); err != nil {
		err = r.model.PlaceError("stage", err)
		r.failWith(err, true)
		return err
	}
	r.mu.Lock()
	c.live = true
	c.Publish(c.published)
	failed := r.err != nil
	r.mu.Unlock()
	if failed {
		c.ReportFailure()
	}
	close(c.joined)
	return nil
}

func (r *Relay) mapOthers(ctx context.Context) error {
	c := r.carrier
	if err := awaitChannel(ctx, c.joined); err != nil {
		return err
	}
	close(c.mapped[r.spec.Rank])
	if err := c.AwaitMapTurn(ctx); err != nil {
		return err
	}
	for n := range r.spec.Ranks - 1 {
		rank := (r.spec.Rank + 1 + n) % r.spec.Ranks
		if err := c.MapMemoryOf(rank); err != nil {
			r.unmapped.Store(errors.Is(err, errs.ErrNotSupported))
			return err
		}
		close(c.mapped[rank])
	}
	c.EndMapTurn()
	return nil
}

// beginCarrying brings all pieces, in the background: those of each rank by themselves.
func (r *Relay) beginCarrying(ctx context.Context) {
	begin := func(work func(context.Context) error) {
		spawn.GoFor(&r.carrier.work, "relay carry", func() {
			err := spawn.Guard("relay carry", func() error { return work(ctx) })
			if err != nil && ctx.Err() == nil {
				r.failWith(r.model.PlaceError("stage", err), !errors.Is(err, peers.ErrOther))
			}
		})
	}
	begin(r.recycleTakenBuffers)
	begin(r.mapOthers)
	begin(func(ctx context.Context) error {
		if err := r.awaitExchangeStart(ctx); err != nil {
			return err
		}
		if r.queue != nil {
			begin(func(ctx context.Context) error { return r.decodeBatches(ctx, true) })
			begin(func(ctx context.Context) error { return r.decodeBatches(ctx, false) })
		}
		for from := range r.spec.Ranks {
			begin(func(ctx context.Context) error { return r.carryShares(ctx, from) })
		}
		return nil
	})
}

// awaitExchangeStart waits until the ranks have met and this one's requests are known, and orders what is
// copied and decoded behind what is on the caller's stream: strips go where its work was.
func (r *Relay) awaitExchangeStart(ctx context.Context) error {
	for _, ready := range []chan struct{}{r.carrier.joined, r.carrier.aimed} {
		if err := awaitChannel(ctx, ready); err != nil {
			return err
		}
	}
	if r.spec.Stream == 0 || r.queue == nil {
		return nil
	}
	for _, s := range r.carrier.streams {
		if err := r.target.GPU.MakeStreamWait(s, uintptr(r.spec.Stream)); err != nil {
			return err
		}
	}
	return r.queue.FollowStream(uintptr(r.spec.Stream))
}

// carryShares gets and decodes what a rank has read, piece after piece.
func (r *Relay) carryShares(ctx context.Context, from int) error {
	c, own := r.carrier, from == r.spec.Rank
	if err := awaitChannel(ctx, c.mapped[from]); err != nil {
		return err
	}
	for k := range r.pieces {
		p, wanted := &r.pieces[k], r.wantsAnyOf(k, from)
		began := time.Now()
		var err error
		switch {
		case own:
			err = awaitChannel(ctx, p.checked)
		case wanted:
			err = c.AwaitPiece(ctx, from, k+1)
		}
		c.waits[from].Add(int64(time.Since(began)))
		if err != nil {
			return err
		}
		of := ranksRead{k, from, from + 1}
		switch {
		case !wanted:
			r.markQueued(k, from, from+1, nil)
			r.markDecoded(of)
			continue
		case r.queue == nil:
			if err := r.decodeBatch([]ranksRead{of}); err != nil {
				return nil //nolint:nilerr // decode has said it
			}
			continue
		case !own:
			if err := r.pullShare(ctx, k, from); err != nil {
				return err
			}
		}
		select {
		case r.waitingReads(own) <- of:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return nil
}

// decodeBatches decodes on the GPU what has arrived, all that has while it waits for a slot
// together: this rank's own shares, or those of the others.
func (r *Relay) decodeBatches(ctx context.Context, own bool) error {
	ready, left := r.waitingReads(own), 0
	for i := range r.parts {
		if from := i % r.spec.Ranks; (from == r.spec.Rank) == own && r.wantsAnyOf(i/r.spec.Ranks, from) {
			left++
		}
	}
	for left > 0 {
		var batch []ranksRead
		select {
		case of := <-ready:
			batch = append(batch, of)
		case <-ctx.Done():
			return context.Cause(ctx)
		}
		slot, err := r.queue.Get(ctx)
		if err != nil {
			return err
		}
		for more := true; more && len(batch) < mostReads; {
			select {
			case of := <-ready:
				batch = append(batch, of)
			default:
				more = false
			}
		}
		left -= len(batch)
		var streams []uintptr
		for _, of := range batch {
			if s := r.carrier.streams[of.lo]; !own && !slices.Contains(streams, s) {
				streams = append(streams, s)
			}
		}
		if err := r.queueDecoding(slot.(*cuda.Slot), batch, streams); err != nil {
			return nil //nolint:nilerr // it has said it
		}
	}
	return nil
}

// waitingReads is what waits for its decoding: of this rank's own shares, or of the others'.
func (r *Relay) waitingReads(own bool) chan ranksRead {
	if own {
		return r.carrier.own
	}
	return r.carrier.pulls
}

// wantsAnyOf reports whether this rank wants any of what a rank reads of a piece.
func (r *Relay) wantsAnyOf(piece, from int) bool {
	q := r.partOf(piece, from)
	return q.last > q.first || len(q.strips) > 0
}

// pullShare queues the copy of a rank's share, behind the decoding of the buffer's earlier
// piece.
func (r *Relay) pullShare(ctx context.Context, piece, from int) error {
	c, part := r.carrier, r.partOf(piece, from)
	if err := r.awaitLocked(ctx, func() bool { return r.queued[from] > piece-r.spec.Stages }); err != nil {
		return err
	}
	defer r.countDriverTime(time.Now())
	if err := r.pullStrips(piece, from); err != nil {
		return err
	}
	if part.used == 0 || part.last == part.first {
		return nil
	}
	if err := r.eventBeforeFill(piece, from).MakeStreamWait(c.streams[from]); err != nil {
		return err
	}
	to, at := r.localShareAt(piece, from), r.ownersShareAt(piece, from)
	r.pulled.Add(part.used)
	return r.target.GPU.Copy(cuda.Order{Stream: c.streams[from]}, uint64(uintptr(to)), uint64(uintptr(at)), part.used,
		false)
}

// recycleTakenBuffers lets buffers be filled again that the other ranks have taken, as they say so.
func (r *Relay) recycleTakenBuffers(ctx context.Context) error {
	if err := awaitChannel(ctx, r.carrier.joined); err != nil {
		return err
	}
	// A relay without pieces does not end before the others have found it.
	if err := r.carrier.AwaitJoined(ctx); err != nil {
		return err
	}
	for n := range r.pieces {
		if err := r.carrier.AwaitTaken(ctx, n+1); err != nil {
			return err
		}
		r.mu.Lock()
		r.carrier.taken = n + 1
		r.recycleOwnBuffers()
		r.mu.Unlock()
	}
	return nil
}

// countReadable counts a chunk of this rank's share of a piece whose bytes the others may read now.
func (r *Relay) countReadable(piece int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	c := r.carrier
	if r.pieces[piece].unread--; r.pieces[piece].unread == 0 {
		close(r.pieces[piece].checked)
	}
	if c == nil {
		return
	}
	for c.published < len(r.pieces) && r.pieces[c.published].unread == 0 {
		c.published++
	}
	if c.live {
		c.Publish(c.published)
	}
}

func awaitChannel(ctx context.Context, ready chan struct{}) error {
	select {
	case <-ready:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func (r *Relay) reportWaits(rep *Report) {
	if r.carrier == nil {
		return
	}
	for i := range r.carrier.waits {
		rep.Waited = append(rep.Waited, time.Duration(r.carrier.waits[i].Load()).Seconds())
	}
	rep.Lost = slices.Sorted(slices.Values(r.carrier.Lost()))
}
