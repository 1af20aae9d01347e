// Package pipeline runs a plan: it reads pieces, checks and decodes their chunks,
// and lands the bytes in the tensors. Only this package starts workers for loading.
// The first error wins and cancels the rest; when Run returns, no worker is left
// and every slot is back.
package pipeline

import (
	"context"
	"errors"
	"runtime"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/device/cpu"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/nodes"
	"github.com/overwire/overwire/gosrc/internal/spawn"
	"github.com/overwire/overwire/gosrc/plan"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/tensor"
)

// rangeSlots is enough for any number of ranges on the host: while one waits for a
// slot, the kernel receives its bytes.
const rangeSlots = 16

// ahead is how many bytes are announced before the readers.
const ahead = 64 << 20

// A Task is a plan and what it needs to run.
type Task struct {
	Index   *tensor.Index
	Sources []source.Source // by Tensor.Source
	Wants   []plan.Want
	Plan    *plan.Plan
	// Queue is the device's; nil: the host. The pipeline does not close it.
	Queue device.Queue
	// GDS, by source, reads plain tensors' bytes straight into device memory; nil:
	// not from that source. Bytes with a checksum go through slots.
	GDS     []device.Reader
	Workers int          // 0: one per core
	Near    *nodes.Place // where the workers run; nil: anywhere
	// Range, if not nil, says how many bytes a worker should request of a source's
	// Ranges at once, to read them in steps. It excludes Gate.
	Range func() int64
	Trace *Trace

	// Destination, if not nil, resolves a decode task's destination right before it
	// is submitted to the device; it may wait.
	Destination func(ctx context.Context, want int32, dst unsafe.Pointer) (unsafe.Pointer, error)

	// Gate, if not nil, is called before a piece is read, with its first decode
	// task: it waits until there is space for the piece, or until ctx ends. Pieces
	// may wait for earlier ones only.
	Gate func(ctx context.Context, task int32) error
	// Landed is called once for each want whose last byte is in place, by any
	// worker. Progress gets the tensor bytes of each finished decode task.
	Landed   func(want int32)
	Progress func(bytes int64)

	// Submitted, if not nil, is called once everything has been submitted without an
	// error: from then on the queue may have other users, and Run waits for its own work.
	Submitted func()
}

// Stages says what a run cost, summed over its workers, in nanoseconds and bytes.
type Stages struct {
	Pieces    int64 `json:"pieces"`
	ReadBytes int64 `json:"read_bytes"` // stored bytes, with the gaps between them
	LandBytes int64 `json:"land_bytes"`
	WaitNS    int64 `json:"wait_ns"`   // for a free slot, or for space at the destination
	PermitNS  int64 `json:"permit_ns"` // for a permit to open a range
	AnswerNS  int64 `json:"answer_ns"` // for the beginning of responses
	ReadNS    int64 `json:"read_ns"`
	CheckNS   int64 `json:"check_ns"`
	DecodeNS  int64 `json:"decode_ns"`
	WallNS    int64 `json:"wall_ns"`
	Workers   int64 `json:"workers"`
	SlotBytes int64 `json:"slot_bytes"`
	RingBytes int64 `json:"ring_bytes"`
}

// HostSlots is how many slots a run on the host makes for its workers, of which
// each has a range open or asks for each piece.
func HostSlots(workers int, ranges bool) int {
	if ranges {
		return min(workers, max(rangeSlots, runtime.GOMAXPROCS(0)))
	}
	return workers
}

