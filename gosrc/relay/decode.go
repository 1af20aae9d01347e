package relay

// This file decodes the pieces of a relay.

import (
	"cmp"
	"context"
	"time"
	"unsafe"

	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/device/cpu"
	"github.com/overwire/overwire/gosrc/device/cuda/queue"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/spawn"
	"github.com/overwire/overwire/gosrc/job"
	"github.com/overwire/overwire/gosrc/tensor"
)

// DecodePiece decodes a piece whose buffer has every rank's share, and then frees the
// buffer, for a caller that exchanges the shares. On a GPU it queues the decoding after the
// work that is on a stream now (0: none); errors end the job. Each piece is
// decoded once, in their order, and not before AwaitOwnShare has reported this rank's share.
func (r *Relay) DecodePiece(piece int, stream uintptr) error {
	if err := r.awaitPiece(piece); err != nil {
		return err
	}
	if err := r.beginDecoding(piece); err != nil {
		return err
	}
	defer r.busy.Done()
	of := shares{piece, 0, r.spec.Ranks}
	if r.queue == nil {
		return r.decodeOnHost(of)
	}
	slot, err := r.queue.Get(r.job.RunContext()) // while this context lives, moveOnce brings slots back
	if err != nil {
		return err
	}
	var behind []uintptr
	if stream != 0 {
		behind = append(behind, stream)
	}
	return r.queueDecoding(slot.(*queue.Slot), []shares{of}, behind)
}

// beginDecoding keeps the relay from ending, until busy is done, while the caller has a piece decoded that is next.
func (r *Relay) beginDecoding(piece int) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case r.err != nil:
		return r.err
	case r.carrier != nil || piece != r.queued[0]:
		return errs.New(errs.ErrArgument, "relay: piece %d is not the next to decode, which is %d", piece, r.queued[0])
	case r.shut || !job.IsClosed(r.aimed):
		return errs.New(errs.ErrArgument, "relay: the job has ended, or has no requests yet")
	case !job.IsClosed(r.pieces[piece].checked): // its buffer would be read while it is filled
		return errs.New(errs.ErrArgument, "relay: piece %d cannot be decoded: this rank has not read its share", piece)
	}
	r.busy.Add(1)
	return nil
}

// shares are those of the ranks [firstRank, endRank) of a piece.
type shares struct{ piece, firstRank, endRank int }

// tasksOf are this rank's decode tasks of shares: [first, end).
func (r *Relay) tasksOf(of shares) (first, end int) {
	return r.partOf(of.piece, of.firstRank).firstTask, r.partOf(of.piece, of.endRank-1).endTask
}

// noTask is the number of a task that decodes nothing.
const noTask = -1

// decodeOnHost decodes shares on as many cores as are this rank's, and waits.
func (r *Relay) decodeOnHost(of shares) error {
	first, end := r.tasksOf(of)
	tasks, base := r.tasks[first:end], r.ringOf(of.piece, of.firstRank).base
	err := spawn.Each(context.Background(), "relay",
		cmp.Or(r.machine.Threads, max(1, r.machine.Cores/max(1, r.machine.Ranks))), len(tasks), func(i int) error {
			t := &tasks[i]
			if err := cpu.Decode(t, unsafe.Slice((*byte)(unsafe.Add(base, t.Src)), t.Chunk.Stored)); err != nil {
				return r.locateError(first+i, err)
			}
			r.countTask(first + i)
			return nil
		})
	if err != nil {
		r.failWith(err, false)
		return err
	}
	r.markQueued(of, nil)
	r.markDecoded(of)
	return nil
}

// eventBeforeFill is the event after which a rank's share of a piece may be written to where this rank has it: the
// end of the decoding of the share that was there before, which is queued. nil: there is nothing to wait for.
func (r *Relay) eventBeforeFill(piece, rank int) *queue.Event {
	buffers := r.ringOf(piece, rank).count
	if piece < buffers {
		return nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if part := r.partOf(piece-buffers, rank); !part.isDecoded { // else its slot may have a later batch by now
		return part.decodeEnd
	}
	return nil
}

// queueDecoding queues the decoding of a batch of shares, which lie in one memory, behind the work that is on the
// streams now. It takes the slot.
func (r *Relay) queueDecoding(slot *queue.Slot, batch []shares, streams []uintptr) error {
	isSubmitted := false
	defer func() {
		if !isSubmitted { // a panic: Close waits for every slot
			r.queue.Put(slot)
		}
	}()
	slot.DelayKernels(streams...)
	ring := r.ringOf(batch[0].piece, batch[0].firstRank)
	slot.ViewDevice(uintptr(ring.base), ring.bytes)
	var tasks []device.DecodeTask
	var numbers []int // of the tasks
	for _, of := range batch {
		first, end := r.tasksOf(of)
		tasks = append(tasks, r.tasks[first:end]...)
		for n := first; n < end; n++ {
			numbers = append(numbers, n)
		}
	}
	if len(tasks) == 0 { // this rank wants nothing of it: the buffer is free after the exchange
		tasks, numbers = []device.DecodeTask{{Chunk: tensor.Chunk{Codec: tensor.CodecRaw}}}, []int{noTask}
	}
	left := len(tasks)
	defer r.countDriverTime(time.Now())
	isSubmitted = true
	err := r.queue.Submit(slot, ring.bytes, tasks, func(i int, err error) {
		if err != nil {
			r.failWith(r.locateError(numbers[i], err), false)
			return
		}
		r.countTask(numbers[i])
		if left--; left == 0 {
			for _, of := range batch {
				r.markDecoded(of)
			}
		}
	})
	if err != nil {
		err = r.locateError(numbers[0], err)
		r.failWith(err, true)
		return err
	}
	for _, of := range batch {
		r.markQueued(of, slot.EndEvent())
	}
	return nil
}

// locateError adds the tensor and chunk of a decode task to an error.
func (r *Relay) locateError(task int, err error) error {
	if task == noTask {
		return r.model.PlaceError("decode", err)
	}
	ref := r.refs[task]
	w := &r.wants[ref.Want]
	n := int64(ref.N)
	if r.bare[w.Data] {
		n = -1
	}
	return r.errorAt("decode", w.Tensor, n, r.tasks[task].Chunk.Off, err)
}

// errorAt is an error of a tensor's chunk; -1: of its bytes.
func (r *Relay) errorAt(verb string, tensor int32, chunk, off int64, err error) error {
	t := &r.model.Seen().Tensors[tensor]
	return &errs.At{Verb: verb, Source: r.model.Seen().Sources[t.Source].URI, Tensor: t.Name, Chunk: chunk,
		Offset: off, Err: err}
}
