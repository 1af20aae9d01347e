package relay

// This file queues this rank's shares for its GPU, and compares their checksums there. moveOnce drives the queue.

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/device/cuda/queue"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/spawn"
	"github.com/overwire/overwire/gosrc/load"
	"github.com/overwire/overwire/gosrc/peers"
	"github.com/overwire/overwire/gosrc/plan"
	"github.com/overwire/overwire/gosrc/tensor"
)

// mostGroups is the maximum number of groups of slots in flight to the GPU. Slots that readers fill in the meantime
// form the next group. A group costs the driver little more than a single slot, and with two groups the link always
// has one to copy.
const mostGroups = 2

// A feedQueue copies the slots that readers have filled to this rank's buffers on the GPU. Each copy waits until the
// piece that used the buffer before has been decoded. Readers do not wait for the driver, which serves one thread at a
// time: moveOnce has feeder submit all waiting slots as one group, and polls for its end.
type feedQueue struct {
	*queue.Queue
	feeder *feeder
	ask    func(ctx context.Context, ready func() bool) error // mover.askUntil
}

// A feeder submits the filled slots of a queue in groups.
type feeder struct {
	queue   *queue.Queue
	lay     *layout
	prog    *progress
	counts  *profile
	todo    chan submission // has space for all slots, so readers never wait
	waiting atomic.Int64    // filled slots not yet submitted to the driver
	mu      sync.Mutex      // held in submitAndFinish
	all     []submission    // slots that submitAndFinish submits; guarded by mu
}

// A submission is a filled slot and the piece that it belongs to.
type submission struct {
	queue.FilledSlot
	piece int
}

// GetFor waits for a slot by polling, because moveOnce, which frees the slots, has no time to wake readers.
func (q *feedQueue) GetFor(ctx context.Context, reader int) (device.Slot, error) {
	var slot *queue.Slot
	err := q.ask(ctx, func() bool {
		slot = q.TryGetFor(reader)
		return slot != nil
	})
	if err != nil {
		return nil, err
	}
	return slot, nil
}

// submitAndFinish submits the waiting slots unless mostGroups are in flight, and finishes the slots that the GPU has
// copied. It reports whether it did either. It returns immediately if another goroutine is running it.
func (f *feeder) submitAndFinish() bool {
	if !f.mu.TryLock() {
		return false
	}
	defer f.mu.Unlock()
	f.all = f.all[:0]
	for f.queue.CountFlying() < mostGroups && len(f.todo) > 0 { // only the holder of mu receives from todo
		f.all = append(f.all, <-f.todo)
	}
	if len(f.all) > 0 {
		f.submitSafely(f.all)
	}
	return f.queue.FinishEnded() || len(f.all) > 0
}

// submitSafely submits slots together. After a panic, each of their tasks is reported with its error. That may include
// finished tasks, which does no harm, because only the first error counts.
func (f *feeder) submitSafely(all []submission) {
	defer f.waiting.Add(int64(-len(all)))
	err := spawn.Guard("relay feed", func() error { f.submitSlots(all); return nil })
	for i := range all {
		for task := 0; err != nil && task < len(all[i].Tasks); task++ {
			all[i].Done(task, err)
		}
	}
}

// Submit hands a filled slot to moveOnce and returns immediately. Later failures are reported for each task. tasks is
// a subslice of lay.fetch.Tasks, and its position there determines the piece.
func (q *feedQueue) Submit(s device.Slot, n int64, tasks []device.DecodeTask, done func(task int, err error)) error {
	f := q.feeder
	all := f.lay.fetch.Tasks
	first := cap(all) - cap(tasks) // position of tasks in all
	if len(tasks) == 0 || first < 0 || first >= len(all) || &all[first] != &tasks[0] {
		q.Put(s)
		return errs.New(errs.ErrEngine, "group load: the submitted tasks are not part of the fetch plan")
	}
	f.waiting.Add(1)
	f.counts.countFlight(n)
	left := len(tasks)
	finish := func(task int, err error) {
		if left--; left == 0 {
			f.counts.countFlight(-n)
		}
		done(task, err)
	}
	slot := queue.FilledSlot{Slot: s.(*queue.Slot), N: n, Tasks: tasks, Done: finish}
	f.todo <- submission{slot, f.lay.pieceOfTask(int32(first))}
	return nil
}

// submitSlots submits slots together. The slots of the first pieces come first, because other ranks wait for them.
func (f *feeder) submitSlots(all []submission) {
	isSubmitted := false
	defer f.counts.countDriverTime(time.Now())
	defer func() {
		// a panic came before Submit: return the slots, because Close waits for every slot
		for i := 0; i < len(all) && !isSubmitted; i++ {
			f.queue.Put(all[i].Slot)
		}
	}()
	for i := range all {
		s := &all[i]
		s.Slot.FollowEvent(f.prog.eventBeforeFill(s.piece, f.lay.spec.Rank))
		s.Slot.AllowGapWrites() // a share has the same gaps as the file, and no rank needs the bytes in them
	}
	slices.SortStableFunc(all, func(a, b submission) int { return cmp.Compare(a.piece, b.piece) })
	slots := make([]queue.FilledSlot, len(all))
	for i := range all {
		slots[i] = all[i].FilledSlot
	}
	isSubmitted = true
	f.queue.SubmitAll(slots)
}