// Run runs the task to its end.
func Run(ctx context.Context, t *Task) (Stages, error) {
	start := time.Now()
	workers := t.Workers
	if workers <= 0 {
		workers = runtime.GOMAXPROCS(0)
	}
	workers = max(1, min(workers, len(t.Plan.Shares)))
	st := Stages{Workers: int64(workers), Pieces: int64(len(t.Plan.Pieces)), ReadBytes: t.Plan.Read}
	if len(t.Plan.Pieces) == 0 {
		return st, nil
	}
	queue := t.Queue
	if queue == nil {
		host, err := cpu.NewQueue(HostSlots(workers, t.Range != nil), t.Plan.Slot)
		if err != nil {
			return st, err
		}
		defer host.Close()
		queue, st.SlotBytes = host, t.Plan.Slot
	}
	st.RingBytes = queue.PinnedBytes()
	r := newRun(t, queue)
	if t.Trace != nil {
		if err := queue.TraceTimes(t.Trace.addDevice); err != nil {
			return st, err
		}
		defer func() { _ = queue.TraceTimes(nil) }() // only a broken device refuses
	}
	r.ctx, r.cancel = context.WithCancelCause(ctx)
	defer r.cancel(nil)
	r.permits, r.empty = context.WithCancel(r.ctx)
	defer r.empty()
	var mu sync.Mutex
	spawn.Workers("pipeline worker", workers, r.cancel, func(n int) error { // only the first cause stays
		w := worker{run: r, n: n}
		err := t.Near.Run(w.runLoop)
		if t.Trace != nil {
			t.Trace.addSpans(w.spans)
		}
		mu.Lock()
		defer mu.Unlock()
		st.addTimes(&w.st)
		return err
	})
	for i := range r.staged { // slots that an error left half filled
		if s := &r.staged[i]; s.slot != nil {
			queue.Put(s.slot)
		}
	}
	// Wait for what was submitted even after an error: nothing may write to the
	// tensors once Run has returned.
	if t.Submitted == nil {
		if err := queue.Drain(context.WithoutCancel(ctx)); err != nil {
			r.cancel(err)
		}
	} else {
		if r.ctx.Err() == nil {
			t.Submitted()
		}
		r.pending.Wait()
	}
	st.LandBytes = r.landed.Load()
	st.ReadBytes += r.skipped
	st.WallNS = time.Since(start).Nanoseconds()
	if r.ctx.Err() != nil {
		return st, context.Cause(r.ctx)
	}
	return st, nil
}

func newRun(t *Task, queue device.Queue) *run {
	r := &run{feed: feed{Task: t, facts: make([]source.Facts, len(t.Sources))}, queue: queue, last: "decode",
		staged: make([]staged, len(t.Plan.Pieces)), checks: !queue.CanCheck()}
	if queue.Asynchronous() {
		r.last = "submit"
	}
	for i, s := range t.Sources {
		r.facts[i] = s.Facts()
		r.prefetches = r.prefetches || r.facts[i].Prefetch != nil
	}
	for i := range t.Plan.Shares {
		r.staged[t.Plan.Shares[i].Piece].left++
	}
	return r
}

func (st *Stages) addTimes(w *Stages) {
	st.WaitNS += w.WaitNS
	st.PermitNS += w.PermitNS
	st.AnswerNS += w.AnswerNS
	st.ReadNS += w.ReadNS
	st.CheckNS += w.CheckNS
	st.DecodeNS += w.DecodeNS
}

// run is what the workers of one Run share.
type run struct {
	feed
	ctx     context.Context
	cancel  context.CancelCauseFunc
	queue   device.Queue
	staged  []staged       // by piece
	landed  atomic.Int64   // bytes
	pending sync.WaitGroup // tasks that were submitted, and whose done call has not returned
	last    string         // the name in traces of a worker's share in decoding
	checks  bool           // workers compare checksums

	prefetches bool // some source has Prefetch
	prefetch   sync.Mutex
	announced  int64 // pieces announced to their sources; guarded by prefetch
}

// A staged piece is filled by several workers: the first gets the slot, the last
// submits it.
type staged struct {
	mu   sync.Mutex
	slot device.Slot // nil before it is there, and again once it was submitted or returned
	left int         // shares to come
}

// announcePieces announces the next pieces to their sources. One worker at a time does
// it; the others skip it.
func (r *run) announcePieces(piece int64) {
	if !r.prefetches || !r.prefetch.TryLock() {
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
		if tell := r.facts[p.Source].Prefetch; tell != nil {
			tell(p.Off, p.Len)
		}
		n += p.Len
	}
	r.announced = i
}

// A worker does batches one after the other. It takes each share through all
// stages, while its bytes are in that core's cache.
type worker struct {
	*run
	n     int // of this worker
	st    Stages
	spans []span

	// The open range, nil if there is none; its offset; a buffer for gaps.
	steps source.Range
	at    int64
	waste []byte
}

func (w *worker) runLoop() error {
	for {
		b, from, ok := w.takeBatch(nil)
		if !ok {
			return nil
		}
		if w.ctx.Err() != nil {
			return context.Cause(w.ctx)
		}
		var err error
		if from == nil {
			err = w.runBatch(b)
		} else {
			err = w.readRange(from, w.Plan.Pieces[w.Plan.Shares[b.first].Piece].First)
		}
		if err != nil {
			return err
		}
	}
}

