// Package relay loads a model on all ranks of a group together: each rank reads a share, and all ranks decode.
package relay

import (
	"cmp"
	"context"
	"slices"
	"sync"
	"time"
	"unsafe"

	"github.com/overwire/overwire/gosrc/device/cuda/queue"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/spawn"
	"github.com/overwire/overwire/gosrc/job"
	"github.com/overwire/overwire/gosrc/knob"
	"github.com/overwire/overwire/gosrc/load"
	"github.com/overwire/overwire/gosrc/peers"
	"github.com/overwire/overwire/gosrc/pipeline"
	"github.com/overwire/overwire/gosrc/plan"
	"github.com/overwire/overwire/gosrc/source"
)

// A Relay is one rank's part in a group load. The stored bytes are divided into pieces. Each rank reads a share of
// each piece and gets the other shares from the other ranks. Reading begins before the destinations are known (Aim).
// The job ends when all pieces have been decoded, or with the first error. After that nothing writes to its memory or
// to the destinations.
//
// If the ranks map each other's memory, a transport moves the shares. Otherwise the caller exchanges them. A piece then
// occupies one buffer of the ring, which has equal space for each rank's share, in rank order. The caller waits until
// this rank's share has been read and verified (AwaitOwnShare), gathers the shares of all ranks in the buffer, and has
// the piece decoded to the destinations (DecodePiece). On a GPU, decoding is queued after the exchange, and the next
// fill of the buffer after the decoding.
//
// The methods are safe for concurrent use, except for DecodePiece.
type Relay struct {
	job       *job.Job
	model     *load.Model
	target    load.Target
	machine   plan.Machine
	start     time.Time
	layoutEnd chan struct{} // closed when layout and queues exist, or the job has an error
	lay       *layout
	prog      *progress
	dec       *decoder
	sums      *summer
	move      *mover
	counts    profile
	shut      bool           // guarded by prog.mu
	busy      sync.WaitGroup // calls of DecodePiece and Join in progress
}

// A Report describes what a relay did and its cost.
type Report struct {
	load.Report
	// Ours means that the error does not concern bytes read by another rank. Otherwise that rank's error contains more.
	Ours   bool      `json:"ours"`
	Pulled int64     `json:"pulled,omitempty"` // bytes copied from other ranks' memory
	Waited []float64 `json:"waited,omitempty"` // indexed by rank: seconds during which none of its shares was taken
	Driver float64   `json:"driver,omitempty"` // seconds spent submitting fetches, copies and decoding
	Flight int64     `json:"flight,omitempty"` // maximum bytes in flight to the GPU
	Lost   []int     `json:"lost,omitempty"`   // ranks of this host that have exited
	// Unmapped means that the error is that this rank could not map another rank's memory.
	Unmapped bool `json:"unmapped,omitempty"`
}

// Start starts a relay. It divides the load into pieces and begins to read in the background.
func Start(m *load.Model, spec *Spec) (_ *Relay, err error) {
	if spec.Ranks < 1 || spec.Mapped && spec.Ranks > maxRanks || spec.Rank < 0 || spec.Rank >= spec.Ranks ||
		len(spec.Ring) == 0 && !spec.Mapped ||
		slices.ContainsFunc(spec.Ring, func(at uint64) bool { return at == 0 || at%chunkAlign != 0 }) {
		return nil, errs.New(errs.ErrArgument,
			"group load: invalid rank %d of %d with %d buffers: expected buffers at multiples of %d bytes", spec.Rank,
			spec.Ranks, len(spec.Ring), chunkAlign)
	}
	tgt, err := load.TargetOf(spec.Device)
	if err != nil {
		return nil, m.LocateError("open", err)
	}
	machine := m.Machine(tgt.GPU != nil, spec.Threads, false)
	machine.InGroup = true
	if tgt.GPU != nil {
		_, machine.SlotBytes = load.Ring(machine)
		machine.SumsShares = !tgt.GPU.ReadsInPlace()
	}
	cores, with := coresAndRanks(tgt.GPU, spec)
	machine.Cores, machine.Ranks = min(machine.Cores, cores), with
	for _, n := range spec.Needs {
		if !spec.Mapped || n.Dest >= uintptr(spec.Ranks) {
			return nil, errs.New(errs.ErrArgument, "group load: needs are for rank %d, but there are %d ranks",
				int64(n.Dest), spec.Ranks)
		}
	}
	r := newRelay(m, tgt, machine, spec)
	defer func() {
		if err != nil {
			r.endTransport(context.Background())
		}
	}()
	if err := spec.checkSize(); err != nil {
		return nil, err
	}
	if spec.Mapped {
		if r.lay.transport, err = newTransport(spec, tgt.GPU); err != nil {
			return nil, m.LocateError("stage", err)
		}
	}
	if err := m.Hold(); err != nil {
		return nil, err
	}
	r.job.Go(r.runJob)
	return r, nil
}

