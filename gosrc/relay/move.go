package relay

// This file moves the pieces of a rank. One goroutine polls the readers, the GPU and the other ranks, and rests between
// two polls.

import (
	"context"
	"errors"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/device/cuda"
	"github.com/overwire/overwire/gosrc/device/cuda/stream"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/spawn"
	"github.com/overwire/overwire/gosrc/job"
	"github.com/overwire/overwire/gosrc/peers"
)

const (
	// landingPause is how long Ready waits before it polls again.
	landingPause = time.Millisecond
	// lateAfter is how long waiting readers rely on movePieces, which usually begins a round every few microseconds. If
	// movePieces woke the readers, it could not feed the GPU during that time.
	lateAfter = 300 * time.Microsecond
)

// A mover takes this rank's share and the other ranks' shares of each piece, and has them decoded. movePieces drives
// it.
type mover struct {
	lay    *layout
	prog   *progress
	dec    *decoder
	sums   *summer
	counts *profile
	feed   *feedQueue // copies what this rank reads to the GPU; nil on the host

	running   sync.WaitGroup // goroutines started by begin
	lastRound atomic.Int64   // when movePieces began its last round, in nanoseconds; 0 before the first

	turn        sync.Mutex      // held in moveOnce; guards the fields below while movePieces and readers run
	next        []int           // indexed by rank: the next piece to take from it
	own, others []shares        // shares of this rank and of others that wait for a slot of the decoding queue
	lastLook    time.Time       // time of the last carryShares, or zero
	waits       []time.Duration // indexed by rank: how long none of its shares was taken
}

// begin starts work in the background. An error from it ends the job.
func (m *mover) begin(ctx context.Context, work func(context.Context) error) {
	spawn.GoFor(&m.running, "relay move", func() {
		err := spawn.Guard("relay move", func() error { return work(ctx) })
		if err != nil && ctx.Err() == nil {
			m.fail(err)
		}
	})
}

func (m *mover) fail(err error) {
	m.prog.failWith(m.dec.model.LocateError("stage", err), !errors.Is(err, peers.ErrOther))
}

// movePieces calls moveOnce repeatedly until this rank has decoded everything and no other rank needs its shares.
func (m *mover) movePieces(ctx context.Context) error {
	if m.dec.queue != nil {
		runtime.LockOSThread() // most driver calls are made here, so other goroutines should not use this thread
		defer runtime.UnlockOSThread()
	}
	var pace peers.Pacer
	for !m.prog.hasMovedAll() {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		m.lastRound.Store(time.Now().UnixNano())
		worked := m.moveOnce()
		if t := m.lay.transport; t != nil && !worked && job.IsClosed(t.joined) {
			if err := t.Board.CheckOthers(); err != nil {
				return err
			}
		}
		pace.RestUnless(worked)
	}
	return nil
}

// steps lists the steps of moveOnce. Each reports whether it did any work.
var steps = []func(*mover) (bool, error){
	func(m *mover) (bool, error) { return m.sums.sumArrived() },
	(*mover).recycleTakenBuffers, (*mover).carryShares, (*mover).decodeWaiting}

// moveOnce polls the GPU, the readers and the other ranks once. It submits the slots that readers have filled and
// finishes the slots that the GPU has completed. It queues checksum comparisons for this rank's shares, copies the
// other ranks' shares, and queues the decoding of both. On the host it decodes directly. If the caller exchanges the
// shares, DecodePiece decodes instead. moveOnce skips what another goroutine is doing, and reports whether it did any
// work. If a step fails or panics, the job ends before moveOnce unlocks turn, and no step runs after that: otherwise,
// what the failed step has decoded would be counted twice.
func (m *mover) moveOnce() bool {
	hasMoved := m.feed != nil && m.feed.feeder.submitAndFinish()
	if !m.turn.TryLock() {
		return hasMoved
	}
	defer m.turn.Unlock()
	if m.prog.job.RunContext().Err() != nil {
		return hasMoved
	}
	err := spawn.Guard("relay move", func() error {
		if m.dec.queue != nil {
			hasMoved = m.dec.queue.FinishEnded() || hasMoved
		}
		for _, step := range steps {
			hasStepped, err := step(m)
			if err != nil {
				return err
			}
			hasMoved = hasMoved || hasStepped
		}
		return nil
	})
	if err != nil {
		m.fail(err)
	}
	return hasMoved && err == nil
}

