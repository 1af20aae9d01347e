package relay

// This file has relays whose pieces the engine itself brings from rank to rank, over
// memory that the processes of a host map of each other.

import (
	"cmp"
	"context"
	"errors"
	"runtime"
	"slices"
	"time"
	"unsafe"

	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/device/cuda/stream"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/spawn"
	"github.com/overwire/overwire/gosrc/job"
	"github.com/overwire/overwire/gosrc/peers"
)

// A carrier brings the pieces of a relay from rank to rank. No rank decodes what was not
// compared with its checksum where it was read.
//
// A rank reads its shares into memory that the other ranks map, one by one, while the first
// shares are read. It publishes a piece when its share was checked and has arrived there. Each
// other rank waits for that by itself, copies the share to memory of its own (staging), on a
// stream for each rank, and decodes behind the copy. On the host it decodes where the bytes are.
// Then it says that it needs the share no more. A rank fills its memory again when all others have
// said so, whatever they have of other ranks: one that reads late delays only what it reads.
type carrier struct {
	*peers.Peers
	staging device.Memory // on a GPU: spec.Stages shares of each other rank
	streams []uintptr     // on a GPU, by rank; its own: 0
	joined  chan struct{} // closed when the ranks are connected
	moves

	// Guarded by the relay's mu.
	asked     bool // Join was called
	published int  // pieces whose shares of this rank can be read: [0, published)
	taken     int  // pieces whose shares of this rank no other rank needs: [0, taken)
}

// moves is what moveOnce uses. Relay.turn guards it while movePieces and readers run.
type moves struct {
	next        []int           // by rank: the next piece to take
	own, others []shares        // this rank's and the others', which wait for a slot of the queue that decodes
	lastLook    time.Time       // when it last looked for pieces; zero: never
	waits       []time.Duration // by rank: the time in which no share of it was taken
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
	c := &carrier{Peers: p, joined: make(chan struct{}),
		moves: moves{waits: make([]time.Duration, spec.Ranks), next: make([]int, spec.Ranks)}}
	r.carrier = c
	if gpu == nil {
		return nil
	}
	staging, err := gpu.Alloc([]int64{int64(spec.Stages*(spec.Ranks-1)) * r.shareSpace()}) // of one rank: none
	if err != nil {
		return err
	}
	c.staging = staging[0]
	c.streams = make([]uintptr, spec.Ranks)
	for rank := 0; rank < spec.Ranks && err == nil; rank++ {
		if rank != spec.Rank {
			c.streams[rank], err = gpu.NewStream()
		}
	}
	return err
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
		return r.ownersRing(rank)
	}
	staging := r.carrier.staging
	return shareRing{staging.Ptr, staging.Bytes, int64((rank+s.Ranks-s.Rank-1)%s.Ranks*s.Stages) * share, share,
		s.Stages}
}

// ownersRing is where a rank itself has its shares, if the engine exchanges them.
func (r *Relay) ownersRing(rank int) shareRing {
	share, n := r.shareSpace(), r.spec.Buffers
	return shareRing{r.carrier.Memory(rank), int64(n) * share, 0, share, n}
}

// offsetOf is where the share of a piece begins, from base.
func (b shareRing) offsetOf(piece int) int64 { return b.first + int64(piece%b.count)*b.step }

// addressOf is the address of the share of a piece.
func (b shareRing) addressOf(piece int) unsafe.Pointer { return unsafe.Add(b.base, b.offsetOf(piece)) }

// closeCarrier waits for the pulls in flight, and for the other ranks to end theirs; when ctx
// has ended, not long.
func (r *Relay) closeCarrier(ctx context.Context) {
	c := r.carrier
	if c == nil {
		return
	}
	for _, s := range c.streams {
		if s != 0 {
			r.target.GPU.SyncAndFreeStream(s)
		}
	}
	c.staging.Release()
	r.mu.Lock()
	good := r.err == nil
	r.mu.Unlock()
	if err := c.End(ctx, good); err != nil {
		r.failWith(r.model.PlaceError("stage", err), true)
	}
	c.Close()
}

// Offer is what the other ranks need to reach this one's memory; see Join.
func (r *Relay) Offer() (peers.Offer, error) {
	if r.carrier == nil {
		return peers.Offer{}, errs.New(errs.ErrArgument, "relay: it does not exchange by itself")
	}
	return r.carrier.Offer(), nil
}

