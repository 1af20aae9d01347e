package relay

// This file decodes the pieces of a relay.

import (
	"cmp"
	"context"
	"time"
	"unsafe"

	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/device/cpu"
	"github.com/overwire/overwire/gosrc/device/cuda"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/spawn"
	"github.com/overwire/overwire/gosrc/tensor"
)

// DecodePiece decodes a piece whose buffer has every rank's share, and then frees the
// buffer, for a caller that exchanges the shares. On a GPU it queues the decoding after the
// work that is on a stream now (0: none); errors end the job. Each piece is
// decoded once, in their order, and not before AwaitOwnShare has reported this rank's share.
func (r *Relay) DecodePiece(piece int, stream uintptr) error {
	if err := r.awaitLayout(); err != nil {
		return err
	}
	if piece < 0 || piece >= len(r.pieces) {
		return errs.New(errs.ErrArgument, "relay: piece %d of %d", piece, len(r.pieces))
	}
	r.mu.Lock()
	switch {
	case r.carrier != nil || piece != r.queued[0]:
		defer r.mu.Unlock()
		return cmp.Or(r.err, errs.New(errs.ErrArgument, "relay: piece %d is not the next to decode, which is %d", piece,
			r.queued[0]))
	case r.shut || r.err != nil || !r.aimed:
		defer r.mu.Unlock()
		return cmp.Or(r.err, errs.New(errs.ErrArgument, "relay: the job has ended, or has no requests yet"))
	case !isClosed(r.pieces[piece].checked): // its buffer would be read while it is filled
		defer r.mu.Unlock()
		return errs.New(errs.ErrArgument, "relay: piece %d cannot be decoded: this rank has not read its share", piece)
	}
	r.busy.Add(1)
	r.mu.Unlock()
	defer r.busy.Done()
	of := ranksRead{piece, 0, r.spec.Ranks}
	if r.queue == nil {
		return r.decodeOnHost(of)
	}
	slot, err := r.queue.Get(r.job.RunContext()) // after that movePieces brings no slot back
	if err != nil {
		return err
	}
	var behind []uintptr
	if stream != 0 {
		behind = append(behind, stream)
	}
	return r.queueDecoding(slot.(*cuda.Slot), []ranksRead{of}, behind)
}

// A ranksRead is what the ranks [lo, hi) have read of a piece.
type ranksRead struct{ piece, lo, hi int }

// tasksOf are this rank's decode tasks of it: [first, last).
func (r *Relay) tasksOf(of ranksRead) (first, last int) {
	return r.partOf(of.piece, of.lo).first, r.partOf(of.piece, of.hi-1).last
}

// decodeOnHost decodes on this rank's part of the cores, and waits.
func (r *Relay) decodeOnHost(of ranksRead) error {
	first, last := r.tasksOf(of)
	jobs, base := r.jobs[first:last], r.ringOf(of.piece, of.lo).base
	err := spawn.Each(context.Background(), "relay",
		cmp.Or(r.machine.Threads, max(1, r.machine.Cores/max(1, r.machine.Ranks))), len(jobs), func(i int) error {
			j := &jobs[i]
			if err := cpu.Decode(j, unsafe.Slice((*byte)(unsafe.Add(base, j.Src)), j.Chunk.Stored)); err != nil {
				return r.locateError(first+i, err)
			}
			r.countTask(first + i)
			return nil
		})
	if err != nil {
		r.failWith(err, false)
		return err
	}
	r.markQueued(of.piece, of.lo, of.hi, nil)
	r.markDecoded(of)
	return nil
}

// eventBeforeFill is the event after which what a rank reads of a piece may be written to its part
// of the buffer: the decoding of the buffer's earlier piece, which is queued. nil: it has ended.
func (r *Relay) eventBeforeFill(piece, rank int) *cuda.Event {
	buffers := r.ringOf(piece, rank).count
	if piece < buffers {
		return nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if q := r.partOf(piece-buffers, rank); !q.done { // else its slot may have a later batch by now
		return q.idle
	}
	return nil
}

// queueDecoding queues the decoding of a batch behind the work that is on the streams now. It takes the
// slot.
func (r *Relay) queueDecoding(slot *cuda.Slot, batch []ranksRead, streams []uintptr) error {
	isSubmitted := false
	defer func() {
		if !isSubmitted { // a panic: Close waits for every slot
			r.queue.Put(slot)
		}
	}()
	slot.DelayKernels(streams...)
	first, last := r.tasksOf(batch[0])
	jobs, numbers := r.jobs[first:last], []int(nil)
	from := r.ringOf(batch[0].piece, batch[0].lo)
	slot.ViewDevice(uintptr(from.base), from.bytes)
	if len(batch) > 1 {
		jobs = nil
		for _, of := range batch {
			first, last := r.tasksOf(of)
			jobs = append(jobs, r.jobs[first:last]...)
			for i := first; i < last; i++ {
				numbers = append(numbers, i)
			}
		}
	}
	none := len(jobs) == 0
	if none { // this rank wants nothing of it: the buffer is free after the exchange
		jobs = []device.DecodeTask{{Chunk: tensor.Chunk{Codec: tensor.CodecRaw}}}
	}
	number := func(i int) int {
		if numbers != nil {
			return numbers[i]
		}
		return first + i
	}
	locate := func(i int, err error) error {
		if none {
			return r.model.PlaceError("decode", err)
		}
		return r.locateError(number(i), err)
	}
	left := len(jobs)
	defer r.countDriverTime(time.Now())
	isSubmitted = true
	err := r.queue.Submit(slot, from.bytes, jobs, func(i int, err error) {
		if err != nil {
			r.failWith(locate(i, err), false)
			return
		}
		if !none {
			r.countTask(number(i))
		}
		if left--; left == 0 {
			for _, of := range batch {
				r.markDecoded(of)
			}
		}
	})
	if err != nil {
		err = locate(0, err)
		r.failWith(err, true)
		return err
	}
	for _, of := range batch {
		r.markQueued(of.piece, of.lo, of.hi, slot.EndEvent())
	}
	return nil
}

// locateError adds the tensor and chunk to an error.
func (r *Relay) locateError(i int, err error) error {
	ref := r.refs[i]
	w := &r.wants[ref.Want]
	n := int64(ref.N)
	if r.bare[w.Data] {
		n = -1
	}
	return r.errorAt("decode", w.Tensor, n, r.jobs[i].Chunk.Off, err)
}

// errorAt is an error of a tensor's chunk; -1: of its bytes.
func (r *Relay) errorAt(verb string, tensor int32, chunk, off int64, err error) error {
	t := &r.model.Seen().Tensors[tensor]
	return &errs.At{Verb: verb, Source: r.model.Seen().Sources[t.Source].URI, Tensor: t.Name, Chunk: chunk,
		Offset: off, Err: err}
}
