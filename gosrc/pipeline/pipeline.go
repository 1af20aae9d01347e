// Package pipeline runs a plan: it reads pieces, verifies and decodes their chunks, and writes the bytes into the
// tensors. No other package starts workers for loading. The first error cancels the rest of the run. When Run
// returns, all workers have ended and every slot has been returned.
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

// rangeSlots is a sufficient number of slots for any number of ranges on the host: while a
// range waits for a slot, the kernel keeps receiving its bytes.
const rangeSlots = 16

// The number of bytes announced to the sources before workers read them: of local files, and of remote objects. The
// nodes of a cluster read different parts of a remote object at the same time.
const ahead, aheadRemote = 64 << 20, 1 << 30

// A Task is a plan and everything needed to run it.
type Task struct {
	Index   *tensor.Index
	Sources []source.Source // by Tensor.Source
	Wants   []plan.Want
	Plan    *plan.Plan
	// Queue is the device's queue, or nil for the host. The pipeline does not close it.
	Queue device.Queue
	// GDS has one reader per source. It reads bytes of plain tensors directly into device memory. A reader is nil
	// if its source does not support that. Bytes with a checksum go through slots.
	GDS     []device.Reader
	Workers int          // 0 means one per core
	Near    *nodes.Place // the NUMA node that the workers run on, or nil for any
	// Range, if not nil, returns how many bytes a worker should request in one range from a source's Ranges.
	// Range and Gate cannot both be set.
	Range func() int64
	Trace *Trace

	// Destination, if not nil, resolves a decode task's destination right before the task is submitted to the
	// device. It may wait.
	Destination func(ctx context.Context, want int32, dst unsafe.Pointer) (unsafe.Pointer, error)

	// Gate, if not nil, is called before a piece is read, with its first decode task. It waits until there is
	// space for the piece or ctx ends. A piece may only wait for earlier pieces.
	Gate func(ctx context.Context, task int32) error
	// Landed is called once for each want, by any worker, when its last byte has been written. Progress is called
	// with the number of tensor bytes of each finished decode task.
	Landed   func(want int32)
	Progress func(bytes int64)

	// Submitted, if not nil, is called when everything has been submitted without an error. From then on, other
	// callers may use the queue, and Run waits only for its own tasks.
	Submitted func()
}

// Stages holds the times and byte counts of a run, summed over its workers.
type Stages struct {
	Pieces    int64 `json:"pieces"`
	ReadBytes int64 `json:"read_bytes"` // stored bytes, including gaps between them
	LandBytes int64 `json:"land_bytes"`
	WaitNS    int64 `json:"wait_ns"`   // waiting for a free slot, or for space at the destination
	PermitNS  int64 `json:"permit_ns"` // waiting for a permit to open a range
	AnswerNS  int64 `json:"answer_ns"` // waiting for the first byte of responses
	ReadNS    int64 `json:"read_ns"`
	CheckNS   int64 `json:"check_ns"`
	DecodeNS  int64 `json:"decode_ns"`
	WallNS    int64 `json:"wall_ns"`
	Workers   int64 `json:"workers"`
	SlotBytes int64 `json:"slot_bytes"`
	RingBytes int64 `json:"ring_bytes"`
}

// HostSlots returns how many slots a run on the host makes. Its workers either keep a range open or request a slot
// for each piece.
func HostSlots(workers int, ranges bool) int {
	if ranges {
		return min(workers, max(rangeSlots, runtime.GOMAXPROCS(0)))
	}
	return workers
}

// Run runs the task and returns when it has ended.
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
		defer func() { _ = queue.TraceTimes(nil) }() // fails only on a broken device
	}
	r.ctx, r.cancel = context.WithCancelCause(ctx)
	defer r.cancel(nil)
	r.feed.permits, r.feed.empty = context.WithCancel(r.ctx)
	defer r.feed.empty()
	var mu sync.Mutex
	spawn.Workers("pipeline worker", workers, r.cancel, func(n int) error { // later causes are ignored
		w := worker{run: r, task: t, n: n}
		err := t.Near.Run(w.runLoop)
		if t.Trace != nil {
			t.Trace.addSpans(w.spans)
		}
		mu.Lock()
		defer mu.Unlock()
		st.addTimes(&w.st)
		return err
	})
	for i := range r.staged { // return the slots that were only partly filled before an error
		if s := &r.staged[i]; s.slot != nil {
			queue.Put(s.slot)
		}
	}
	// Wait for the submitted tasks even after an error: nothing may write to the tensors once Run has returned.
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
	st.ReadBytes += r.feed.skipped
	st.WallNS = time.Since(start).Nanoseconds()
	if r.ctx.Err() != nil {
		return st, context.Cause(r.ctx)
	}
	return st, nil
}