// Join connects the relay with those of the other ranks, by their offers in order; it then maps
// their memory in the background. An error of either ends the job. Report.Unmapped says whether it is that the ranks
// cannot reach each other's memory.
func (r *Relay) Join(offers []peers.Offer) error {
	c := r.carrier
	r.mu.Lock()
	if c == nil || c.asked || r.shut || r.err != nil {
		defer r.mu.Unlock()
		return cmp.Or(r.err, errs.New(errs.ErrArgument,
			"relay: it cannot join: the caller exchanges the shares, or it has joined or ended already"))
	}
	c.asked = true
	r.busy.Add(1)
	r.mu.Unlock()
	defer r.busy.Done()
	if err := c.Join(offers); err != nil {
		r.unmapped.Store(errors.Is(err, errs.ErrNotSupported))
		err = r.model.PlaceError("stage", err)
		r.failWith(err, true)
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	close(c.joined)
	c.Publish(c.published)
	if r.err != nil {
		c.ReportFailure()
	}
	return nil
}

// mapOthers maps the other ranks' memory once they are connected, when it is this rank's turn, and waits until
// all ranks have done so.
func (r *Relay) mapOthers(ctx context.Context) error {
	c := r.carrier
	if err := awaitChannel(ctx, c.joined); err != nil {
		return err
	}
	if err := c.AwaitMapTurn(ctx); err != nil {
		return err
	}
	for n := range r.spec.Ranks - 1 {
		rank := (r.spec.Rank + 1 + n) % r.spec.Ranks
		if err := c.MapMemoryOf(rank); err != nil {
			r.unmapped.Store(errors.Is(err, errs.ErrNotSupported))
			return err
		}
	}
	c.EndMapTurn()
	return c.AwaitJoined(ctx) // also a relay without pieces does not end before the others have found it
}

// beginMoving begins mapOthers or movePieces in the background.
func (r *Relay) beginMoving(ctx context.Context, work func(context.Context) error) {
	spawn.GoFor(&r.movers, "relay move", func() {
		err := spawn.Guard("relay move", func() error { return work(ctx) })
		if err != nil && ctx.Err() == nil {
			r.failMoving(err)
		}
	})
}

// movePieces moves pieces (moveOnce), again and again, until this rank has decoded all, and no other needs what it has
// read.
func (r *Relay) movePieces(ctx context.Context) error {
	if r.queue != nil {
		runtime.LockOSThread() // it makes most of the driver's calls: no other goroutine takes this thread
		defer runtime.UnlockOSThread()
	}
	var pace pacer
	for !r.hasMovedAll() {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		r.lastRound.Store(time.Now().UnixNano())
		worked := r.moveOnce()
		if c := r.carrier; c != nil && !worked && job.IsClosed(c.joined) {
			if err := c.CheckOthers(); err != nil {
				return err
			}
		}
		pace.restUnless(worked)
	}
	return nil
}

// steps are those of moveOnce; each reports whether there was something to do.
var steps = []func(*Relay) (bool, error){
	(*Relay).sumArrived, (*Relay).recycleTakenBuffers, (*Relay).carryShares, (*Relay).decodeWaiting}

// moveOnce asks the GPU, the readers and the other ranks once: it submits the slots that readers have filled, finishes
// what the GPU has done, and has this rank's shares summed, those of others copied, and all decoded; on the host it
// decodes by itself. What the caller exchanges is decoded by DecodePiece. It leaves out what another goroutine does
// just now, and reports whether there was something to do. Its error, also that of a panic, ends the job before
// another goroutine has the turn, and then no step is taken again: what a failed one has decoded would count twice.
func (r *Relay) moveOnce() bool {
	hasMoved := r.queue != nil && r.feed.submitAndFinish()
	if !r.turn.TryLock() {
		return hasMoved
	}
	defer r.turn.Unlock()
	if r.job.RunContext().Err() != nil {
		return hasMoved
	}
	err := spawn.Guard("relay move", func() error {
		if r.queue != nil {
			hasMoved = r.queue.FinishEnded() || hasMoved
		}
		for _, step := range steps {
			hasStepped, err := step(r)
			if err != nil {
				return err
			}
			hasMoved = hasMoved || hasStepped
		}
		return nil
	})
	if err != nil {
		r.failMoving(err)
	}
	return hasMoved && err == nil
}

// moveIfLate is moveOnce for readers that wait, where movePieces has begun no round for lateAfter: the system has given
// its core to something else, or it is in a long step, or rests since nothing was to be done.
func (r *Relay) moveIfLate() bool {
	round := r.lastRound.Load()
	return round != 0 && time.Now().UnixNano()-round > lateAfter.Nanoseconds() && r.moveOnce()
}

func (r *Relay) failMoving(err error) {
	r.failWith(r.model.PlaceError("stage", err), !errors.Is(err, peers.ErrOther))
}

func (r *Relay) hasMovedAll() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.sharesLeft == 0 && (r.carrier == nil || job.IsClosed(r.carrier.joined) && r.carrier.taken == len(r.pieces))
}