// newRelay makes the parts of a relay and connects them.
func newRelay(m *load.Model, tgt load.Target, machine plan.Machine, spec *Spec) *Relay {
	r := &Relay{job: job.New("relay"), model: m, target: tgt, machine: machine, start: time.Now(),
		layoutEnd: make(chan struct{})}
	r.lay = &layout{spec: spec, seen: m.Seen(), onGPU: tgt.GPU != nil}
	r.prog = &progress{job: r.job, lay: r.lay, lastDecode: make(chan struct{})}
	threads := cmp.Or(machine.Threads, max(1, machine.Cores/max(1, machine.Ranks)))
	r.dec = &decoder{job: r.job, model: m, lay: r.lay, prog: r.prog, counts: &r.counts, threads: threads,
		landings: job.NewLandings(0), aimed: make(chan struct{})}
	r.sums = &summer{model: m, lay: r.lay, prog: r.prog, sums: machine.SumsShares}
	r.move = &mover{lay: r.lay, prog: r.prog, dec: r.dec, sums: r.sums, counts: &r.counts,
		next: make([]int, spec.Ranks), waits: make([]time.Duration, spec.Ranks)}
	return r
}

// makeLayoutAndQueues makes the layout and the queues while the ranks exchange their offers. If it fails or panics,
// the job ends before callers that wait for the layout continue.
func (r *Relay) makeLayoutAndQueues() error {
	defer close(r.layoutEnd)
	err := spawn.Guard("relay layout", func() error {
		err := r.lay.layOut(r.machine.Limits())
		if err == nil {
			r.prog.begin()
		}
		return err
	})
	if err == nil {
		if err = spawn.Guard("relay queues", r.makeQueues); err != nil {
			err = r.model.LocateError("stage", err)
		}
	}
	if err != nil {
		r.prog.failWith(err, true)
	}
	return err
}

// awaitLayout waits for makeLayoutAndQueues and returns the job's error, if any.
func (r *Relay) awaitLayout() error {
	<-r.layoutEnd
	return r.prog.firstError()
}

// awaitPiece calls awaitLayout and checks a piece number.
func (r *Relay) awaitPiece(piece int) error {
	err := r.awaitLayout()
	if err == nil && (piece < 0 || piece >= len(r.lay.pieces)) {
		err = errs.New(errs.ErrArgument, "group load: invalid piece %d: there are %d pieces", piece, len(r.lay.pieces))
	}
	return err
}

