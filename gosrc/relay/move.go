package relay

// One goroutine a rank moves its pieces: it asks the readers, the GPU and the other ranks again and again.

import (
	"context"
	"errors"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/overwire/overwire/gosrc/device/cuda/stream"
	"github.com/overwire/overwire/gosrc/internal/spawn"
	"github.com/overwire/overwire/gosrc/job"
	"github.com/overwire/overwire/gosrc/peers"
)

// A mover moves the pieces of a relay.
type mover struct {
	lay    *layout
	prog   *progress
	dec    *decoder
	sums   *summer
	counts *profile
	feed   *feedQueue // copies what this rank reads to the GPU; nil: the host reads into place

	running   sync.WaitGroup // goroutines of begin
	lastRound atomic.Int64   // when movePieces began its last round, in nanoseconds; 0: it has not begun

	turn        sync.Mutex      // held in moveOnce; guards the rest while movePieces and readers run
	next        []int           // by rank: the next piece to take
	own, others []shares        // this rank's and the others', which wait for a slot of the queue that decodes
	lastLook    time.Time       // when it last looked for pieces; zero: never
	waits       []time.Duration // by rank: the time in which no share of it was taken
}

// begin begins work in the background, and has its error end the job.
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

// movePieces moves pieces (moveOnce), again and again, until this rank has decoded all, and no other needs what it has
// read.
func (m *mover) movePieces(ctx context.Context) error {
	if m.dec.queue != nil {
		runtime.LockOSThread() // it makes most of the driver's calls: no other goroutine takes this thread
		defer runtime.UnlockOSThread()
	}
	var pace pacer
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
		pace.restUnless(worked)
	}
	return nil
}

// steps are those of moveOnce; each reports whether there was something to do.
var steps = []func(*mover) (bool, error){
	func(m *mover) (bool, error) { return m.sums.sumArrived() },
	(*mover).recycleTakenBuffers, (*mover).carryShares, (*mover).decodeWaiting}

// moveOnce asks the GPU, the readers and the other ranks once: it submits the slots that readers have filled, finishes
// what the GPU has done, and has this rank's shares summed, those of others copied, and all decoded; on the host it
// decodes by itself. What the caller exchanges is decoded by DecodePiece. It leaves out what another goroutine does
// just now, and reports whether there was something to do. Its error, also that of a panic, ends the job before
// another goroutine has the turn, and then no step is taken again: what a failed one has decoded would count twice.
func (m *mover) moveOnce() bool {
	hasMoved := m.feed != nil && m.feed.submitAndFinish()
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

// moveIfLate is moveOnce for readers that wait, where movePieces has begun no round for lateAfter: the system has given
// its core to something else, or it is in a long step, or rests since nothing was to be done.
func (m *mover) moveIfLate() bool {
	round := m.lastRound.Load()
	return round != 0 && time.Now().UnixNano()-round > lateAfter.Nanoseconds() && m.moveOnce()
}

// askUntil calls ready again and again until it is true, or until ctx has ended. Meanwhile it moves pieces where
// movePieces is late.
func (m *mover) askUntil(ctx context.Context, ready func() bool) error {
	var pace pacer
	for !ready() {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		pace.restUnless(m.moveIfLate())
	}
	return nil
}

// awaitBuffersUpTo waits, by asking, until the buffers of the pieces [0, pieces) may be filled again.
func (m *mover) awaitBuffersUpTo(ctx context.Context, pieces int) error {
	return m.askUntil(ctx, func() bool { return m.prog.recycled.Load() >= int64(pieces) })
}

// recycleTakenBuffers asks which of this rank's shares no other rank needs any more, and recycles their buffers.
func (m *mover) recycleTakenBuffers() (bool, error) {
	t := m.lay.transport
	return t != nil && job.IsClosed(t.joined) && m.prog.recycleTaken(t.Board.CountTaken()), nil
}

// carryShares takes the next piece of each rank that has its share ready to be read, once the ranks have met and this
// one's requests are known.
func (m *mover) carryShares() (worked bool, err error) {
	t, spec, now := m.lay.transport, m.lay.spec, time.Now()
	if t == nil || !job.IsClosed(t.joined) || !job.IsClosed(m.dec.aimed) {
		return false, nil
	}
	if m.lastLook.IsZero() {
		m.lastLook = now
		if spec.Stream != 0 && m.dec.queue != nil { // what is decoded goes where the work on that stream was
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

// carryShare takes the next piece of a rank, if its share can be read and there is space for it. On the host it
// decodes it; on a GPU it queues its copy, and leaves its decoding to decodeWaiting. An own share is waited for
// also if nothing of it is wanted: its buffer may be filled again then.
func (m *mover) carryShare(from int) (bool, error) {
	t, own := m.lay.transport, from == m.lay.spec.Rank
	k := m.next[from]
	if k == len(m.lay.pieces) || t.Memory(from) == nil { // it is not mapped
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

// decodeWaiting queues the decoding on the GPU of what waits for it, as one batch of this rank's shares and one
// of others', if slots are free: the last ones are for sums.
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
		var behind []uintptr // streams that copy what it decodes
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

// pullShare queues the copy of a rank's share to staging, behind the decoding of the share that is there.
func (m *mover) pullShare(piece, from int) error {
	t, part := m.lay.transport, m.lay.partOf(piece, from)
	defer m.counts.countDriverTime(time.Now())
	if err := m.prog.eventBeforeFill(piece, from).MakeStreamWait(t.streams[from]); err != nil {
		return err
	}
	to, at := m.lay.ringOf(piece, from).addressOf(piece), m.lay.ownersRing(from).addressOf(piece)
	m.counts.pulled.Add(part.used)
	return t.gpu.Copy(stream.Order{Stream: t.streams[from]}, uint64(uintptr(to)), uint64(uintptr(at)), part.used, false)
}