// moveIfLate calls moveOnce for waiting readers, but only if movePieces has not begun a round for lateAfter. That
// happens if the system has given the core of movePieces to another thread, if movePieces is in a long step, or if it
// rests because there was no work.
func (m *mover) moveIfLate() bool {
	round := m.lastRound.Load()
	return round != 0 && time.Now().UnixNano()-round > lateAfter.Nanoseconds() && m.moveOnce()
}

// askUntil polls ready until it returns true or ctx has ended. Meanwhile it moves pieces if movePieces is late.
func (m *mover) askUntil(ctx context.Context, ready func() bool) error {
	var pace peers.Pacer
	for !ready() {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		pace.RestUnless(m.moveIfLate())
	}
	return nil
}

// awaitBuffersUpTo polls until the buffers of the pieces [0, pieces) may be filled again.
func (m *mover) awaitBuffersUpTo(ctx context.Context, pieces int) error {
	return m.askUntil(ctx, func() bool { return m.prog.recycled.Load() >= int64(pieces) })
}

// recycleTakenBuffers recycles the buffers of this rank's shares that no other rank needs anymore.
func (m *mover) recycleTakenBuffers() (bool, error) {
	t := m.lay.transport
	return t != nil && job.IsClosed(t.joined) && m.prog.recycleTaken(t.Board.CountTaken()), nil
}

// carryShares takes the next piece from each rank if its share can be read. It begins when the ranks have joined and
// this rank's requests are known.
func (m *mover) carryShares() (worked bool, err error) {
	t, spec, now := m.lay.transport, m.lay.spec, time.Now()
	if t == nil || !job.IsClosed(t.joined) || !job.IsClosed(m.dec.aimed) {
		return false, nil
	}
	if m.lastLook.IsZero() {
		m.lastLook = now
		if spec.Stream != 0 && m.dec.queue != nil { // decoding waits for the work that was on that stream
			err = m.dec.queue.FollowStream(uintptr(spec.Stream))
		}
	}
	for from := 0; from < spec.Ranks && err == nil; from++ {
		var did bool
		if did, err = m.carryShare(from); !did && m.next[from] < len(m.lay.pieces) {
			m.waits[from] += now.Sub(m.lastLook)
		}
		worked = worked || did
	}
	m.lastLook = now
	return worked, err
}

// carryShare takes the next piece from a rank if its share can be read and there is space for it. On the host it
// decodes the share. On a GPU it queues the copy and leaves decoding to decodeWaiting. It waits for a share of this
// rank even if no request needs it, because its buffer is refilled afterwards.
func (m *mover) carryShare(from int) (bool, error) {
	t, own := m.lay.transport, from == m.lay.spec.Rank
	k := m.next[from]
	if k == len(m.lay.pieces) || t.Memory(from) == nil { // all taken, or its memory is not mapped yet
		return false, nil
	}
	of, part := shares{k, from, from + 1}, m.lay.partOf(k, from)
	wanted := part.endTask > part.firstTask
	switch {
	case own && !job.IsClosed(m.lay.pieces[k].checked), !own && wanted && t.Board.CountPublished(from) <= k:
		return false, nil
	case !wanted:
		m.prog.markQueued(of, nil)
		m.prog.markDecoded(of)
	case m.dec.queue == nil:
		if err := m.dec.decodeOnHost(of); err != nil {
			return false, err
		}
	case own:
		m.own = append(m.own, of)
	case !m.prog.hasStagingFor(k, from):
		return false, nil
	default:
		if err := m.pullShare(k, from); err != nil {
			return false, err
		}
		m.others = append(m.others, of)
	}
	m.next[from]++
	return true, nil
}

// decodeWaiting queues the decoding of waiting shares on the GPU if slots are free: one batch of this rank's shares
// and one of other ranks' shares. It leaves the last slots for checksums.
func (m *mover) decodeWaiting() (worked bool, err error) {
	t, q := m.lay.transport, m.dec.queue
	if t == nil || q == nil {
		return false, nil
	}
	for _, waiting := range []*[]shares{&m.own, &m.others} {
		if len(*waiting) == 0 || q.CountFree() <= slotsForSums {
			continue
		}
		batch := slices.Clone((*waiting)[:min(len(*waiting), mostReads)])
		*waiting = slices.Delete(*waiting, 0, len(batch))
		var behind []uintptr // streams that copy the shares to decode
		for _, of := range batch {
			if s := t.streams[of.firstRank]; s != 0 && !slices.Contains(behind, s) {
				behind = append(behind, s)
			}
		}
		if err := m.dec.queueDecoding(q.TryGet(), batch, behind); err != nil {
			return false, err
		}
		worked = true
	}
	return worked, nil
}

