package load

import (
	"cmp"
	"context"
	"runtime"
	"slices"
	"sync"
	"time"
	"unsafe"

	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/device/cuda"
	"github.com/overwire/overwire/gosrc/fault"
	"github.com/overwire/overwire/gosrc/job"
	"github.com/overwire/overwire/gosrc/knob"
	"github.com/overwire/overwire/gosrc/pipeline"
	"github.com/overwire/overwire/gosrc/plan"
	"github.com/overwire/overwire/gosrc/tensor"
)

// A RelaySpec says what several ranks load together. Tensors, Ranks and Size
// are the same on all of them.
type RelaySpec struct {
	Tensors  []int64    `json:"tensors"`  // whose stored chunks travel, each one's all
	Requests [][6]int64 `json:"requests"` // this rank's, as those of a load: of these tensors, each with a destination
	Ring     []uint64   `json:"ring"`     // buffers of Size bytes on the device, the caller's until the job has ended
	Size     int64      `json:"size"`
	Ranks    int        `json:"ranks"`
	Rank     int        `json:"rank"`
	Options
}

// A Relay is one rank's part in a load that several ranks do together: of the
// stored bytes of compressed tensors each rank reads a share, and the caller
// carries it to the others. The bytes come in pieces, each in one buffer of the
// ring in which every rank has its share at the same place. For each piece the
// caller waits for this rank's share (Wait), trades it for the others', and lets
// all of it be decoded to where the requests want it (Decode); the buffer is
// then free for a later piece. The job ends when every piece was decoded, or with the first
// error; then nothing writes to the ring or the destinations any more.
//
// Its methods are safe for concurrent use.
type Relay struct {
	job    *job.Job
	model  *Model
	target target
	spec   *RelaySpec
	pieces []relayPiece
	jobs   []device.Job // of this rank's requests, by piece
	refs   []plan.Ref   // of each job
	wants  []plan.Want
	fetch  *plan.Plan
	shares []plan.Want // of fetch: a chunk each
	spots  []plan.Spot
	lane   *cuda.Lane  // decodes; nil: the host does
	feed   device.Lane // fetches; nil: the host

	mu   sync.Mutex
	wake chan struct{} // closed and renewed when free grows
	free int           // pieces whose buffer is free again: [0, free)
	err  error         // the first
	ours bool          // err is of bytes that this rank brought
	shut bool
	busy sync.WaitGroup // Decodes
}

type relayPiece struct {
	offs        []int64 // of each rank's share in the buffer, and the end
	first, last int     // its jobs
	landed      chan struct{}
	left        int32 // chunks of this rank's share to come
	decoding    int32 // jobs to come; -1: decoded
	begun       bool
}

// A RelayReport is what a relay has to say of itself.
type RelayReport struct {
	Report
	// Ours says that an error is not of bytes that another rank brought, which
	// that rank may know more of.
	Ours bool `json:"ours"`
}

// chunkOf names a chunk: its tensor and number.
type chunkOf struct{ data, n int32 }

// Relay begins one. The first pieces are being read when it returns.
func (m *Model) Relay(spec *RelaySpec) (*Relay, error) {
	if spec.Ranks < 1 || spec.Ranks > maxRanks || spec.Rank < 0 || spec.Rank >= spec.Ranks || len(spec.Ring) == 0 || slices.Contains(spec.Ring, 0) {
		return nil, fault.New(fault.ErrArgument, "relay: rank %d of %d, with %d buffers", spec.Rank, spec.Ranks, len(spec.Ring))
	}
	tgt, err := targetOf(spec.Device)
	if err != nil {
		return nil, m.where("open", err)
	}
	r := &Relay{job: job.New("relay"), model: m, target: tgt, spec: spec, wake: make(chan struct{})}
	at, err := r.layOut()
	if err != nil {
		return nil, err
	}
	if err := r.aim(at); err != nil {
		return nil, err
	}
	if err := m.hold(); err != nil {
		return nil, err
	}
	if err := r.lanes(); err != nil {
		m.drop()
		return nil, m.where("stage", err)
	}
	r.job.TotalTensors.Store(int64(len(r.wants)))
	for i := range r.wants {
		r.job.TotalBytes.Add(r.wants[i].Bytes)
	}
	r.job.Go(r.run)
	return r, nil
}