// readRange waits for a permit and does the next batch with it, unless other workers
// have done them all; task says where an error happened.
func (w *worker) readRange(from source.Ranges, task int32) error {
	t0 := time.Now()
	steps, err := from.OpenRange(w.permits)
	if err != nil {
		if w.ctx.Err() == nil && w.permits.Err() != nil {
			return nil // others did the rest
		}
		return w.placeError("read", task, err)
	}
	w.steps = steps
	defer func() {
		_ = steps.Close()
		w.steps = nil
	}()
	b, now, ok := w.takeBatch(from)
	if !ok || now != from {
		return nil
	}
	share := &w.Plan.Shares[b.first]
	p := &w.Plan.Pieces[share.Piece]
	w.at = p.Off + share.From
	if err := steps.Begin(w.ctx, w.at, b.n); err != nil { // keep no slot while waiting for the response
		return w.placeError("read", p.First, err)
	}
	w.subtractWaits(&t0)
	return w.runBatch(b)
}

func (w *worker) runBatch(b batch) error {
	for i := b.first; i < b.end; i++ {
		if w.ctx.Err() != nil {
			return context.Cause(w.ctx)
		}
		share := &w.Plan.Shares[i]
		w.announcePieces(int64(share.Piece))
		if err := w.runShare(share, &w.Plan.Pieces[share.Piece]); err != nil {
			return err
		}
	}
	return nil
}

// readBytes fills b from off of a source, or of the open range.
func (w *worker) readBytes(src source.Source, b []byte, off int64) error {
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

func (w *worker) runShare(share *plan.Share, p *plan.Piece) error {
	src, view := w.Sources[p.Source], w.facts[p.Source].View
	t0 := time.Now()
	if w.Gate != nil {
		if err := w.Gate(w.ctx, p.First); err != nil {
			return err
		}
		w.st.WaitNS += w.lapTime("stage", &t0, 0)
	}
	if p.InPlace != nil {
		b := unsafe.Slice((*byte)(p.InPlace), p.Len)
		if err := w.readBytes(src, b, p.Off); err != nil {
			return w.placeError("read", p.First, err)
		}
		w.subtractWaits(&t0)
		w.st.ReadNS += w.lapTime("read", &t0, p.Len)
		if w.comparesSums(p) {
			if err := w.checkSum(p.First, b); err != nil {
				return err
			}
			w.st.CheckNS += w.lapTime("check", &t0, p.Len)
		}
		w.landTask(p.First)
		return nil
	}
	s := &w.staged[share.Piece]
	slot, err := w.stagePiece(s)
	if err != nil {
		return err
	}
	w.st.WaitNS += w.lapTime("stage", &t0, 0)
	switch {
	case w.byGDS(p):
		// Read the whole piece at once: shares exist for decoding on several cores,
		// which this does not need.
		if share.From == 0 {
			if err := w.GDS[p.Source].ReadInto(w.ctx, slot.ViewMirror(), p.Len, p.Off); err != nil {
				return w.placeError("read", p.First, err)
			}
			w.st.ReadNS += w.lapTime("read", &t0, p.Len)
		}
	case view == nil:
		if err := w.fillShare(src, p, share, slot.Memory()[:p.Len], &t0); err != nil {
			return err
		}
	case w.checks && w.comparesSums(p):
		if err := w.compareSums(view, p, share, &t0); err != nil {
			return err
		}
	}
	if !s.last() {
		return nil
	}
	return w.submitSlot(slot, view, p, &t0)
}

// submitSlot gives a filled slot to the device, and after an error or a panic back to the
// queue, whose Close waits for every slot.
func (w *worker) submitSlot(slot device.Slot, view func(off, n int64) ([]byte, error), p *plan.Piece,
	t0 *time.Time) error {
	mine := true
	defer func() {
		if mine {
			w.queue.Put(slot)
		}
	}()
	if view != nil {
		b, err := view(p.Off, p.Len)
		if err != nil {
			return w.placeError("read", p.First, err)
		}
		slot.View(b)
	}
	if !w.checks && w.comparesSums(p) {
		slot.CheckOnSubmit()
	}
	if err := w.settleTasks(p, t0); err != nil {
		return err
	}
	mine = false
	w.pending.Add(int(p.Count))
	err := w.queue.Submit(slot, p.Len, w.Plan.Tasks[p.First:p.First+p.Count], func(i int, err error) {
		defer w.pending.Done()
		if err != nil {
			w.cancel(w.placeError(stageOf(err), p.First+int32(i), err)) // only the first cause stays
			return
		}
		w.landTask(p.First + int32(i))
	})
	w.st.DecodeNS += w.lapTime(w.last, t0, p.Len)
	if err != nil { // an error of the device: none of the piece's tasks began
		w.pending.Add(-int(p.Count))
		return w.placeError("copy", p.First, err)
	}
	return nil
}

// settleTasks resolves the destinations of a piece's decode tasks.
func (w *worker) settleTasks(p *plan.Piece, t0 *time.Time) error {
	if w.Destination == nil {
		return nil
	}
	for i := p.First; i < p.First+p.Count; i++ {
		dst, err := w.Destination(w.ctx, w.Plan.Refs[i].Want, w.Plan.Tasks[i].Dst)
		if err != nil {
			return err
		}
		w.Plan.Tasks[i].Dst = dst
	}
	w.st.WaitNS += w.lapTime("stage", t0, 0)
	return nil
}

// byGDS reports whether a piece goes from its source to the device without the
// host: if there is a reader, and no checksum to compare.
func (w *worker) byGDS(p *plan.Piece) bool {
	if w.GDS == nil || w.GDS[p.Source] == nil {
		return false
	}
	for i := p.First; i < p.First+p.Count; i++ {
		if w.Plan.Tasks[i].Summed {
			return false
		}
	}
	return true
}

// stagePiece returns the slot of a piece; the first worker that asks waits for a free
// one, and the others for that worker.
func (w *worker) stagePiece(s *staged) (slot device.Slot, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.slot != nil {
		return s.slot, nil
	}
	if len(w.Plan.Shares) > len(w.Plan.Pieces) {
		slot, err = w.queue.Get(w.ctx)
	} else {
		slot, err = w.queue.GetFor(w.ctx, w.n)
	}
	s.slot = slot
	return slot, err
}

// last counts a share as filled. The worker that fills the last one owns the slot.
func (s *staged) last() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.left--; s.left > 0 {
		return false
	}
	s.slot = nil
	return true
}