// Drain submits the waiting slots and waits until all slots have finished.
func (q *feedQueue) Drain(ctx context.Context) error {
	var pace peers.Pacer
	for q.feeder.waiting.Load() > 0 || q.CountFlying() > 0 {
		pace.RestUnless(q.feeder.submitAndFinish())
	}
	return q.Queue.Drain(ctx)
}

// Close submits the waiting slots, then closes the queue.
func (q *feedQueue) Close() {
	_ = q.Drain(context.Background()) // a broken queue was reported already
	q.Queue.Close()
}

// A summer decides when other ranks may read this rank's shares. If plan.Machine.SumsShares is set, the GPU first
// compares the checksums of the whole share, because a slot may end inside a chunk.
type summer struct {
	model    *load.Model
	lay      *layout
	prog     *progress
	sums     bool         // SumsShares
	queue    *queue.Queue // nil on the host
	arrivals chan int     // pieces with a share that has arrived and must be summed
}

// countArrival counts an arrived chunk of this rank's share of a piece. After the last one, the share becomes readable
// or, if it must be summed first, goes to sumArrived.
func (s *summer) countArrival(piece int) {
	switch {
	case !s.prog.countChunk(piece):
	case s.sums:
		s.arrivals <- piece
	default:
		s.prog.makeReadable(piece)
	}
}

// sumArrived queues the comparison of arrived shares while slots are free. The caller holds the mover's turn.
func (s *summer) sumArrived() (worked bool, err error) {
	for len(s.arrivals) > 0 { // only the holder of turn receives from arrivals
		slot := s.queue.TryGet()
		if slot == nil {
			return worked, nil
		}
		if err := s.sumShare(<-s.arrivals, slot); err != nil {
			return false, err
		}
		worked = true
	}
	return worked, nil
}

// sumShare queues the comparison of this rank's share of a piece with its checksums. If they match, the share becomes
// readable. sumShare owns the slot.
func (s *summer) sumShare(piece int, slot *queue.Slot) error {
	isSubmitted := false
	defer func() {
		if !isSubmitted { // nothing to sum, or a panic: Close waits for every slot
			s.queue.Put(slot)
		}
	}()
	ring := s.lay.ringOf(piece, s.lay.spec.Rank)
	var tasks []device.DecodeTask
	var reads []*plan.ChunkRead // the read of each task
	for i := s.lay.pieces[piece].firstRead; i < s.lay.pieces[piece].endRead; i++ {
		read := &s.lay.reads[i]
		if read.Bare {
			continue
		}
		c := s.lay.chunkAt(plan.ChunkOf{Data: read.Data, N: read.N})
		tasks = append(tasks, device.DecodeTask{Dst: read.Dst, Src: uint32(uintptr(read.Dst) - uintptr(ring.base)),
			Chunk: tensor.Chunk{Off: c.Off, Stored: c.Stored, Logical: c.Stored, Sum: c.Sum, Codec: tensor.CodecRaw}})
		reads = append(reads, read)
	}
	if len(tasks) == 0 {
		s.prog.makeReadable(piece)
		return nil
	}
	slot.ViewDevice(uintptr(ring.base), ring.bytes)
	slot.SumOnly()
	left, good := len(tasks), true
	isSubmitted = true
	return s.queue.Submit(slot, ring.bytes, tasks, func(i int, err error) {
		if err != nil {
			good = false
			s.doubtRead(reads[i], err)
			s.prog.failWith(s.locateError(reads[i], err), true)
		}
		if left--; left == 0 && good {
			s.prog.makeReadable(piece)
		}
	})
}

// doubtRead reports wrong bytes to their source, so that the next load reads them from their store.
func (s *summer) doubtRead(read *plan.ChunkRead, err error) {
	doubt := s.model.Sources()[s.lay.ix.Tensors[read.Data].Source].Facts().Doubt
	if doubt != nil && errors.Is(err, errs.ErrCorrupt) {
		c := s.lay.chunkAt(plan.ChunkOf{Data: read.Data, N: read.N})
		doubt(c.Off, int64(c.Stored))
	}
}

// locateError adds the tensor and chunk of a read to an error.
func (s *summer) locateError(read *plan.ChunkRead, err error) error {
	verb := "copy"
	if errs.RuleOf(err) == errs.RuleChecksum {
		verb = "check"
	}
	off := s.lay.chunkAt(plan.ChunkOf{Data: read.Data, N: read.N}).Off
	return errorAt(s.model, verb, read.Data, int64(read.N), off, err)
}
