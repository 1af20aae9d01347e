package relay

// This file says when others may read what this rank has read. Where SumsShares of plan.Machine is set a share's
// checksums are compared on the GPU first, since a slot may end within a chunk.

import (
	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/device/cuda/queue"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/job"
	"github.com/overwire/overwire/gosrc/plan"
	"github.com/overwire/overwire/gosrc/tensor"
)

// slotsForSums is how many slots of the queue that decodes are left for sums.
const slotsForSums = 2

// countArrival counts a chunk of this rank's share of a piece that has arrived. The last of them makes
// the share readable, or first has moveOnce sum it.
func (r *Relay) countArrival(piece int) {
	r.mu.Lock()
	p := &r.pieces[piece]
	p.chunksLeft--
	isComplete := p.chunksLeft == 0
	r.mu.Unlock()
	switch {
	case !isComplete:
	case r.machine.SumsShares:
		r.arrivals <- piece
	default:
		r.makeReadable(piece)
	}
}

// makeReadable lets the others read this rank's share of a piece.
func (r *Relay) makeReadable(piece int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	close(r.pieces[piece].checked)
	c := r.carrier
	if c == nil {
		return
	}
	for c.published < len(r.pieces) && job.IsClosed(r.pieces[c.published].checked) {
		c.published++
	}
	if job.IsClosed(c.joined) {
		c.Publish(c.published)
	}
}

// sumArrived has the shares summed that have arrived, as far as slots are free.
func (r *Relay) sumArrived() (worked bool, err error) {
	for len(r.arrivals) > 0 { // only the holder of turn takes them
		slot := r.queue.TryGet()
		if slot == nil {
			return worked, nil
		}
		if err := r.sumShare(<-r.arrivals, slot); err != nil {
			return false, err
		}
		worked = true
	}
	return worked, nil
}

// sumShare queues the comparison of the checksums of this rank's share of a piece, which becomes
// readable behind it. It takes the slot.
func (r *Relay) sumShare(piece int, slot *queue.Slot) error {
	isSubmitted := false
	defer func() {
		if !isSubmitted { // there is nothing to sum, or a panic: Close waits for every slot
			r.queue.Put(slot)
		}
	}()
	ring := r.ringOf(piece, r.spec.Rank)
	var tasks []device.DecodeTask
	var spots []*plan.Spot // of each task
	for i := r.pieces[piece].firstSpot; i < r.pieces[piece].endSpot; i++ {
		s := &r.spots[i]
		if s.Bare {
			continue
		}
		c := r.chunkAt(plan.ChunkOf{Data: s.Data, N: s.N})
		tasks = append(tasks, device.DecodeTask{Dst: s.Dst, Src: uint32(uintptr(s.Dst) - uintptr(ring.base)),
			Chunk: tensor.Chunk{Off: c.Off, Stored: c.Stored, Logical: c.Stored, Sum: c.Sum, Codec: tensor.CodecRaw}})
		spots = append(spots, s)
	}
	if len(tasks) == 0 {
		r.makeReadable(piece)
		return nil
	}
	slot.ViewDevice(uintptr(ring.base), ring.bytes)
	slot.SumOnly()
	left, good := len(tasks), true
	isSubmitted = true
	return r.queue.Submit(slot, ring.bytes, tasks, func(i int, err error) {
		if err != nil {
			good = false
			r.failWith(r.locateSumError(spots[i], err), true)
		}
		if left--; left == 0 && good {
			r.makeReadable(piece)
		}
	})
}

// locateSumError adds the tensor and chunk of a spot to an error.
func (r *Relay) locateSumError(s *plan.Spot, err error) error {
	verb := "copy"
	if errs.RuleOf(err) == errs.RuleChecksum {
		verb = "check"
	}
	return r.errorAt(verb, s.Data, int64(s.N), r.chunkAt(plan.ChunkOf{Data: s.Data, N: s.N}).Off, err)
}