// makeQueues makes the queues of a GPU: one copies what this rank reads, and the other checks checksums and decodes.
func (r *Relay) makeQueues() error {
	gpu := r.target.GPU
	if gpu == nil {
		return nil
	}
	batches := len(r.lay.spec.Ring)
	if r.lay.transport != nil {
		batches = mostBatches
	}
	feed, err := r.target.Queue(r.lay.fetch.Slot, r.machine)
	if err != nil {
		return err
	}
	slots, _ := load.Ring(r.machine)
	feeder := &feeder{queue: feed, lay: r.lay, prog: r.prog, counts: &r.counts, todo: make(chan submission, slots)}
	r.move.feed = &feedQueue{feed, feeder, r.move.askUntil}
	feed.UsePolling()
	r.sums.arrivals = make(chan int, len(r.lay.pieces))
	q, err := gpu.Queue(batches+slotsForSums, queue.TablesOnly)
	if err != nil {
		return err
	}
	q.UsePolling()
	r.dec.queue, r.sums.queue = q, q
	if r.lay.spec.Stream != 0 { // work on this stream may still use the ring
		return feed.FollowStream(uintptr(r.lay.spec.Stream))
	}
	return nil
}

func (r *Relay) runJob(ctx context.Context, j *job.Job) error {
	defer r.model.Drop()
	isLeaving := false
	defer func() {
		if !isLeaving { // after a panic: the other ranks are waiting
			r.prog.failWith(errs.New(errs.ErrEngine, "group load: the job ended without a result"), true)
			r.closeExchange(ctx)
		}
	}()
	if r.lay.transport != nil {
		r.move.begin(ctx, r.lay.transport.mapOthers)
	}
	var files []source.File
	var st pipeline.Stages
	err := r.makeLayoutAndQueues()
	if err == nil {
		if r.lay.transport != nil || r.dec.queue != nil {
			r.move.begin(ctx, r.move.movePieces)
		}
		files, st, err = r.readShares(ctx)
	}
	if err == nil {
		err = awaitChannel(ctx, r.prog.lastDecode)
	}
	if err != nil {
		r.prog.failWith(err, true)
	}
	isLeaving = true
	r.closeExchange(ctx)
	defer func() { r.model.Distrust(err) }()
	r.prog.mu.Lock()
	defer r.prog.mu.Unlock()
	err = r.prog.err
	rep := Report{Ours: r.prog.ours, Pulled: r.counts.pulled.Load(),
		Driver: time.Duration(r.counts.driver.Load()).Seconds(), Flight: r.counts.mostFlight.Load()}
	rep.Report = load.Report{Bytes: j.Bytes.Load(), Tensors: int64(len(r.dec.wants)),
		Seconds: time.Since(r.start).Seconds(), Stages: st}
	for _, f := range files {
		rep.DirectIO += f.DirectBytes()
	}
	if t := r.lay.transport; t != nil {
		for _, d := range r.move.waits {
			rep.Waited = append(rep.Waited, d.Seconds())
		}
		rep.Lost, rep.Unmapped = slices.Sorted(slices.Values(t.Board.Lost())), t.unmapped.Load()
	}
	j.SetReport(rep)
	return err
}

// readShares reads this rank's shares. For a GPU it also submits their copies.
func (r *Relay) readShares(ctx context.Context) (files []source.File, _ pipeline.Stages, _ error) {
	files, depth := load.AnnouncePlan(r.model.Sources(), r.lay.fetch, false, cmp.Or(r.lay.spec.Read, knob.Read.Get()))
	ahead, buffers := r.piecesAhead(), r.lay.countBuffers()
	task := &pipeline.Task{
		Index: r.model.Seen(), Sources: r.model.Sources(), Wants: r.lay.fetchWants, Plan: r.lay.fetch,
		Workers: r.machine.Workers(depth),
		Gate: func(ctx context.Context, task int32) error {
			return r.move.awaitBuffersUpTo(ctx, r.lay.pieceOfTask(task)+1-buffers-ahead)
		},
		Landed: func(read int32) { r.sums.countArrival(int(r.lay.reads[read].Group)) },
	}
	if ahead > 0 {
		task.Destination = func(ctx context.Context, read int32, dst unsafe.Pointer) (unsafe.Pointer, error) {
			return dst, r.move.awaitBuffersUpTo(ctx, int(r.lay.reads[read].Group)+1-buffers)
		}
	}
	if r.move.feed != nil {
		task.Queue, task.Near = r.move.feed, r.target.GPU.NearNode()
	}
	st, err := pipeline.Run(ctx, task)
	if err == nil {
		err = r.model.Uncut()
	}
	return files, st, err
}

