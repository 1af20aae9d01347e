package relay

// This file compares checksums of this rank's shares on its GPU.

import (
	"errors"

	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/device/cuda/queue"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/load"
	"github.com/overwire/overwire/gosrc/plan"
	"github.com/overwire/overwire/gosrc/tensor"
)

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
