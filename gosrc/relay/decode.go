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

// Decode decodes a piece whose buffer has every rank's share, and then frees the
// buffer, for a caller that exchanges the shares. On a GPU it queues the decoding after the
// work that is on the streams now, and does not wait; errors end the job. Each piece is
// decoded once, in their order.
func (r *Relay) Decode(k int, streams ...uint64) error {
	if k < 0 || k >= len(r.pieces) {
		return errs.New(errs.ErrArgument, "relay: piece %d of %d", k, len(r.pieces))
	}
	r.mu.Lock()
	if r.carrier != nil || k != r.queued {
		defer r.mu.Unlock()
		return cmp.Or(r.err, errs.New(errs.ErrArgument, "relay: piece %d is not the next to decode, which is %d", k, r.queued))
	}
	r.mu.Unlock()
	return r.decode(k, 0, r.spec.Ranks, streams...)
}

// decode decodes the shares that the ranks [lo, hi) have read of a piece.
func (r *Relay) decode(k, lo, hi int, streams ...uint64) error {
	p := &r.pieces[k]
	r.mu.Lock()
	if r.shut || r.err != nil || !r.aimed {
		defer r.mu.Unlock()
		return cmp.Or(r.err, errs.New(errs.ErrArgument, "relay: the job has ended, or has no requests yet"))
	}
	p.seen.Decode = time.Since(r.start).Microseconds()
	r.busy.Add(1)
	r.mu.Unlock()
	defer r.busy.Done()
	if r.queue == nil {
		return r.onHost(k, lo, hi)
	}
	return r.onDevice(k, lo, hi, streams)
}

// onHost decodes on all cores, and waits.
func (r *Relay) onHost(k, lo, hi int) error {
	r.host.Lock()
	defer r.host.Unlock()
	first, last := r.part(k, lo).first, r.part(k, hi-1).last
	jobs := r.jobs[first:last]
	err := spawn.Each(context.Background(), "relay", cmp.Or(r.machine.Threads, max(1, r.machine.Cores/max(1, r.machine.Ranks))), len(jobs), func(i int) error {
		j := &jobs[i]
		if err := cpu.Decode(j, unsafe.Slice((*byte)(r.bytesAt(k, j.Src)), j.Chunk.Stored)); err != nil {
			return r.where(first+i, err)
		}
		r.came(first + i)
		return nil
	})
	if err != nil {
		r.fail(err, false)
		return err
	}
	if r.has(lo, hi) {
		r.emptied(k)
	}
	r.decoded(k, lo, hi)
	return nil
}

// has reports whether this rank is one of [lo, hi).
func (r *Relay) has(lo, hi int) bool { return r.spec.Rank >= lo && r.spec.Rank < hi }

// emptiedAt is recorded when the shares of a rank in the buffer of a piece were decoded.
func (r *Relay) emptiedAt(k, rank int) *cuda.Event {
	n := len(r.spec.Ring)
	if r.carrier == nil {
		rank = 0
	}
	return r.idle[rank*n+k%n]
}

// onDevice queues the decoding.
func (r *Relay) onDevice(k, lo, hi int, streams []uint64) error {
	s, err := r.queue.Get(context.Background()) // every slot comes back, even after errors
	if err != nil {
		return err
	}
	slot := s.(*cuda.Slot)
	for _, stream := range streams {
		if stream == 0 {
			continue
		}
		if err := r.queue.WaitFor(uintptr(stream)); err != nil {
			r.queue.Put(slot)
			err = r.model.Where("decode", err)
			r.fail(err, true)
			return err
		}
	}
	p := &r.pieces[k]
	first, last := r.part(k, lo).first, r.part(k, hi-1).last
	n := p.share * int64(r.spec.Ranks)
	jobs := r.jobs[first:last]
	slot.ViewDevice(uintptr(r.spec.Ring[k%len(r.spec.Ring)]), n)
	idle := r.emptiedAt(k, lo)
	after := idle // a copy from another rank has waited for that
	if r.has(lo, hi) {
		after = r.full[k%len(r.full)]
	}
	slot.Order(after, idle)
	if len(jobs) == 0 { // this rank wants nothing of it, or strips: the buffer is free after the exchange
		jobs = []device.DecodeTask{{Chunk: tensor.Chunk{Codec: tensor.CodecRaw}}}
	}
	left := len(jobs)
	err = r.queue.Submit(slot, n, jobs, func(i int, err error) {
		if err != nil {
			r.fail(r.where(first+i, err), false)
			return
		}
		if first+i < last {
			r.came(first + i)
		}
		if left--; left == 0 {
			r.mu.Lock()
			p.seen.From, p.seen.To, r.ran = r.ran[0], r.ran[1], [2]int64{}
			r.mu.Unlock()
			r.stripped(k, lo, hi)
			r.decoded(k, lo, hi)
		}
	})
	if err != nil {
		err = r.where(first, err)
		r.fail(err, true)
		return err
	}
	if r.has(lo, hi) {
		r.emptied(k)
	}
	return nil
}

// where adds the tensor and chunk to an error.
func (r *Relay) where(i int, err error) error {
	if i >= len(r.refs) { // of a piece of which this rank wants nothing
		return r.model.Where("decode", err)
	}
	ref := r.refs[i]
	w := &r.wants[ref.Want]
	t := &r.model.Seen().Tensors[w.Tensor]
	n := int64(ref.N)
	if r.bare[w.Data] {
		n = -1
	}
	return &errs.At{Verb: "decode", Source: r.model.Seen().Sources[t.Source].URI, Tensor: t.Name, Chunk: n, Offset: r.jobs[i].Chunk.Off, Err: err}
}