func newRun(t *Task, queue device.Queue) *run {
	r := &run{task: t, feed: feed{task: t, facts: make([]source.Facts, len(t.Sources))}, queue: queue, last: "decode",
		staged: make([]staged, len(t.Plan.Pieces)), checks: !queue.CanCheck()}
	if queue.Asynchronous() {
		r.last = "submit"
	}
	for i, s := range t.Sources {
		r.feed.facts[i] = s.Facts()
		r.prefetches = r.prefetches || r.feed.facts[i].Prefetch != nil
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

// run is the state that the workers of one Run share.
type run struct {
	task    *Task
	feed    feed
	ctx     context.Context
	cancel  context.CancelCauseFunc
	queue   device.Queue
	staged  []staged       // indexed by piece
	landed  atomic.Int64   // bytes
	pending sync.WaitGroup // submitted tasks whose done call has not returned yet
	last    string         // trace name of a worker's last stage
	checks  bool           // workers compare checksums

	prefetches bool // a source has Prefetch
	prefetch   sync.Mutex
	// Guarded by prefetch: the numbers of the pieces that were announced to their sources and that were reached, and
	// the bytes between.
	announced, reached, between int64
}

// A staged piece is filled by several workers. The first one gets the slot and the last one submits it.
type staged struct {
	mu   sync.Mutex
	slot device.Slot // nil before it is obtained and after it is submitted or returned
	left int         // shares not filled yet
}

// last counts a share as filled and reports whether it was the last one. The worker that fills the last share owns the
// slot.
func (s *staged) last() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.left--; s.left > 0 {
		return false
	}
	s.slot = nil
	return true
}

// announcePieces announces the next pieces to their sources. If another worker is already announcing, it returns
// immediately.
func (r *run) announcePieces(piece int64) {
	if !r.prefetches || !r.prefetch.TryLock() {
		return
	}
	defer r.prefetch.Unlock()
	pieces := r.task.Plan.Pieces
	for ; r.reached <= piece; r.reached++ {
		if r.reached < r.announced {
			r.between -= pieces[r.reached].Len
		}
	}
	r.announced = max(r.announced, r.reached)
	most := int64(ahead)
	if r.task.Range != nil {
		most = aheadRemote
	}
	if r.between > most/2 {
		return
	}
	for ; r.announced < int64(len(pieces)) && r.between < most; r.announced++ {
		p := &pieces[r.announced]
		if tell := r.feed.facts[p.Source].Prefetch; tell != nil {
			tell(p.Off, p.Len)
		}
		r.between += p.Len
	}
}

// landTask counts a task as done. Any goroutine may call it.
func (r *run) landTask(task int32) {
	n := int64(r.task.Plan.Tasks[task].Chunk.Logical)
	want := r.task.Plan.Refs[task].Want
	r.landed.Add(n)
	if r.task.Progress != nil {
		r.task.Progress(n)
	}
	if atomic.AddInt32(&r.task.Plan.Left[want], -1) == 0 {
		if r.task.Trace != nil {
			now := time.Now()
			r.task.Trace.Verb("land", now, now, r.task.Wants[want].Bytes)
		}
		if r.task.Landed != nil {
			r.task.Landed(want)
		}
	}
}

// locateError adds tensor, chunk and offset to an error. If the run has been cancelled, it returns the cause of
// the cancellation instead.
func (r *run) locateError(verb string, task int32, err error) error {
	if r.ctx.Err() != nil {
		return context.Cause(r.ctx)
	}
	ref := r.task.Plan.Refs[task]
	t := &r.task.Index.Tensors[r.task.Wants[ref.Want].Tensor]
	at := &errs.At{Verb: verb, Source: r.task.Index.Sources[t.Source].URI, Tensor: t.Name, Chunk: int64(ref.N),
		Offset: r.task.Plan.Tasks[task].Chunk.Off, Err: err}
	var inner *errs.At
	if errors.As(err, &inner) { // the source gave its URI and the exact offset
		if inner.Tensor != "" { // already complete, for example a decode error
			return inner
		}
		at.Source, at.Err = inner.Source, inner.Err
		if inner.Offset >= 0 {
			at.Offset = inner.Offset
		}
	}
	return at
}
