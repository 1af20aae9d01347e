// Package relay is the verb of loads by the ranks of a group together: each reads a
// share, and all decode.
package relay

import (
	"cmp"
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/overwire/overwire/gosrc/device/cuda/queue"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/spawn"
	"github.com/overwire/overwire/gosrc/job"
	"github.com/overwire/overwire/gosrc/knob"
	"github.com/overwire/overwire/gosrc/load"
	"github.com/overwire/overwire/gosrc/pipeline"
	"github.com/overwire/overwire/gosrc/plan"
	"github.com/overwire/overwire/gosrc/source"
)

// A Spec says what the ranks of a group load together. Tensors and Size are the same on all
// ranks that exchange.
type Spec struct {
	Tensors []int64 `json:"tensors"` // whose stored bytes are shared, each one whole
	// buffers of Size bytes on the device; the caller keeps them valid until the job has ended
	Ring []uint64 `json:"ring"`
	Size int64    `json:"size"`
	// Mapped: the engine brings the pieces from rank to rank itself, once it has joined the
	// others. It makes memory for this number of shares that this rank has read, which the
	// others map, and on a GPU for Stages shares that each other rank has. The caller then
	// only sets the requests (Aim).
	Mapped  bool `json:"exchange"`
	Buffers int  `json:"buffers"`
	Stages  int  `json:"stages"`
	// Needs, with Mapped: the blocks that each rank of this host needs, as requests with
	// the rank in the place of the address. They may overlap; without them every rank needs
	// all. What a rank alone needs is read by that rank.
	Needs []plan.Request `json:"-"`
	Ranks int            `json:"ranks"` // that exchange
	Here  int            `json:"here"`  // how many of them this host has; 0: all
	Rank  int            `json:"rank"`  // this one, of [0, Ranks)
	load.Options
}

// A Relay is one rank's part in a group's load: each rank reads a share of the
// stored bytes, and these travel. The bytes come in pieces, of which each rank has a
// share; reading begins before the destinations are known (Aim). The job ends when every
// piece was decoded, or with the first error; after that nothing writes to its memory or
// the destinations.
//
// A carrier brings the shares of mapped ranks. Else the caller does: a piece occupies one
// buffer of the ring, which has equal space for each rank's share, one after the other. The
// caller waits for this rank's share, which was checked then (AwaitOwnShare), exchanges it
// for the others', and has the whole piece decoded to where the requests want it
// (DecodePiece). On a GPU that is queued behind the exchange, and the next fill of the buffer
// behind it.
//
// Its methods are safe for concurrent use, except DecodePiece.
type Relay struct {
	job       *job.Job
	model     *load.Model
	target    load.Target
	spec      *Spec
	machine   plan.Machine
	start     time.Time
	landings  *job.Landings
	carrier   *carrier      // nil: the caller exchanges the shares
	layoutEnd chan struct{} // closed when the layout and the queues are there, or the job has an error
	profile
	exchangeLayout
	localRequests
	gpuState
	state
}