// relayed is where a chunk lies: in which piece, and where in its buffer.
type relayed struct {
	piece int
	off   int64
}

// layOut cuts the stored chunks of the tensors into pieces and shares, in the
// order of the files; every rank comes to the same.
func (r *Relay) layOut() (map[chunkOf]relayed, error) {
	ix, spec := r.model.ix, r.spec
	reqs := make([]Request, len(spec.Tensors))
	for i, t := range spec.Tensors {
		reqs[i] = Request{Tensor: t, Hi0: plan.Whole, Hi1: plan.Whole}
	}
	wants, err := plan.Check(ix, reqs)
	if err != nil {
		return nil, err
	}
	at := map[chunkOf]relayed{}
	var all []chunkOf
	for i := range wants {
		t := &ix.Tensors[wants[i].Data]
		if t.Count == 0 && t.Bytes > 0 {
			return nil, &fault.At{Verb: "plan", Source: ix.Sources[t.Source].URI, Tensor: t.Name, Chunk: -1, Offset: -1,
				Err: fault.New(fault.ErrArgument, "relay: it is not stored in chunks")}
		}
		for n := range int32(t.Count) {
			c := chunkOf{wants[i].Data, n}
			if _, twice := at[c]; !twice {
				at[c] = relayed{}
				all = append(all, c)
			}
		}
	}
	of := func(c chunkOf) (*tensor.Tensor, *tensor.Chunk) {
		t := &ix.Tensors[c.data]
		return t, &ix.Chunks[int64(t.First)+int64(c.n)]
	}
	slices.SortFunc(all, func(a, b chunkOf) int {
		ta, ca := of(a)
		tb, cb := of(b)
		return cmp.Or(cmp.Compare(ta.Source, tb.Source), cmp.Compare(ca.Off, cb.Off), cmp.Compare(a.data, b.data), cmp.Compare(a.n, b.n))
	})
	for begin := 0; begin < len(all); {
		p := relayPiece{landed: make(chan struct{}), offs: make([]int64, spec.Ranks+1)}
		// As many chunks as surely fit, whatever is left between them.
		stored, room, end := int64(0), spec.Size-maxRanks*shareAlign, begin
		for ; end < len(all); end++ {
			_, c := of(all[end])
			if room -= int64(c.Stored) + 32; room < 0 {
				break
			}
			stored += int64(c.Stored)
		}
		if end == begin {
			return nil, fault.New(fault.ErrArgument, "relay: buffers of %d bytes are too small for a chunk", spec.Size)
		}
		r.share(&p, len(r.pieces), all[begin:end], stored, at, of)
		r.pieces = append(r.pieces, p)
		begin = end
	}
	far, _ := r.model.far()
	lim := r.target.limits(far > 1, false)
	if r.model.planned() {
		lim.Align = readAlign
	}
	r.fetch, r.shares = plan.Stored(ix, r.spots, lim)
	return at, nil
}

// Shares in a buffer begin at multiples of shareAlign. maxRanks is how many of
// them there is room for, however many there are: pieces are then the same on
// hosts with more ranks and with fewer.
const shareAlign, maxRanks = 256, 256

// share cuts the chunks of a piece into shares of about as many bytes, and
// places them. What lies in a row in the file lies so in the buffer.
func (r *Relay) share(p *relayPiece, number int, chunks []chunkOf, stored int64, at map[chunkOf]relayed,
	of func(chunkOf) (*tensor.Tensor, *tensor.Chunk)) {
	rank, passed, pos := 0, int64(0), int64(0)
	var last *tensor.Chunk
	base := address(uintptr(r.spec.Ring[number%len(r.spec.Ring)]))
	for _, c := range chunks {
		_, chunk := of(c)
		for rank+1 < r.spec.Ranks && passed*int64(r.spec.Ranks) >= stored*int64(rank+1) {
			rank++
			pos = (pos + shareAlign - 1) &^ (shareAlign - 1)
			p.offs[rank], last = pos, nil
		}
		// X16 lies at multiples of 16 in the file, and has to here.
		if gap := int64(-1); last != nil {
			if gap = chunk.Off - (last.Off + int64(last.Stored)); gap >= 0 && gap < 16 {
				pos += gap
			} else {
				pos = (pos+15)&^15 + chunk.Off%16
			}
		} else {
			pos += chunk.Off % 16
		}
		at[c] = relayed{number, pos}
		if rank == r.spec.Rank {
			r.spots = append(r.spots, plan.Spot{Data: c.data, N: c.n, Group: int32(number), Dst: unsafe.Add(base, pos)})
			p.left++
		}
		pos += int64(chunk.Stored)
		passed += int64(chunk.Stored)
		last = chunk
	}
	for rank++; rank <= r.spec.Ranks; rank++ {
		p.offs[rank] = pos
	}
	if p.left == 0 {
		close(p.landed)
	}
}

