// Package pipeline runs a plan: it reads pieces, checks and decodes their
// chunks, and lands the bytes in the tensors. It is the only room that starts
// workers. The first error wins and cancels the rest; when Run returns, no
// worker is left and every slot is back.
package pipeline

import (
	"context"
	"errors"
	"runtime"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/overwire/overwire/gosrc/codec"
	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/fault"
	"github.com/overwire/overwire/gosrc/internal/spawn"
	"github.com/overwire/overwire/gosrc/plan"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/tensor"
)

// rangeSlots are enough for any number of ranges on the host: while one waits, the
// kernel takes in what follows.
const rangeSlots = 16

// ahead is how many bytes the prefetcher keeps announced before the readers.
const ahead = 64 << 20

// A Task is one plan with what it needs to run.
type Task struct {
	Index   *tensor.Index
	Sources []source.Source // by Tensor.Source
	Wants   []plan.Want
	Plan    *plan.Plan
	// Lane is the device; nil: the host. The pipeline does not close it.
	Lane device.Lane
	// Direct, by source, reads plain tensors' bytes straight into the device's
	// memory; nil: none, or not of that source. Bytes that have a checksum go
	// through the host, where it is compared.
	Direct  []device.Reader
	Workers int // 0: one a core
	// Range, if not nil, says how many bytes a worker best asks a source.Ranged for
	// at once, to read them part by part. There is no Gate with it.
	Range   func() int64
	NoCheck bool // for benchmarks only: leave the checksums out
	Trace   *Trace

	// Place, if not nil, gives each job its place, right before it is submitted
	// to the device; it may wait for it. The pipeline's own places stand for it
	// until then.
	Place func(ctx context.Context, want int32, dst unsafe.Pointer) (unsafe.Pointer, error)

	// Gate, if there is one, is asked before the bytes of a job's piece are
	// brought: it waits until there is room for them, or for the end of ctx.
	// Pieces may wait for earlier ones only.
	Gate func(ctx context.Context, job int32) error
	// Landed is called once for each want whose last byte is in place, by any
	// worker. Progress gets the logical bytes of each finished job.
	Landed   func(want int32)
	Progress func(bytes int64)
}

// Stages is what a run cost, summed over its workers, in nanoseconds and bytes.
type Stages struct {
	Pieces    int64 `json:"pieces"`
	ReadBytes int64 `json:"read_bytes"` // stored bytes, gaps between them included
	LandBytes int64 `json:"land_bytes"`
	WaitNS    int64 `json:"wait_ns"`   // for a free slot
	TurnNS    int64 `json:"turn_ns"`   // for a turn at a source far away
	AnswerNS  int64 `json:"answer_ns"` // for the beginning of its answers
	ReadNS    int64 `json:"read_ns"`
	CheckNS   int64 `json:"check_ns"`
	DecodeNS  int64 `json:"decode_ns"`
	WallNS    int64 `json:"wall_ns"`
	Workers   int64 `json:"workers"`
	SlotBytes int64 `json:"slot_bytes"`
	RingBytes int64 `json:"ring_bytes"`
}