// gpuState is what a relay has of a GPU.
type gpuState struct {
	queue    *queue.Queue // decodes, and sums; nil: the host does
	feed     *feedQueue   // copies what this rank reads to the GPU; nil: the host reads into place
	arrivals chan int     // pieces whose share of this rank has arrived, to be summed
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

// state is how far a relay is. mu guards what is not safe by itself.
type state struct {
	mu         sync.Mutex
	recycled   atomic.Int64  // pieces whose buffer may be filled again: [0, recycled); readers ask without mu
	queued     []int         // by rank: pieces of which the decoding of that rank's share is queued: [0, queued)
	decoded    []int         // by rank: pieces whose share of that rank was decoded: [0, decoded)
	sharesLeft int           // that were not decoded
	lastDecode chan struct{} // closed when sharesLeft is 0
	err        error         // the first
	ours       bool          // err is not about bytes that another rank has read
	aimed      chan struct{} // closed when the requests are set
	shut       bool
	busy       sync.WaitGroup // calls of DecodePiece and Join
	movers     sync.WaitGroup // goroutines of beginMoving
	turn       sync.Mutex     // held in moveOnce
	lastRound  atomic.Int64   // when movePieces began its last round, in nanoseconds; 0: it has not begun

	unmapped atomic.Bool // err is that another rank's memory cannot be mapped
}

// A Report says what a relay did and what it cost.
type Report struct {
	load.Report
	// Ours: the error is not about bytes of another rank, whose own error may say
	// more.
	Ours   bool      `json:"ours"`
	Pulled int64     `json:"pulled,omitempty"` // bytes copied from other ranks' memory
	Waited []float64 `json:"waited,omitempty"` // seconds, by rank, in which this rank took no share of it
	Driver float64   `json:"driver,omitempty"` // seconds in submitting fetches, copies and decoding
	Flight int64     `json:"flight,omitempty"` // the most bytes that were on their way to the GPU
	Lost   []int     `json:"lost,omitempty"`   // ranks of this host that are gone
	// Unmapped: the error is that this rank cannot map another's memory.
	Unmapped bool `json:"unmapped,omitempty"`
}

// Start starts a relay of a model, whose layout and reading begin in the background.
func Start(m *load.Model, spec *Spec) (_ *Relay, err error) {
	if spec.Ranks < 1 || spec.Mapped && spec.Ranks > maxRanks || spec.Rank < 0 || spec.Rank >= spec.Ranks ||
		len(spec.Ring) == 0 && !spec.Mapped ||
		slices.ContainsFunc(spec.Ring, func(at uint64) bool { return at == 0 || at%chunkAlign != 0 }) {
		return nil, errs.New(errs.ErrArgument, "relay: rank %d of %d, with %d buffers at multiples of %d", spec.Rank,
			spec.Ranks, len(spec.Ring), chunkAlign)
	}
	tgt, err := load.TargetOf(spec.Device)
	if err != nil {
		return nil, m.PlaceError("open", err)
	}
	r := &Relay{job: job.New("relay"), model: m, target: tgt, spec: spec, start: time.Now(),
		landings: job.NewLandings(0)}
	r.lastDecode, r.layoutEnd, r.aimed = make(chan struct{}), make(chan struct{}), make(chan struct{})
	r.machine = m.Machine(tgt.GPU != nil, spec.Threads, false)
	r.machine.InGroup = true
	if tgt.GPU != nil {
		_, r.machine.SlotBytes = load.Ring(r.machine)
		r.machine.SumsShares = !tgt.GPU.ReadsInPlace()
	}
	cores, with := r.coresAndRanks()
	r.machine.Cores, r.machine.Ranks = min(r.machine.Cores, cores), with
	for _, n := range spec.Needs {
		if !spec.Mapped || n.Dest >= uintptr(spec.Ranks) {
			return nil, errs.New(errs.ErrArgument, "relay: rank %d of %d needs a block", int64(n.Dest), spec.Ranks)
		}
	}
	defer func() {
		if err != nil {
			r.closeCarrier(context.Background())
		}
	}()
	if err := spec.checkSize(); err != nil {
		return nil, err
	}
	if spec.Mapped {
		if err := r.makeCarrier(); err != nil {
			return nil, m.PlaceError("stage", err)
		}
	}
	if err := m.Hold(); err != nil {
		return nil, err
	}
	r.job.Go(r.runJob)
	return r, nil
}

// makeLayoutAndQueues lays out the load and makes its queues, while the ranks exchange their offers. Its error is the
// job's, also that of a panic, before those that wait for the layout go on.
func (r *Relay) makeLayoutAndQueues() error {
	defer close(r.layoutEnd)
	err := spawn.Guard("relay layout", r.layOut)
	if err == nil {
		if err = spawn.Guard("relay queues", r.makeQueues); err != nil {
			err = r.model.PlaceError("stage", err)
		}
	}
	if err != nil {
		r.failWith(err, true)
	}
	return err
}

// awaitLayout waits for makeLayoutAndQueues, and returns the error of a job that has failed.
func (r *Relay) awaitLayout() error {
	<-r.layoutEnd
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.err
}

// awaitPiece is awaitLayout; it refuses a number that no piece has.
func (r *Relay) awaitPiece(piece int) error {
	err := r.awaitLayout()
	if err == nil && (piece < 0 || piece >= len(r.pieces)) {
		err = errs.New(errs.ErrArgument, "relay: piece %d of %d", piece, len(r.pieces))
	}
	return err
}

// makeQueues makes what a GPU needs: a queue that copies what this rank reads, and one that sums and decodes.
func (r *Relay) makeQueues() error {
	gpu := r.target.GPU
	if gpu == nil {
		return nil
	}
	batches := len(r.spec.Ring)
	if r.carrier != nil {
		batches = mostBatches
	}
	feed, err := r.target.Queue(r.fetch.Slot, r.machine)
	if err != nil {
		return err
	}
	slots, _ := load.Ring(r.machine)
	r.feed = &feedQueue{Queue: feed, r: r, todo: make(chan submission, slots)}
	feed.UsePolling()
	r.arrivals = make(chan int, len(r.pieces))
	if r.queue, err = gpu.Queue(batches+slotsForSums, queue.TablesOnly); err != nil {
		return err
	}
	r.queue.UsePolling()
	if r.spec.Stream != 0 { // the ring may still be in use there
		return feed.FollowStream(uintptr(r.spec.Stream))
	}
	return nil
}

func (r *Relay) runJob(ctx context.Context, j *job.Job) error {
	defer r.model.Drop()
	isLeaving := false
	defer func() {
		if !isLeaving { // a panic: the other ranks wait
			r.failWith(errs.New(errs.ErrEngine, "relay: it has ended without a result"), true)
			r.closeExchange(ctx)
		}
	}()
	if r.carrier != nil {
		r.beginMoving(ctx, r.mapOthers)
	}
	var files []source.File
	var st pipeline.Stages
	err := r.makeLayoutAndQueues()
	if err == nil {
		if r.carrier != nil || r.queue != nil {
			r.beginMoving(ctx, r.movePieces)
		}
		files, st, err = r.readShares(ctx)
	}
	if err == nil {
		err = awaitChannel(ctx, r.lastDecode)
	}
	if err != nil {
		r.failWith(err, true)
	}
	isLeaving = true
	r.closeExchange(ctx)
	r.mu.Lock()
	defer r.mu.Unlock()
	rep := Report{Ours: r.ours, Pulled: r.pulled.Load(),
		Driver: time.Duration(r.driver.Load()).Seconds(), Flight: r.mostFlight.Load(), Unmapped: r.unmapped.Load()}
	rep.Report = load.Report{Bytes: j.Bytes.Load(), Tensors: int64(len(r.wants)),
		Seconds: time.Since(r.start).Seconds(), Stages: st}
	for _, f := range files {
		rep.DirectIO += f.DirectBytes()
	}
	if c := r.carrier; c != nil {
		for _, d := range c.waits {
			rep.Waited = append(rep.Waited, d.Seconds())
		}
		rep.Lost = slices.Sorted(slices.Values(c.Lost()))
	}
	j.SetReport(rep)
	return r.err
}

// readShares reads this rank's shares, and has what it reads copied to the GPU.
func (r *Relay) readShares(ctx context.Context) (files []source.File, _ pipeline.Stages, _ error) {
	files, depth := load.AnnouncePlan(r.model.Sources(), r.fetch, false, cmp.Or(r.spec.Read, knob.Read.Get()))
	ahead, buffers := r.piecesAhead(), r.countBuffers()
	task := &pipeline.Task{
		Index: r.model.Seen(), Sources: r.model.Sources(), Wants: r.fetchWants, Plan: r.fetch,
		Workers: r.machine.Workers(depth),
		Gate: func(ctx context.Context, task int32) error {
			return r.awaitBuffersUpTo(ctx, r.pieceOfTask(task)+1-buffers-ahead)
		},
		Landed: func(spot int32) { r.countArrival(int(r.spots[spot].Group)) },
	}
	if ahead > 0 {
		task.Destination = func(ctx context.Context, spot int32, dst unsafe.Pointer) (unsafe.Pointer, error) {
			return dst, r.awaitBuffersUpTo(ctx, int(r.spots[spot].Group)+1-buffers)
		}
	}
	if r.feed != nil {
		task.Queue, task.Near = r.feed, r.target.GPU.NearNode()
	}
	st, err := pipeline.Run(ctx, task)
	if err == nil {
		err = r.model.Uncut()
	}
	return files, st, err
}

// pieceOfTask is the piece that a task of the fetch is for.
func (r *Relay) pieceOfTask(task int32) int { return int(r.spots[r.fetch.Refs[task].Want].Group) }

// countBuffers is how many pieces' shares of this rank have a buffer at a time.
func (r *Relay) countBuffers() int {
	if r.carrier != nil {
		return r.spec.Buffers
	}
	return len(r.spec.Ring)
}

// piecesAhead is how many pieces beyond the buffers may be read into slots of the queue,
// where they wait for a buffer. They leave one slot free, for a piece that has its buffer: it must
// be read before the others get theirs.
func (r *Relay) piecesAhead() int {
	slots, size := load.Ring(r.machine)
	if r.feed == nil || r.fetch.Slot > size {
		return 0
	}
	counts := make([]int, len(r.pieces)) // of slots that a piece fills
	for i := range r.fetch.Pieces {
		counts[r.pieceOfTask(r.fetch.Pieces[i].First)]++
	}
	return min(r.countBuffers(), (slots-1)/slices.Max(append(counts, 1)))
}

// closeExchange waits until nothing moves any more, and closes the queues and the carrier.
func (r *Relay) closeExchange(ctx context.Context) {
	r.movers.Wait() // first: mapOthers may wait for Join, which refuses once shut is set
	r.mu.Lock()
	r.shut = true
	r.mu.Unlock()
	r.busy.Wait()
	if r.feed != nil {
		r.feed.Close() // first: its copies wait for events of queue's slots
	}
	if r.queue != nil {
		r.queue.Close()
	}
	r.closeCarrier(ctx)
}

// failWith records the first error and ends the job. ours: it is not about bytes that another rank has read.
func (r *Relay) failWith(err error, ours bool) {
	r.mu.Lock()
	if r.err == nil {
		r.err, r.ours = err, ours
		if c := r.carrier; c != nil && job.IsClosed(c.joined) {
			c.ReportFailure()
		}
	}
	r.mu.Unlock()
	r.job.Cancel()
}

// awaitBuffersUpTo waits, by asking, until the buffers of the pieces [0, pieces) may be filled again.
func (r *Relay) awaitBuffersUpTo(ctx context.Context, pieces int) error {
	return r.askUntil(ctx, func() bool { return r.recycled.Load() >= int64(pieces) })
}

// markQueued says that the decoding of shares, which ends with the event, is queued; nil: there is nothing
// to wait for. If this rank's share is among them, its buffer may be filled again unless other ranks need it.
func (r *Relay) markQueued(of shares, end *queue.Event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for rank := of.firstRank; rank < of.endRank; rank++ {
		part := r.partOf(of.piece, rank)
		part.isQueued, part.decodeEnd = true, end
		for r.queued[rank] < len(r.pieces) && r.partOf(r.queued[rank], rank).isQueued {
			r.queued[rank]++
		}
	}
	r.recycleOwnBuffers()
}

// recycleOwnBuffers lets the readers fill again those of this rank's buffers whose decoding is queued and that no
// other rank needs. r.mu is held.
func (r *Relay) recycleOwnBuffers() {
	free := r.queued[r.spec.Rank]
	if r.carrier != nil {
		free = min(free, r.carrier.taken)
	}
	r.recycled.Store(int64(free))
}

// markDecoded says that the decoding of shares has ended, and tells their owners that this rank needs them no more.
func (r *Relay) markDecoded(of shares) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for rank := of.firstRank; rank < of.endRank; rank++ {
		r.partOf(of.piece, rank).isDecoded = true
		r.sharesLeft--
		for r.decoded[rank] < len(r.pieces) && r.partOf(r.decoded[rank], rank).isDecoded {
			r.decoded[rank]++
		}
		if r.carrier != nil && rank != r.spec.Rank {
			r.carrier.ReleasePieces(rank, r.decoded[rank])
		}
	}
	if r.sharesLeft == 0 {
		close(r.lastDecode)
	}
}