// piecesAhead returns how many pieces beyond the number of buffers may be read into slots of the queue, where they
// wait for a buffer. One slot stays free for a piece that has a buffer, because the other pieces only get a buffer
// after that piece has been read.
func (r *Relay) piecesAhead() int {
	slots, size := load.Ring(r.machine)
	if r.move.feed == nil || r.lay.fetch.Slot > size {
		return 0
	}
	counts := make([]int, len(r.lay.pieces)) // indexed by piece: slots that it fills
	for i := range r.lay.fetch.Pieces {
		counts[r.lay.pieceOfTask(r.lay.fetch.Pieces[i].First)]++
	}
	return min(r.lay.countBuffers(), (slots-1)/slices.Max(append(counts, 1)))
}

// closeExchange waits until no shares are being moved, and closes the queues and the transport.
func (r *Relay) closeExchange(ctx context.Context) {
	r.move.running.Wait() // before shut is set: mapOthers may wait for Join, which then fails
	r.prog.mu.Lock()
	r.shut = true
	r.prog.mu.Unlock()
	r.busy.Wait()
	if r.move.feed != nil {
		r.move.feed.Close() // before dec.queue: its copies wait for events of dec.queue's slots
	}
	if r.dec.queue != nil {
		r.dec.queue.Close()
	}
	r.endTransport(ctx)
}

func (r *Relay) endTransport(ctx context.Context) {
	r.lay.transport.end(ctx, func() bool { return r.prog.firstError() == nil }, func(err error) {
		r.prog.failWith(r.model.LocateError("stage", err), true)
	})
}

// Ready returns up to limit requests that have landed since the last call, and whether more may follow. It waits up to
// d for the first one. It polls every landingPause, because landing requests do not wake it.
func (r *Relay) Ready(limit int, d time.Duration) (reqs []int, more bool) {
	for until := time.Now().Add(d); ; job.Within(r.job.Done(), landingPause) {
		reqs, more = r.dec.landings.Next(r.job.Done(), limit, 0)
		if len(reqs) > 0 || !more || !time.Now().Before(until) {
			return reqs, more
		}
	}
}

// Job returns the relay's job.
func (r *Relay) Job() *job.Job { return r.job }

// ShareSizes returns, for each piece, the space of each rank's share in a buffer of the ring. Rank r's share begins at
// r times this size. ShareSizes waits for the layout.
func (r *Relay) ShareSizes() ([]int64, error) {
	if err := r.awaitLayout(); err != nil {
		return nil, err
	}
	out := make([]int64, len(r.lay.pieces))
	for i := range r.lay.pieces {
		out[i] = r.lay.pieces[i].share
	}
	return out, nil
}

// AwaitOwnShare waits up to d until this rank's share of a piece is in its buffer and has been verified. It
// returns the job's error, if any.
func (r *Relay) AwaitOwnShare(piece int, d time.Duration) (bool, error) {
	until := time.Now().Add(d)
	if !job.Within(r.layoutEnd, max(0, d)) {
		return false, nil
	}
	if err := r.awaitPiece(piece); err != nil {
		return false, err
	}
	checked := r.lay.pieces[piece].checked
	timer := time.NewTimer(time.Until(until))
	defer timer.Stop()
	select {
	case <-checked:
	case <-r.job.Done(): // possibly after the last piece
	case <-timer.C:
	}
	if job.IsClosed(r.job.Done()) && r.job.Err() != nil {
		return false, r.job.Err()
	}
	return job.IsClosed(checked), nil
}

