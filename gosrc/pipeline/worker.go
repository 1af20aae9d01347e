package pipeline

// This file defines the workers, which run all stages of their shares, and distributes shares to them.

import (
	"context"
	"errors"
	"sync"
	"time"
	"unsafe"

	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/crc32c"
	"github.com/overwire/overwire/gosrc/plan"
	"github.com/overwire/overwire/gosrc/source"
)

// A worker processes one batch after another. It runs all stages of a share while the share's bytes are in
// the core's cache.
type worker struct {
	run   *run
	task  *Task
	n     int // the worker's number
	st    Stages
	spans []span

	// The open range or nil, the next offset in it, and a buffer for the gaps.
	steps source.Range
	at    int64
	waste []byte
}

func (w *worker) runLoop() error {
	for {
		b, from, ok := w.run.feed.takeBatch(nil)
		if !ok {
			return nil
		}
		if w.run.ctx.Err() != nil {
			return context.Cause(w.run.ctx)
		}
		var err error
		if from == nil {
			err = w.runBatch(b)
		} else {
			err = w.readRange(from, w.task.Plan.Pieces[w.task.Plan.Shares[b.first].Piece].First)
		}
		if err != nil {
			return err
		}
	}
}

// readRange waits for a permit, opens a range with it and processes the next batch from it. It returns early if no
// batches are left. If the range cannot be opened, the error names task.
func (w *worker) readRange(from source.Ranges, task int32) error {
	t0 := time.Now()
	steps, err := from.OpenRange(w.run.feed.permits)
	if err != nil {
		if w.run.ctx.Err() == nil && w.run.feed.permits.Err() != nil {
			return nil // other workers took the remaining batches
		}
		return w.run.locateError("read", task, err)
	}
	w.steps = steps
	defer func() {
		_ = steps.Close()
		w.steps = nil
	}()
	b, now, ok := w.run.feed.takeBatch(from)
	if !ok || now != from {
		return nil
	}
	share := &w.task.Plan.Shares[b.first]
	p := &w.task.Plan.Pieces[share.Piece]
	w.at = p.Off + share.From
	w.run.announcePieces(int64(share.Piece))
	if err := steps.Begin(w.run.ctx, w.at, b.n); err != nil { // takes no slot while it waits for the response
		return w.run.locateError("read", p.First, err)
	}
	w.subtractWaits(&t0)
	return w.runBatch(b)
}

func (w *worker) runBatch(b batch) error {
	for i := b.first; i < b.end; i++ {
		if w.run.ctx.Err() != nil {
			return context.Cause(w.run.ctx)
		}
		share := &w.task.Plan.Shares[i]
		w.run.announcePieces(int64(share.Piece))
		if err := w.runShare(share, &w.task.Plan.Pieces[share.Piece]); err != nil {
			return err
		}
	}
	return nil
}