// Run runs the task to its end.
func Run(ctx context.Context, t *Task) (Stages, error) {
	start := time.Now()
	workers := t.Workers
	if workers <= 0 {
		workers = runtime.GOMAXPROCS(0)
	}
	workers = max(1, min(workers, len(t.Plan.Parts)))
	st := Stages{Workers: int64(workers), Pieces: int64(len(t.Plan.Pieces)), ReadBytes: t.Plan.Read}
	if len(t.Plan.Pieces) == 0 {
		return st, nil
	}
	lane := t.Lane
	if lane == nil {
		slots := workers
		if t.Range != nil {
			slots = min(slots, max(rangeSlots, runtime.GOMAXPROCS(0)))
		}
		host, err := NewHost(slots, t.Plan.Slot)
		if err != nil {
			return st, err
		}
		defer host.Close()
		lane = host
		st.SlotBytes, st.RingBytes = t.Plan.Slot, t.Plan.Slot*int64(slots)
	}

	if p, ok := lane.(interface{ Pinned() int64 }); ok {
		st.RingBytes = p.Pinned()
	}
	r := &run{queue: queue{Task: t}, lane: lane, handOver: "decode"}
	if dev, ok := lane.(timer); ok {
		r.handOver = "submit"
		if t.Trace != nil {
			if err := dev.Time(t.Trace.device); err != nil {
				return st, err
			}
			defer func() { _ = dev.Time(nil) }() // only a broken lane refuses
		}
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	r.ctx, r.cancel, r.staged = ctx, cancel, make([]staged, len(t.Plan.Pieces))
	r.turns, r.empty = context.WithCancel(ctx)
	defer r.empty()
	for i := range t.Plan.Parts {
		r.staged[t.Plan.Parts[i].Piece].left++
	}
	var wg sync.WaitGroup
	var mu sync.Mutex
	for n := range workers {
		wg.Add(1)
		spawn.Go("pipeline worker", func() {
			defer wg.Done()
			w := worker{run: r, n: n}
			if err := spawn.Guard("pipeline worker", w.loop); err != nil {
				cancel(err) // only the first cause stays
			}
			if t.Trace != nil {
				t.Trace.add(w.spans)
			}
			mu.Lock()
			st.WaitNS += w.st.WaitNS
			st.TurnNS += w.st.TurnNS
			st.AnswerNS += w.st.AnswerNS
			st.ReadNS += w.st.ReadNS
			st.CheckNS += w.st.CheckNS
			st.DecodeNS += w.st.DecodeNS
			mu.Unlock()
		})
	}
	wg.Wait()
	for i := range r.staged { // what an error left half filled
		if s := &r.staged[i]; s.slot != nil {
			lane.Put(s.slot)
		}
	}
	// What was submitted is waited for even after an error: nothing may write
	// to the tensors once Run has returned.
	if err := lane.Drain(context.WithoutCancel(ctx)); err != nil {
		cancel(err)
	}
	st.LandBytes = r.landed.Load()
	st.ReadBytes += r.skipped
	st.WallNS = time.Since(start).Nanoseconds()
	if ctx.Err() != nil {
		return st, context.Cause(ctx)
	}
	return st, nil
}

// run is what the workers of one Run share.
type run struct {
	queue
	ctx    context.Context
	cancel context.CancelCauseFunc
	lane   device.Lane
	staged []staged     // by piece
	landed atomic.Int64 // bytes
	// handOver is what a worker's part in the decoding is called in a trace.
	handOver string

	prefetch  sync.Mutex
	announced int64 // pieces that prefetchers were told of; prefetch guards it
}

// A staged piece is one that workers fill together: the first of them gets the
// slot, the last submits it.
type staged struct {
	mu   sync.Mutex
	slot device.Slot // nil before it is there, and again once it is given away
	left int         // parts to come
}

// A prefetcher is a source that can be told what will be read soon.
type prefetcher interface{ Prefetch(off, n int64) }

// announce keeps the sources told of the next pieces. One worker does it at a
// time; the others pass by.
func (r *run) announce(piece int64) {
	if !r.prefetch.TryLock() {
		return
	}
	defer r.prefetch.Unlock()
	var n int64
	i := max(r.announced, piece+1)
	for j := piece + 1; j < i; j++ {
		n += r.Plan.Pieces[j].Len
	}
	if n > ahead/2 {
		return
	}
	for ; i < int64(len(r.Plan.Pieces)) && n < ahead; i++ {
		p := &r.Plan.Pieces[i]
		if f, ok := r.Sources[p.Source].(prefetcher); ok {
			f.Prefetch(p.Off, p.Len)
		}
		n += p.Len
	}
	r.announced = i
}

// A worker takes batches one after the other: each part passes through all
// stages in one pair of hands, while its bytes are in that core's cache.
type worker struct {
	*run
	n     int // of this worker
	st    Stages
	spans []span

	// The range that is open, nil if none is; where it stands; room for gaps.
	steps source.Range
	at    int64
	waste []byte
}

func (w *worker) loop() error {
	for {
		b, from, ok := w.take(nil)
		if !ok {
			return nil
		}
		if w.ctx.Err() != nil {
			return context.Cause(w.ctx)
		}
		var err error
		if from == nil {
			err = w.batch(b)
		} else {
			err = w.ranged(from, w.Plan.Pieces[w.Plan.Parts[b.first].Piece].First)
		}
		if err != nil {
			return err
		}
	}
}

// ranged waits for a turn and does the next batch in it, if there still is one of that
// source; job is where an error is told to be.
func (w *worker) ranged(from source.Ranged, job int32) error {
	t0 := time.Now()
	steps, err := from.Turn(w.turns)
	if err != nil {
		if w.ctx.Err() == nil && w.turns.Err() != nil {
			return nil // others did what was left
		}
		return w.where("read", job, err)
	}
	w.steps = steps
	defer func() {
		_ = steps.Close()
		w.steps = nil
	}()
	b, now, ok := w.take(from)
	if !ok || now != from {
		return nil
	}
	part := &w.Plan.Parts[b.first]
	p := &w.Plan.Pieces[part.Piece]
	w.at = p.Off + part.From
	if err := steps.Begin(w.ctx, w.at, b.n); err != nil { // no slot is kept while the answer is waited for
		return w.where("read", p.First, err)
	}
	w.waited(&t0)
	return w.batch(b)
}

func (w *worker) batch(b batch) error {
	for i := b.first; i < b.end; i++ {
		if w.ctx.Err() != nil {
			return context.Cause(w.ctx)
		}
		part := &w.Plan.Parts[i]
		w.announce(int64(part.Piece))
		if err := w.part(part, &w.Plan.Pieces[part.Piece]); err != nil {
			return err
		}
	}
	return nil
}

// read fills b from off of a source, or of the range that is open.
func (w *worker) read(src source.Source, b []byte, off int64) error {
	if w.steps == nil {
		return src.ReadAt(w.ctx, b, off)
	}
	for w.at < off {
		if w.waste == nil {
			w.waste = make([]byte, 32<<10)
		}
		n := min(off-w.at, int64(len(w.waste)))
		if err := w.steps.Next(w.waste[:n]); err != nil {
			return err
		}
		w.at += n
	}
	w.at += int64(len(b))
	return w.steps.Next(b)
}

func (w *worker) part(part *plan.Part, p *plan.Piece) error {
	src := w.Sources[p.Source]
	lender, lends := src.(source.Lender)
	t0 := time.Now()
	if w.Gate != nil {
		if err := w.Gate(w.ctx, p.First); err != nil {
			return err
		}
		w.st.WaitNS += w.lap("stage", &t0, 0)
	}
	if p.Direct != nil {
		b := unsafe.Slice((*byte)(p.Direct), p.Len)
		if err := w.read(src, b, p.Off); err != nil {
			return w.where("read", p.First, err)
		}
		w.waited(&t0)
		w.st.ReadNS += w.lap("read", &t0, p.Len)
		if !lends {
			if err := w.check(p.First, b); err != nil {
				return err
			}
			w.st.CheckNS += w.lap("check", &t0, p.Len)
		}
		w.land(p.First)
		return nil
	}
	s := &w.staged[part.Piece]
	slot, err := w.stage(s)
	if err != nil {
		return err
	}
	w.st.WaitNS += w.lap("stage", &t0, 0)
	switch {
	case w.straight(p):
		// One read for all of the piece: parts are cut for cores, of which this
		// needs none.
		if part.From == 0 {
			if err := w.Direct[p.Source].ReadInto(w.ctx, slot.(device.Twinned).Twin(), p.Len, p.Off); err != nil {
				return w.where("read", p.First, err)
			}
			w.st.ReadNS += w.lap("read", &t0, p.Len)
		}
	case !lends:
		if err := w.fill(src, p, part, slot.Memory()[:p.Len], &t0); err != nil {
			return err
		}
	}
	if !s.last() {
		return nil
	}
	if lends {
		b, err := lender.Lend(p.Off, p.Len)
		if err != nil {
			w.lane.Put(slot)
			return w.where("read", p.First, err)
		}
		slot.Borrow(b)
	}
	if err := w.settle(p); err != nil {
		w.lane.Put(slot)
		return err
	}
	err = w.lane.Submit(slot, p.Len, w.Plan.Jobs[p.First:p.First+p.Count], func(i int, err error) {
		if err != nil {
			w.cancel(w.where("decode", p.First+int32(i), err)) // only the first cause stays
			return
		}
		w.land(p.First + int32(i))
	})
	w.st.DecodeNS += w.lap(w.handOver, &t0, p.Len)
	if err != nil { // of the device: no job of the piece was begun
		return w.where("copy", p.First, err)
	}
	return nil
}

// settle gives the jobs of a piece their places.
func (r *run) settle(p *plan.Piece) error {
	if r.Place == nil {
		return nil
	}
	for i := p.First; i < p.First+p.Count; i++ {
		dst, err := r.Place(r.ctx, r.Plan.Refs[i].Want, r.Plan.Jobs[i].Dst)
		if err != nil {
			return err
		}
		r.Plan.Jobs[i].Dst = dst
	}
	return nil
}

// straight says whether a piece goes from its source to the device without the
// host: if there is a way, and no checksum in it.
func (w *worker) straight(p *plan.Piece) bool {
	if w.Direct == nil || w.Direct[p.Source] == nil {
		return false
	}
	for i := p.First; i < p.First+p.Count; i++ {
		if w.Plan.Refs[i].N >= 0 {
			return false
		}
	}
	return true
}

// stage gives the slot of a piece; whoever comes first waits for a free one,
// and the others for him.
func (r *run) stage(s *staged) (device.Slot, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.slot == nil {
		slot, err := r.lane.Get(r.ctx)
		if err != nil {
			return nil, err
		}
		s.slot = slot
	}
	return s.slot, nil
}

// last counts a part as filled. To the last one the slot belongs.
func (s *staged) last() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.left--; s.left > 0 {
		return false
	}
	s.slot = nil
	return true
}

