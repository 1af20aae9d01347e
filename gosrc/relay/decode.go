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
// buffer. On a GPU it queues the decoding after the work that is on the streams now,
// and does not wait; errors end the job. Each piece is decoded once.
func (r *Relay) Decode(k int, streams ...uint64) error {
	if k < 0 || k >= len(r.pieces) {
		return errs.New(errs.ErrArgument, "relay: piece %d of %d", k, len(r.pieces))
	}
	p := &r.pieces[k]
	r.mu.Lock()
	if r.shut || r.err != nil || p.begun || !r.aimed {
		defer r.mu.Unlock()
		return cmp.Or(r.err, errs.New(errs.ErrArgument, "relay: piece %d was decoded, or the job has ended, or has no requests yet", k))
	}
	p.begun = true
	p.seen.Decode = time.Since(r.start).Microseconds()
	r.busy.Add(1)
	r.mu.Unlock()
	defer r.busy.Done()
	if r.queue == nil {
		return r.onHost(k)
	}
	return r.onDevice(k, streams)
}

// onHost decodes on all cores, and waits.
func (r *Relay) onHost(k int) error {
	p := &r.pieces[k]
	jobs := r.jobs[p.first:p.last]
	err := spawn.Each(context.Background(), "relay", cmp.Or(r.machine.Threads, max(1, r.machine.Cores/max(1, r.machine.Ranks))), len(jobs), func(i int) error {
		j := &jobs[i]
		if err := cpu.Decode(j, unsafe.Slice((*byte)(r.bytesAt(k, j.Src)), j.Chunk.Stored)); err != nil {
			return r.where(p.first+i, err)
		}
		r.came(p.first + i)
		return nil
	})
	if err != nil {
		r.fail(err, false)
		return err
	}
	r.queued(k)
	r.decoded(k)
	return nil
}

// onDevice queues the decoding.
func (r *Relay) onDevice(k int, streams []uint64) error {
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
	n := p.share * int64(r.spec.Ranks)
	jobs := r.jobs[p.first:p.last]
	slot.ViewDevice(uintptr(r.spec.Ring[k%len(r.spec.Ring)]), n)
	slot.Order(r.full[k%len(r.full)], r.idle[k%len(r.idle)])
	if len(jobs) == 0 { // this rank wants nothing of it: the buffer is free after the exchange
		jobs = []device.DecodeTask{{Chunk: tensor.Chunk{Codec: tensor.CodecRaw}}}
	}
	left := len(jobs)
	err = r.queue.Submit(slot, n, jobs, func(i int, err error) {
		if err != nil {
			r.fail(r.where(p.first+i, err), false)
			return
		}
		if p.first+i < p.last {
			r.came(p.first + i)
		}
		if left--; left == 0 {
			r.mu.Lock()
			p.seen.From, p.seen.To, r.ran = r.ran[0], r.ran[1], [2]int64{}
			r.mu.Unlock()
			r.stripped(k)
			r.decoded(k)
		}
	})
	if err != nil {
		err = r.where(p.first, err)
		r.fail(err, true)
		return err
	}
	r.queued(k)
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