// pullShare queues the copy of a rank's share to staging memory, after the decoding of the share that is there now.
func (m *mover) pullShare(piece, from int) error {
	t, part := m.lay.transport, m.lay.partOf(piece, from)
	defer m.counts.countDriverTime(time.Now())
	if err := m.prog.eventBeforeFill(piece, from).MakeStreamWait(t.streams[from]); err != nil {
		return err
	}
	to, at := m.lay.ringOf(piece, from).addressOf(piece), m.lay.ownersRing(from).addressOf(piece)
	m.counts.pulled.Add(part.used)
	return t.GPU.Copy(stream.Order{Stream: t.streams[from]}, uint64(uintptr(to)), uint64(uintptr(at)), part.used, false)
}

// A transport moves the shares of a relay between ranks. No rank decodes a share before the rank that read it has
// compared its checksums.
//
// A rank reads its shares into memory that the other ranks map. The ranks map it one after another, while the first
// shares are being read. A rank publishes a piece when its share has been read and verified. Each other rank polls
// until then. On a GPU it copies the share to its own memory (staging), on one stream per rank, and then decodes it. On
// the host it decodes the share in place. Then it announces that it no longer needs the share. A rank refills its
// memory when all other ranks have announced that, independently of other ranks' shares, so a slow reader delays only
// what it reads.
type transport struct {
	*peers.Peers
	staging  device.Memory // on a GPU: space for Spec.Stages shares of each other rank
	streams  []uintptr     // on a GPU, by rank; 0 for this rank
	joined   chan struct{} // closed when the ranks are connected
	asked    bool          // Join was called; guarded by the relay's mu
	unmapped atomic.Bool   // another rank's memory could not be mapped
}

// newTransport makes the transport of a Spec. After an error, end frees what was allocated.
func newTransport(spec *Spec, gpu *cuda.Device) (*transport, error) {
	if spec.Buffers < 1 || spec.Buffers > maxBuffers || gpu != nil && spec.Stages < 1 || spec.Stages > maxBuffers ||
		len(spec.Ring) > 0 {
		return nil, errs.New(errs.ErrArgument, "group load: invalid transport with %d buffers and %d stages "+
			"of %d bytes for %d ranks, and a ring of %d: expected 1 to %d buffers and stages, and no ring",
			spec.Buffers, spec.Stages, spec.Size, spec.Ranks, len(spec.Ring), maxBuffers)
	}
	p, err := peers.New(gpu, int64(spec.Buffers)*spec.shareSpace(), spec.Rank, spec.Ranks)
	if err != nil {
		return nil, err
	}
	t := &transport{Peers: p, joined: make(chan struct{})}
	if gpu == nil {
		return t, nil
	}
	staging, err := gpu.Alloc([]int64{int64(spec.Stages*(spec.Ranks-1)) * spec.shareSpace()}) // empty for a single rank
	if err != nil {
		return t, err
	}
	t.staging = staging[0]
	t.streams = make([]uintptr, spec.Ranks)
	for rank := 0; rank < spec.Ranks && err == nil; rank++ {
		if rank != spec.Rank {
			t.streams[rank], err = gpu.NewStream()
		}
	}
	return t, err
}

// join connects this rank to the others, with their offers in rank order.
func (t *transport) join(offers []peers.Offer) error {
	err := t.Join(offers)
	if err != nil {
		t.unmapped.Store(errors.Is(err, errs.ErrNotSupported))
	}
	return err
}

// mapOthers maps the other ranks' memory when the ranks are connected. It returns when all ranks have joined.
func (t *transport) mapOthers(ctx context.Context) error {
	err := awaitChannel(ctx, t.joined)
	if err == nil {
		err = t.MapOthers(ctx)
		t.unmapped.Store(errors.Is(err, errs.ErrNotSupported))
	}
	return err
}

// end waits for the pulls in flight and for the other ranks to finish theirs. After ctx has ended, it waits only
// briefly. good reports whether this rank has no error. end calls fail if another rank has failed.
func (t *transport) end(ctx context.Context, good func() bool, fail func(error)) {
	if t == nil {
		return
	}
	for _, s := range t.streams {
		if s != 0 {
			t.GPU.SyncAndFreeStream(s)
		}
	}
	t.staging.Release()
	if err := t.End(ctx, good()); err != nil {
		fail(err)
	}
	t.Close()
}

func awaitChannel(ctx context.Context, ready chan struct{}) error {
	select {
	case <-ready:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