// fill reads a part of a piece into its slot and compares its checksums. What
// is near is read in steps, so that a chunk is summed while it is in the core's
// cache; what is far away is asked for at once.
func (w *worker) fill(src source.Source, p *plan.Piece, part *plan.Part, b []byte, t0 *time.Time) error {
	const near, block = 1 << 20, 4096
	step := part.To - part.From
	if _, ok := src.(prefetcher); ok && !part.Whole {
		step = near
	}
	have := part.From
	read := func(job int32, end int64) error {
		for have < end {
			to := min((have+step+block-1)&^(block-1), part.To)
			if err := w.read(src, b[have:to], p.Off+have); err != nil {
				return w.where("read", job, err)
			}
			w.waited(t0)
			w.st.ReadNS += w.lap("read", t0, to-have)
			have = to
		}
		return nil
	}
	for i := part.First; i < part.First+part.Count; i++ {
		j := &w.Plan.Jobs[i]
		end := int64(j.Src) + int64(j.Chunk.Stored)
		if err := read(i, min(end, part.To)); err != nil {
			return err
		}
		if !w.checked(i) { // nor timed: there may be thousands in a piece
			continue
		}
		if err := w.check(i, b[j.Src:end]); err != nil {
			return err
		}
		w.st.CheckNS += w.lap("check", t0, int64(j.Chunk.Stored))
	}
	// Bytes of a job that began in an earlier part.
	return read(max(p.First, part.First-1), part.To)
}