// countTask counts a decode task that has ended. A request lands with its last task.
func (r *Relay) countTask(task int) {
	if task == noTask {
		return
	}
	want := r.refs[task].Want
	r.job.Bytes.Add(int64(r.tasks[task].Chunk.Logical))
	if atomic.AddInt32(&r.coming[want], -1) == 0 {
		r.job.Tensors.Add(1)
		r.landings.Add(int(want))
	}
}

// Ready returns at most limit requests that have landed since the last call, and whether more may follow. It
// waits up to d for the first of them, and looks every landingPause: what lands them wakes no one.
func (r *Relay) Ready(limit int, d time.Duration) (reqs []int, more bool) {
	for until := time.Now().Add(d); ; job.Within(r.job.Done(), landingPause) {
		reqs, more = r.landings.Next(r.job.Done(), limit, 0)
		if len(reqs) > 0 || !more || !time.Now().Before(until) {
			return reqs, more
		}
	}
}

// Job is the relay's job.
func (r *Relay) Job() *job.Job { return r.job }

// ShareSizes returns, for each piece, the space of each rank's share in a buffer of the ring: that of
// rank r begins at r times this size. It waits for the layout.
func (r *Relay) ShareSizes() ([]int64, error) {
	if err := r.awaitLayout(); err != nil {
		return nil, err
	}
	out := make([]int64, len(r.pieces))
	for i := range r.pieces {
		out[i] = r.pieces[i].share
	}
	return out, nil
}

// AwaitOwnShare waits up to d until this rank's share of a piece is in its buffer and was checked. It
// returns the job's error if there is one.
func (r *Relay) AwaitOwnShare(piece int, d time.Duration) (bool, error) {
	until := time.Now().Add(d)
	if !job.Within(r.layoutEnd, max(0, d)) {
		return false, nil
	}
	if err := r.awaitPiece(piece); err != nil {
		return false, err
	}
	checked := r.pieces[piece].checked
	timer := time.NewTimer(time.Until(until))
	defer timer.Stop()
	select {
	case <-checked:
	case <-r.job.Done(): // it may have been the last piece
	case <-timer.C:
	}
	if job.IsClosed(r.job.Done()) && r.job.Err() != nil {
		return false, r.job.Err()
	}
	return job.IsClosed(checked), nil
}