// fillShare reads a share of a piece into its slot, at once, and compares its checksums. A
// share is small enough for the core's cache; reads of a quarter of it, each summed
// before the next, summed faster and read slower.
func (w *worker) fillShare(src source.Source, p *plan.Piece, share *plan.Share, b []byte, t0 *time.Time) error {
	if err := w.readBytes(src, b[share.From:share.To], p.Off+share.From); err != nil {
		return w.placeError("read", w.taskAt(p, share, err), err)
	}
	w.subtractWaits(t0)
	w.st.ReadNS += w.lapTime("read", t0, share.To-share.From)
	return w.checkShare(share, b, t0)
}

// taskAt is the task of a share that could not be read, or, where the error does not say
// at which byte, the first one.
func (w *worker) taskAt(p *plan.Piece, share *plan.Share, err error) int32 {
	at := share.From
	if inner, ok := errors.AsType[*errs.At](err); ok {
		at = max(at, inner.Offset-p.Off)
	}
	i := max(p.First, share.First-1) // an earlier share's may reach into this one
	for i+1 < share.First+share.Count && int64(w.Plan.Tasks[i+1].Src) <= at {
		i++
	}
	return i
}

// landTask counts a task as done. Any goroutine may call it.
func (r *run) landTask(task int32) {
	n := int64(r.Plan.Tasks[task].Chunk.Logical)
	want := r.Plan.Refs[task].Want
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

// placeError adds tensor, chunk and offset to an error. One that another error or the
// caller caused stays as it is.
func (r *run) placeError(verb string, task int32, err error) error {
	if r.ctx.Err() != nil {
		return context.Cause(r.ctx)
	}
	ref := r.Plan.Refs[task]
	t := &r.Index.Tensors[r.Wants[ref.Want].Tensor]
	at := &errs.At{Verb: verb, Source: r.Index.Sources[t.Source].URI, Tensor: t.Name, Chunk: int64(ref.N),
		Offset: r.Plan.Tasks[task].Chunk.Off, Err: err}
	var inner *errs.At
	if errors.As(err, &inner) { // a source names itself and the exact offset
		if inner.Tensor != "" { // one that decodes names all; a read may be of several tensors
			return inner
		}
		at.Source, at.Err = inner.Source, inner.Err
		if inner.Offset >= 0 {
			at.Offset = inner.Offset
		}
	}
	return at
}

// lapTime returns the nanoseconds since *t, moves *t to now, and records the stage.
func (w *worker) lapTime(verb string, t *time.Time, bytes int64) int64 {
	begin, now := *t, time.Now()
	*t = now
	if w.Trace != nil {
		w.spans = append(w.spans, span{verb, onWorker, w.n, begin, now, bytes})
	}
	return now.Sub(begin).Nanoseconds()
}