// checked says whether a job has a checksum to compare. Bytes of a plain
// safetensors file have none.
func (w *worker) checked(job int32) bool { return !w.NoCheck && w.Plan.Refs[job].N >= 0 }

// check compares the checksum of a chunk's stored bytes, if it has one.
func (w *worker) check(job int32, stored []byte) error {
	if !w.checked(job) {
		return nil
	}
	j := &w.Plan.Jobs[job]
	if sum := codec.Sum(stored); sum != j.Chunk.Sum {
		return w.where("check", job, fault.New(fault.ErrCorrupt, "checksum mismatch: %08x stored, %08x computed", j.Chunk.Sum, sum))
	}
	return nil
}

// land counts a job as done. Any goroutine calls it.
func (r *run) land(job int32) {
	n := int64(r.Plan.Jobs[job].Chunk.Logical)
	want := r.Plan.Refs[job].Want
	r.landed.Add(n)
	if r.Progress != nil {
		r.Progress(n)
	}
	if atomic.AddInt32(&r.Plan.Left[want], -1) == 0 {
		if r.Trace != nil {
			now := time.Now()
			r.Trace.Verb("land", now, now, r.Wants[want].Bytes)
		}
		if r.Landed != nil {
			r.Landed(want)
		}
	}
}

// where says at which tensor, chunk and offset an error happened; one that
// another error or the caller caused stays as it is.
func (r *run) where(verb string, job int32, err error) error {
	if r.ctx.Err() != nil {
		return context.Cause(r.ctx)
	}
	ref := r.Plan.Refs[job]
	t := &r.Index.Tensors[r.Wants[ref.Want].Tensor]
	at := &fault.At{Verb: verb, Source: r.Index.Sources[t.Source].URI, Tensor: t.Name, Chunk: int64(ref.N), Offset: r.Plan.Jobs[job].Chunk.Off, Err: err}
	var inner *fault.At
	if errors.As(err, &inner) { // a source names itself and the exact offset
		at.Source, at.Err = inner.Source, inner.Err
		if inner.Offset >= 0 {
			at.Offset = inner.Offset
		}
	}
	return at
}

// waited takes what a range waited for out of the time since *t.
func (w *worker) waited(t *time.Time) {
	from, ok := w.steps.(source.Waiter)
	if !ok {
		return
	}
	turn, answer := from.Waited()
	w.st.TurnNS += turn.Nanoseconds()
	w.st.AnswerNS += answer.Nanoseconds()
	for _, x := range []struct {
		verb string
		took time.Duration
	}{{"turn", turn}, {"answer", answer}} {
		if w.Trace != nil && x.took > 0 {
			w.spans = append(w.spans, span{x.verb, onWorker, w.n, *t, t.Add(x.took), 0})
		}
		*t = t.Add(x.took)
	}
}

// lap returns the nanoseconds since *t, moves it to now, and records the stage.
func (w *worker) lap(verb string, t *time.Time, bytes int64) int64 {
	begin, now := *t, time.Now()
	*t = now
	if w.Trace != nil {
		w.spans = append(w.spans, span{verb, onWorker, w.n, begin, now, bytes})
	}
	return now.Sub(begin).Nanoseconds()
}