// aim makes the decode jobs of this rank's requests, by piece.
func (r *Relay) aim(at map[chunkOf]relayed) error {
	reqs := make([]Request, len(r.spec.Requests))
	dest := make([]unsafe.Pointer, len(reqs))
	for i, w := range r.spec.Requests {
		reqs[i] = Request{Tensor: w[0], Dest: uintptr(w[1]), Lo0: w[2], Hi0: w[3], Lo1: w[4], Hi1: w[5]}
		dest[i] = address(uintptr(w[1]))
	}
	var err error
	if r.wants, err = plan.Check(r.model.ix, reqs); err != nil {
		return err
	}
	p := plan.Make(r.model.ix, r.wants, dest, plan.Limits{Piece: 1})
	where := make([]int, len(p.Jobs))
	order := make([]int, len(p.Jobs))
	for i := range p.Jobs {
		want := &r.wants[p.Refs[i].Want]
		place, ok := at[chunkOf{want.Data, p.Refs[i].N}]
		if !ok {
			return fault.New(fault.ErrArgument, "relay: request %d is of a tensor that does not travel", p.Refs[i].Want)
		}
		p.Jobs[i].Src = uint32(place.off)
		where[i], order[i] = place.piece, i
	}
	slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(where[a], where[b]) })
	for _, i := range order {
		k := where[i]
		if r.pieces[k].last == 0 {
			r.pieces[k].first = len(r.jobs)
		}
		r.jobs, r.refs = append(r.jobs, p.Jobs[i]), append(r.refs, p.Refs[i])
		r.pieces[k].last = len(r.jobs)
		r.pieces[k].decoding++
	}
	return nil
}

// lanes makes the lanes of a GPU: one that fetches, one that decodes.
func (r *Relay) lanes() (err error) {
	if r.target.gpu == nil {
		return nil
	}
	if r.feed, err = r.target.lane(r.fetch.Slot); err != nil {
		return err
	}
	if r.lane, err = r.target.gpu.Lane(relaySlots, cuda.TablesOnly); err != nil {
		r.feed.Close()
		return err
	}
	if r.spec.Stream != 0 { // the ring may still be in use there
		if err = r.feed.(gpuLane).WaitFor(uintptr(r.spec.Stream)); err != nil {
			r.feed.Close()
			r.lane.Close()
		}
	}
	return err
}

// relaySlots is how many pieces are decoded at the same time at most.
const relaySlots = 4

func (r *Relay) threads() int { return cmp.Or(max(0, r.spec.Threads), max(0, knob.Threads.Get())) }