// readBytes fills b with the bytes at off, from the open range if there is one, otherwise from src.
func (w *worker) readBytes(src source.Source, b []byte, off int64) error {
	if w.steps == nil {
		return src.ReadAt(w.run.ctx, b, off)
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
	src, view := w.task.Sources[p.Source], w.run.feed.facts[p.Source].View
	t0 := time.Now()
	if w.task.Gate != nil {
		if err := w.task.Gate(w.run.ctx, p.First); err != nil {
			return err
		}
		w.st.WaitNS += w.lapTime("stage", &t0, 0)
	}
	if p.InPlace != nil {
		b := unsafe.Slice((*byte)(p.InPlace), p.Len)
		if err := w.readBytes(src, b, p.Off); err != nil {
			return w.run.locateError("read", p.First, err)
		}
		w.subtractWaits(&t0)
		w.st.ReadNS += w.lapTime("read", &t0, p.Len)
		if w.comparesSums(p) {
			if err := w.checkSum(p, p.First, b, p.Off); err != nil {
				return err
			}
			w.st.CheckNS += w.lapTime("check", &t0, p.Len)
		}
		w.run.landTask(p.First)
		return nil
	}
	s := &w.run.staged[share.Piece]
	slot, err := w.stagePiece(s)
	if err != nil {
		return err
	}
	w.st.WaitNS += w.lapTime("stage", &t0, 0)
	switch {
	case w.byGDS(p):
		// The worker of the first share reads the whole piece. Shares spread work over cores, which GDS does not need.
		if share.From == 0 {
			if err := w.task.GDS[p.Source].ReadInto(w.run.ctx, slot.ViewMirror(), p.Len, p.Off); err != nil {
				return w.run.locateError("read", p.First, err)
			}
			w.st.ReadNS += w.lapTime("read", &t0, p.Len)
		}
	case view == nil:
		if err := w.fillShare(src, p, share, slot.Memory()[:p.Len], &t0); err != nil {
			return err
		}
	case w.run.checks && w.comparesSums(p):
		if err := w.compareSums(view, p, share, &t0); err != nil {
			return err
		}
	}
	if !s.last() {
		return nil
	}
	return w.submitSlot(slot, view, p, &t0)
}

// submitSlot submits a filled slot to the device. If that fails or panics, it returns the slot to the queue, because
// the queue's Close waits for every slot.
func (w *worker) submitSlot(slot device.Slot, view func(off, n int64) ([]byte, error), p *plan.Piece,
	t0 *time.Time) error {
	mine := true
	defer func() {
		if mine {
			w.run.queue.Put(slot)
		}
	}()
	if view != nil {
		b, err := view(p.Off, p.Len)
		if err != nil {
			return w.run.locateError("read", p.First, err)
		}
		slot.View(b)
	}
	if !w.run.checks && w.comparesSums(p) {
		slot.CheckOnSubmit()
	}
	if err := w.bindTasks(p, t0); err != nil {
		return err
	}
	mine = false
	w.run.pending.Add(int(p.Count))
	err := w.run.queue.Submit(slot, p.Len, w.task.Plan.Tasks[p.First:p.First+p.Count], func(i int, err error) {
		defer w.run.pending.Done()
		if err != nil {
			if j := &w.task.Plan.Tasks[p.First+int32(i)]; errors.Is(err, errs.ErrCorrupt) {
				w.doubtBytes(p, p.Off+int64(j.Src), int64(j.Chunk.Stored)) // the next load reads them again
			}
			w.run.cancel(w.run.locateError(stageOf(err), p.First+int32(i), err)) // later causes are ignored
			return
		}
		w.run.landTask(p.First + int32(i))
	})
	w.st.DecodeNS += w.lapTime(w.run.last, t0, p.Len)
	if err != nil { // the device failed before any of the tasks began
		w.run.pending.Add(-int(p.Count))
		return w.run.locateError("copy", p.First, err)
	}
	return nil
}

// bindTasks resolves the destinations of a piece's decode tasks.
func (w *worker) bindTasks(p *plan.Piece, t0 *time.Time) error {
	if w.task.Destination == nil {
		return nil
	}
	for i := p.First; i < p.First+p.Count; i++ {
		dst, err := w.task.Destination(w.run.ctx, w.task.Plan.Refs[i].Want, w.task.Plan.Tasks[i].Dst)
		if err != nil {
			return err
		}
		w.task.Plan.Tasks[i].Dst = dst
	}
	w.st.WaitNS += w.lapTime("stage", t0, 0)
	return nil
}

// byGDS reports whether a GDS reader copies the piece directly to the device. The piece's source needs such a reader,
// and none of its chunks may have a checksum.
func (w *worker) byGDS(p *plan.Piece) bool {
	if w.task.GDS == nil || w.task.GDS[p.Source] == nil {
		return false
	}
	for i := p.First; i < p.First+p.Count; i++ {
		if w.task.Plan.Tasks[i].Summed {
			return false
		}
	}
	return true
}

// stagePiece returns the slot of a piece. The first worker to call it waits for a free slot, and the others wait
// for the first.
func (w *worker) stagePiece(s *staged) (slot device.Slot, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.slot != nil {
		return s.slot, nil
	}
	if len(w.task.Plan.Shares) > len(w.task.Plan.Pieces) {
		slot, err = w.run.queue.Get(w.run.ctx)
	} else {
		slot, err = w.run.queue.GetFor(w.run.ctx, w.n)
	}
	s.slot = slot
	return slot, err
}

// fillShare reads a share of a piece into its slot and verifies its checksums. It uses one read because a share fits in
// the core's cache. Reading and verifying one quarter at a time made verifying faster and reading slower.
func (w *worker) fillShare(src source.Source, p *plan.Piece, share *plan.Share, b []byte, t0 *time.Time) error {
	if err := w.readBytes(src, b[share.From:share.To], p.Off+share.From); err != nil {
		return w.run.locateError("read", w.taskAt(p, share, err), err)
	}
	w.subtractWaits(t0)
	w.st.ReadNS += w.lapTime("read", t0, share.To-share.From)
	return w.checkShare(share, b, t0)
}

// taskAt returns the task of a share that contains the byte that could not be read. If the error has no offset, it
// returns the first task.
func (w *worker) taskAt(p *plan.Piece, share *plan.Share, err error) int32 {
	at := share.From
	if inner, ok := errors.AsType[*errs.At](err); ok {
		at = max(at, inner.Offset-p.Off)
	}
	i := max(p.First, share.First-1) // a chunk of an earlier share may extend into this one
	for i+1 < share.First+share.Count && int64(w.task.Plan.Tasks[i+1].Src) <= at {
		i++
	}
	return i
}

// lapTime returns the nanoseconds since *t, sets *t to now, and records the stage in the trace.
func (w *worker) lapTime(verb string, t *time.Time, bytes int64) int64 {
	begin, now := *t, time.Now()
	*t = now
	if w.task.Trace != nil {
		w.spans = append(w.spans, span{verb, onWorker, w.n, begin, now, bytes})
	}
	return now.Sub(begin).Nanoseconds()
}

// subtractWaits moves *t forward by the range's waiting times and records them.
func (w *worker) subtractWaits(t *time.Time) {
	if w.steps == nil {
		return
	}
	permit, answer := w.steps.Waited()
	w.st.PermitNS += permit.Nanoseconds()
	w.st.AnswerNS += answer.Nanoseconds()
	for _, x := range []struct {
		verb string
		took time.Duration
	}{{"permit", permit}, {"answer", answer}} {
		if w.task.Trace != nil && x.took > 0 {
			w.spans = append(w.spans, span{x.verb, onWorker, w.n, *t, t.Add(x.took), 0})
		}
		*t = t.Add(x.took)
	}
}

// comparesSums reports whether the piece's checksums are compared. That is done for bytes that were read, and for
// bytes in memory that may have changed.
func (w *worker) comparesSums(p *plan.Piece) bool {
	f := &w.run.feed.facts[p.Source]
	return f.View == nil || f.Compare
}

// compareSums compares the checksums of a share that is already in memory.
func (w *worker) compareSums(view func(off, n int64) ([]byte, error), p *plan.Piece, share *plan.Share,
	t0 *time.Time) error {
	b, err := view(p.Off, p.Len)
	if err != nil {
		return w.run.locateError("read", p.First, err)
	}
	return w.checkShare(share, b, t0)
}

// checkShare compares the checksums of a share. b holds the bytes of the whole piece.
func (w *worker) checkShare(share *plan.Share, b []byte, t0 *time.Time) error {
	n := int64(0)
	for i := share.First; w.run.checks && i < share.First+share.Count; i++ {
		j := &w.task.Plan.Tasks[i]
		if !j.Summed { // bytes of a plain file
			continue
		}
		p := &w.task.Plan.Pieces[share.Piece]
		if err := w.checkSum(p, i, b[j.Src:int64(j.Src)+int64(j.Chunk.Stored)], p.Off+int64(j.Src)); err != nil {
			return err
		}
		n += int64(j.Chunk.Stored)
	}
	if n > 0 { // no span if there was nothing to compare
		w.st.CheckNS += w.lapTime("check", t0, n)
	}
	return nil
}

// checkSum compares the checksum of a chunk's stored bytes at an offset, if it has one. Wrong bytes that came through
// other processes are read from their store.
func (w *worker) checkSum(p *plan.Piece, task int32, stored []byte, off int64) error {
	j := &w.task.Plan.Tasks[task]
	if !w.run.checks || !j.Summed {
		return nil
	}
	sum := crc32c.Sum(stored)
	if sum != j.Chunk.Sum && w.doubtBytes(p, off, int64(len(stored))) {
		if err := w.task.Sources[p.Source].ReadAt(source.Urgent(w.run.ctx), stored, off); err != nil {
			return w.run.locateError("read", task, err)
		}
		sum = crc32c.Sum(stored)
	}
	if sum != j.Chunk.Sum {
		return w.run.locateError("check", task, errs.NewMismatch(j.Chunk.Sum, sum))
	}
	return nil
}

// doubtBytes reports wrong bytes to their source, and returns whether reading them again may give others.
func (w *worker) doubtBytes(p *plan.Piece, off, n int64) bool {
	doubt := w.run.feed.facts[p.Source].Doubt
	return doubt != nil && doubt(off, n)
}

// stageOf returns the stage of the device in which a task failed.
func stageOf(err error) string {
	if errs.RuleOf(err) == errs.RuleChecksum {
		return "check"
	}
	return "decode"
}

// A batch is a sequence of shares for one worker: Shares[first:end]. If they are read as one range, n is the length
// of the range including its gaps. Otherwise n is 0.
type batch struct {
	first, end int32
	n          int64
}

// gap is the largest gap in bytes that is read and discarded. A larger gap starts a new range.
const gap = 256 << 10

// A feed distributes the shares to the workers, in order.
type feed struct {
	task    *Task
	facts   []source.Facts  // indexed by source
	permits context.Context // ends when no shares are left
	empty   context.CancelFunc

	mu      sync.Mutex
	next    int   // next share
	skipped int64 // bytes of gaps in ranges
}

// takeBatch returns the next batch: one share or, for a source that is read in ranges, as many shares as fit in one
// range. permit is the Ranges for which the caller has a permit, or nil. If the next share needs a different permit or
// none, the batch is empty, and from is the Ranges to ask for a permit, or nil. ok is false when no shares are left.
//
// A worker with an open range may wait for slots, but a worker with a slot never waits for a range. Therefore one slot
// is enough for any number of workers.
func (q *feed) takeBatch(permit source.Ranges) (b batch, from source.Ranges, ok bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	shares, pieces := q.task.Plan.Shares, q.task.Plan.Pieces
	if q.next == len(shares) {
		return batch{}, nil, false
	}
	first := &shares[q.next]
	b = batch{first: int32(q.next), end: int32(q.next)}
	if q.task.Range != nil {
		from = q.facts[pieces[first.Piece].Source].Ranges
	}
	if from != permit {
		return b, from, true
	}
	q.next++
	if from != nil {
		most := q.task.Range()
		b.n = first.To - first.From
		for ; q.next < len(shares); q.next++ {
			last, share := &shares[q.next-1], &shares[q.next]
			before, p := &pieces[last.Piece], &pieces[share.Piece]
			between, n := p.Off+share.From-before.Off-last.To, share.To-share.From
			if p != before && (p.Source != before.Source || between < 0 || between > gap || b.n+between+p.Len > most) {
				break
			}
			b.n += between + n
			q.skipped += between
		}
	}
	b.end = int32(q.next)
	if q.next == len(shares) {
		q.empty()
	}
	return b, from, true
}