// Aim sets this rank's requests. They are like those of a load, each with a destination, for tensors that the group
// shares. Aim is called once, before anything is decoded. If it fails, the relay is unchanged.
func (r *Relay) Aim(reqs []plan.Request) error {
	if err := r.awaitLayout(); err != nil {
		return err
	}
	p, wants, where, err := r.lay.planRequests(reqs)
	if err != nil {
		return err
	}
	r.prog.mu.Lock()
	defer r.prog.mu.Unlock()
	if job.IsClosed(r.dec.aimed) {
		return errs.New(errs.ErrArgument, "group load: the requests have already been set")
	}
	r.lay.assignTasks(where)
	r.dec.setRequests(p, wants)
	return nil
}

// Offer returns how the other ranks can map this rank's memory. See Join.
func (r *Relay) Offer() (peers.Offer, error) {
	if r.lay.transport == nil {
		return peers.Offer{}, errs.New(errs.ErrArgument,
			"group load: there is no offer, because the caller exchanges the shares")
	}
	return r.lay.transport.Offer(), nil
}

// Join connects the relay to the other ranks, with their offers in rank order. It then maps their memory in the
// background. If either step fails, the job ends with that error. Report.Unmapped reports whether the ranks cannot map
// each other's memory.
func (r *Relay) Join(offers []peers.Offer) error {
	t := r.lay.transport
	r.prog.mu.Lock()
	if t == nil || t.asked || r.shut || r.prog.err != nil {
		defer r.prog.mu.Unlock()
		return cmp.Or(r.prog.err, errs.New(errs.ErrArgument,
			"group load: cannot join: the caller exchanges the shares, or the group load has already joined or ended"))
	}
	t.asked = true
	r.busy.Add(1)
	r.prog.mu.Unlock()
	defer r.busy.Done()
	if err := t.join(offers); err != nil {
		err = r.model.LocateError("stage", err)
		r.prog.failWith(err, true)
		return err
	}
	r.prog.markJoined()
	return nil
}

// DecodePiece decodes a piece and then releases its buffer, which must hold the shares of all ranks. It is for callers
// that exchange the shares. On a GPU it queues the decoding after the work that is now on a stream (0 for none). Errors
// end the job. Each piece is decoded once, in order, and only after AwaitOwnShare has reported this rank's share.
func (r *Relay) DecodePiece(piece int, stream uintptr) error {
	if err := r.awaitPiece(piece); err != nil {
		return err
	}
	if err := r.beginDecoding(piece); err != nil {
		return err
	}
	defer r.busy.Done()
	of := shares{piece, 0, r.lay.spec.Ranks}
	if r.dec.queue == nil {
		return r.dec.decodeOnHost(of)
	}
	slot, err := r.dec.queue.Get(r.job.RunContext()) // moveOnce frees slots until this context ends
	if err != nil {
		return err
	}
	var behind []uintptr
	if stream != 0 {
		behind = append(behind, stream)
	}
	return r.dec.queueDecoding(slot.(*queue.Slot), []shares{of}, behind)
}

// beginDecoding checks that a piece is the next one, and adds to busy so that the relay does not end.
func (r *Relay) beginDecoding(piece int) error {
	p := r.prog
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.err != nil:
		return p.err
	case r.lay.transport != nil || piece != p.queued[0]:
		return errs.New(errs.ErrArgument, "group load: piece %d cannot be decoded now: the next piece is %d",
			piece, p.queued[0])
	case r.shut || !job.IsClosed(r.dec.aimed):
		return errs.New(errs.ErrArgument, "group load: the job has ended, or its requests have not been set")
	case !job.IsClosed(r.lay.pieces[piece].checked): // the buffer is still being filled
		return errs.New(errs.ErrArgument,
			"group load: piece %d cannot be decoded: this rank has not read its share yet", piece)
	}
	r.busy.Add(1)
	return nil
}