// run is the job.
func (r *Relay) run(ctx context.Context, j *job.Job) error {
	start := time.Now()
	defer r.model.drop()
	defer r.close()
	told, depth := expect(r.model.srcs, r.fetch, cmp.Or(r.spec.Read, knob.Read.Get()))
	threads := r.threads()
	if threads == 0 {
		far, _ := r.model.far()
		threads = max(r.target.readers(), depth, far)
	}
	ahead := r.ahead()
	task := &pipeline.Task{
		Index: r.model.ix, Sources: r.model.srcs, Wants: r.shares, Plan: r.fetch, Lane: r.feed, Workers: threads, NoCheck: r.spec.NoCheck,
		Gate: func(ctx context.Context, job int32) error {
			return r.wait(ctx, int(r.spots[job].Group)-len(r.spec.Ring)+1-ahead)
		},
		Landed: r.landed,
	}
	if ahead > 0 {
		task.Place = func(ctx context.Context, spot int32, dst unsafe.Pointer) (unsafe.Pointer, error) {
			return dst, r.wait(ctx, int(r.spots[spot].Group)-len(r.spec.Ring)+1)
		}
	}
	st, err := pipeline.Run(ctx, task)
	if err == nil {
		err = r.model.uncut()
	}
	if err == nil {
		err = r.wait(ctx, len(r.pieces))
	}
	if err != nil {
		r.fail(err, true)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	rep := RelayReport{Report: Report{Bytes: j.Bytes.Load(), Tensors: int64(len(r.wants)), Seconds: time.Since(start).Seconds(), Stages: st}, Ours: r.ours}
	for _, s := range told {
		rep.Past += s.Past()
	}
	j.SetReport(rep)
	return r.err
}

// ahead is how many pieces more than the ring has may be read into the slots of
// a lane, where they wait for their buffers. Together they leave one slot free:
// what the buffers wait for needs it.
func (r *Relay) ahead() int {
	slots, size := cuda.Ring()
	if r.feed == nil || r.fetch.Slot > size {
		return 0
	}
	most, n, last := 1, 0, int32(-1)
	for i := range r.fetch.Pieces {
		if group := r.spots[r.fetch.Pieces[i].First].Group; group != last {
			n, last = 0, group
		}
		n++
		most = max(most, n)
	}
	return min(len(r.spec.Ring), (slots-1)/most)
}

// close waits for the Decodes and lets the lanes go.
func (r *Relay) close() {
	r.mu.Lock()
	r.shut = true
	r.mu.Unlock()
	r.busy.Wait()
	if r.lane != nil {
		r.lane.Close()
		r.feed.Close()
	}
}

// fail notes the first error and ends the job.
func (r *Relay) fail(err error, ours bool) {
	r.mu.Lock()
	if r.err == nil {
		r.err, r.ours = err, ours
	}
	r.mu.Unlock()
	r.job.Cancel()
}

// wait waits until the buffers of so many pieces are free again.
func (r *Relay) wait(ctx context.Context, pieces int) error {
	for {
		r.mu.Lock()
		free, wake := r.free, r.wake
		r.mu.Unlock()
		if free >= pieces {
			return nil
		}
		select {
		case <-wake:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// landed counts the chunks of this rank's shares.
func (r *Relay) landed(spot int32) {
	p := &r.pieces[r.spots[spot].Group]
	r.mu.Lock()
	defer r.mu.Unlock()
	if p.left--; p.left == 0 {
		close(p.landed)
	}
}

// decoded frees the buffers of pieces that are done with, in their order.
func (r *Relay) decoded(k int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.pieces[k].decoding = -1
	for r.free < len(r.pieces) && r.pieces[r.free].decoding == -1 {
		r.free++
	}
	close(r.wake)
	r.wake = make(chan struct{})
}

// Job is the relay as a job.
func (r *Relay) Job() *job.Job { return r.job }

// Shares are, for each piece, where in its buffer the share of each rank
// begins, and where the last one ends.
func (r *Relay) Shares() [][]int64 {
	out := make([][]int64, len(r.pieces))
	for i := range r.pieces {
		out[i] = r.pieces[i].offs
	}
	return out
}

// Wait waits, at most for d, until this rank's share of a piece is in its
// buffer. It returns the job's error if there is one.
func (r *Relay) Wait(k int, d time.Duration) (bool, error) {
	if k < 0 || k >= len(r.pieces) {
		return false, fault.New(fault.ErrArgument, "relay: piece %d of %d", k, len(r.pieces))
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-r.pieces[k].landed:
		return true, nil
	case <-r.job.Done():
		select { // it may have landed, and been the last
		case <-r.pieces[k].landed:
			return true, r.job.Err()
		default:
			return false, r.job.Err()
		}
	case <-timer.C:
		return false, nil
	}
}

// Decode decodes a piece whose buffer has every rank's share, and frees the
// buffer when that is done. On a GPU it comes after what is queued on the stream
// now and does not wait for it; an error is then the job's. Each piece is decoded
// once.
func (r *Relay) Decode(k int, stream uint64) error {
	if k < 0 || k >= len(r.pieces) {
		return fault.New(fault.ErrArgument, "relay: piece %d of %d", k, len(r.pieces))
	}
	p := &r.pieces[k]
	r.mu.Lock()
	if r.shut || r.err != nil || p.begun {
		defer r.mu.Unlock()
		return cmp.Or(r.err, fault.New(fault.ErrArgument, "relay: piece %d was decoded, or the job has ended", k))
	}
	p.begun = true
	r.busy.Add(1)
	r.mu.Unlock()
	defer r.busy.Done()
	if p.first == p.last {
		if r.lane != nil { // the next to use the buffer comes after the trade
			return r.idle(k, stream)
		}
		r.decoded(k)
		return nil
	}
	if r.lane == nil {
		return r.onHost(k)
	}
	return r.onDevice(k, stream)
}

// onHost decodes on all cores, and waits.
func (r *Relay) onHost(k int) error {
	p := &r.pieces[k]
	base := address(uintptr(r.spec.Ring[k%len(r.spec.Ring)]))
	jobs := r.jobs[p.first:p.last]
	err := together(context.Background(), cmp.Or(r.threads(), runtime.GOMAXPROCS(0)), len(jobs), func(_ context.Context, i int) error {
		j := &jobs[i]
		if err := pipeline.Decode(j, unsafe.Slice((*byte)(unsafe.Add(base, j.Src)), j.Chunk.Stored)); err != nil {
			return r.where(p.first+i, err)
		}
		r.job.Bytes.Add(int64(j.Chunk.Logical))
		return nil
	})
	if err != nil {
		r.fail(err, false)
		return err
	}
	r.decoded(k)
	return nil
}

// onDevice queues the decoding.
func (r *Relay) onDevice(k int, stream uint64) error {
	p := &r.pieces[k]
	slot, err := r.slot(stream)
	if err != nil {
		return err
	}
	slot.LendDevice(uintptr(r.spec.Ring[k%len(r.spec.Ring)]), p.offs[r.spec.Ranks])
	left := p.last - p.first
	err = r.lane.Submit(slot, p.offs[r.spec.Ranks], r.jobs[p.first:p.last], func(i int, err error) {
		if err != nil {
			r.fail(r.where(p.first+i, err), false)
			return
		}
		r.job.Bytes.Add(int64(r.jobs[p.first+i].Chunk.Logical))
		if left--; left == 0 {
			r.decoded(k)
		}
	})
	if err != nil {
		err = r.where(p.first, err)
		r.fail(err, true)
	}
	return err
}

// slot gives a slot of the lane that decodes, after what is queued on a stream.
func (r *Relay) slot(stream uint64) (*cuda.Slot, error) {
	slot, err := r.lane.Get(context.Background()) // each comes back, whatever happens
	if err != nil {
		return nil, err
	}
	if stream != 0 {
		if err := r.lane.WaitFor(uintptr(stream)); err != nil {
			r.lane.Put(slot)
			err = r.model.where("decode", err)
			r.fail(err, true)
			return nil, err
		}
	}
	return slot, nil
}

// idle is a piece of which this rank wants nothing: its buffer is free when the
// trade is over.
func (r *Relay) idle(k int, stream uint64) error {
	slot, err := r.slot(stream)
	if err != nil {
		return err
	}
	none := device.Job{Chunk: tensor.Chunk{Codec: tensor.CodecRaw}}
	return r.lane.Submit(slot, 0, []device.Job{none}, func(int, error) { r.decoded(k) })
}

// where says of which tensor and chunk an error is.
func (r *Relay) where(i int, err error) error {
	ref := r.refs[i]
	w := &r.wants[ref.Want]
	t := &r.model.ix.Tensors[w.Tensor]
	return &fault.At{Verb: "decode", Source: r.model.ix.Sources[t.Source].URI, Tensor: t.Name, Chunk: int64(ref.N),
		Offset: r.jobs[i].Chunk.Off, Err: err}
}