// carryShares takes the next piece of each rank whose share can be read, once the ranks have met and this one's
// requests are known.
func (r *Relay) carryShares() (worked bool, err error) {
	c, now := r.carrier, time.Now()
	if c == nil || !job.IsClosed(c.joined) || !job.IsClosed(r.aimed) {
		return false, nil
	}
	if c.lastLook.IsZero() {
		c.lastLook = now
		if r.spec.Stream != 0 && r.queue != nil { // what is decoded goes where the work on that stream was
			err = r.queue.FollowStream(uintptr(r.spec.Stream))
		}
	}
	for from := 0; from < r.spec.Ranks && err == nil; from++ {
		var did bool
		if did, err = r.carryShare(from); !did && c.next[from] < len(r.pieces) {
			c.waits[from] += now.Sub(c.lastLook)
		}
		worked = worked || did
	}
	c.lastLook = now
	return worked, err
}

// carryShare takes the next piece of a rank, if its share can be read and there is space for it. On the host it
// decodes it; on a GPU it queues its copy, and leaves its decoding to decodeWaiting. An own share is waited for
// also if nothing of it is wanted: its buffer may be filled again then.
func (r *Relay) carryShare(from int) (bool, error) {
	c, own := r.carrier, from == r.spec.Rank
	k := c.next[from]
	if k == len(r.pieces) || c.Memory(from) == nil { // it is not mapped
		return false, nil
	}
	of, part := shares{k, from, from + 1}, r.partOf(k, from)
	wanted := part.endTask > part.firstTask
	switch {
	case own && !job.IsClosed(r.pieces[k].checked), !own && wanted && c.CountPublished(from) <= k:
		return false, nil
	case !wanted:
		r.markQueued(of, nil)
		r.markDecoded(of)
	case r.queue == nil:
		if err := r.decodeOnHost(of); err != nil {
			return false, err
		}
	case own:
		c.own = append(c.own, of)
	case !r.hasStagingFor(k, from):
		return false, nil
	default:
		if err := r.pullShare(k, from); err != nil {
			return false, err
		}
		c.others = append(c.others, of)
	}
	c.next[from]++
	return true, nil
}

// hasStagingFor reports whether a rank's share of a piece may be pulled behind the decoding of the earlier share
// that has its staging: whether that decoding is queued.
func (r *Relay) hasStagingFor(piece, from int) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.queued[from] > piece-r.spec.Stages
}

// decodeWaiting queues the decoding on the GPU of what waits for it, as one batch of this rank's shares and one
// of others', if slots are free: the last ones are for sums.
func (r *Relay) decodeWaiting() (worked bool, err error) {
	c := r.carrier
	if c == nil || r.queue == nil {
		return false, nil
	}
	for _, waiting := range []*[]shares{&c.own, &c.others} {
		if len(*waiting) == 0 || r.queue.CountFree() <= slotsForSums {
			continue
		}
		batch := slices.Clone((*waiting)[:min(len(*waiting), mostReads)])
		*waiting = slices.Delete(*waiting, 0, len(batch))
		var behind []uintptr // streams that copy what it decodes
		for _, of := range batch {
			if s := c.streams[of.firstRank]; s != 0 && !slices.Contains(behind, s) {
				behind = append(behind, s)
			}
		}
		if err := r.queueDecoding(r.queue.TryGet(), batch, behind); err != nil {
			return false, err
		}
		worked = true
	}
	return worked, nil
}

// pullShare queues the copy of a rank's share to staging, behind the decoding of the share that is there.
func (r *Relay) pullShare(piece, from int) error {
	c, part := r.carrier, r.partOf(piece, from)
	defer r.countDriverTime(time.Now())
	if err := r.eventBeforeFill(piece, from).MakeStreamWait(c.streams[from]); err != nil {
		return err
	}
	to, at := r.ringOf(piece, from).addressOf(piece), r.ownersRing(from).addressOf(piece)
	r.pulled.Add(part.used)
	return r.target.GPU.Copy(stream.Order{Stream: c.streams[from]}, uint64(uintptr(to)), uint64(uintptr(at)), part.used,
		false)
}

// recycleTakenBuffers asks which of this rank's shares no other rank needs any more, and recycles their buffers.
func (r *Relay) recycleTakenBuffers() (bool, error) {
	if r.carrier == nil || !job.IsClosed(r.carrier.joined) {
		return false, nil
	}
	taken := min(r.carrier.CountTaken(), len(r.pieces))
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.carrier.taken == taken {
		return false, nil
	}
	r.carrier.taken = taken
	r.recycleOwnBuffers()
	return true, nil
}

func awaitChannel(ctx context.Context, ready chan struct{}) error {
	select {
	case <-ready:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
