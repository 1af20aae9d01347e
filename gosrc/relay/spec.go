package relay

// This file defines a group's load and the limits of its buffers.

import (
	"math"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/load"
	"github.com/overwire/overwire/gosrc/plan"
)

// A Spec says what the ranks of a group load together. Tensors and Size must be equal on all ranks of the
// exchange.
type Spec struct {
	Tensors []int64 `json:"tensors"` // shared as whole tensors
	// Buffers of Size bytes on the device. The caller keeps them valid until the job has ended.
	Ring []uint64 `json:"ring"`
	Size int64    `json:"size"`
	// Mapped makes the engine move the pieces between ranks itself, once it has joined the others. It allocates
	// memory for this number of shares that this rank has read, which the others map, and on a GPU staging for
	// Stages shares of each other rank. The caller then only sets the requests (Aim).
	Mapped  bool `json:"exchange"`
	Buffers int  `json:"buffers"`
	Stages  int  `json:"stages"`
	// Needs, with Mapped, are the blocks that each rank of this host needs: requests with the rank in place of
	// the address. They may overlap. Without Needs every rank needs everything. If only one rank needs a block,
	// that rank reads it.
	Needs []plan.Request `json:"-"`
	Ranks int            `json:"ranks"` // in the exchange
	Here  int            `json:"here"`  // how many of them are on this host; 0: all
	Rank  int            `json:"rank"`  // this rank, in [0, Ranks)
	load.Options
}

const (
	// shareAlign is the alignment of shares in a buffer.
	shareAlign = 256
	// chunkAlign is the alignment of chunks that are aligned in the file. X16 needs it.
	chunkAlign = 16
	// plainChunkBytes is the size of the chunks of plain tensors, which have no chunks in the file.
	plainChunkBytes = 1<<20 - 8<<10
	// maxRanks is more GPUs than any host has. If the caller exchanges, there may be more ranks, on several
	// hosts.
	maxRanks = 256
	// slotsForSums is how many slots of the decoding queue are reserved for sums.
	slotsForSums = 2
	// mostBatches is how many batches of shares a GPU decodes or waits for at a time. Shares that become ready
	// meanwhile form the next batch, since decoding a few chunks takes as long as decoding many.
	mostBatches = load.ExchangeBatches - slotsForSums
	// mostReads is how many shares a batch may have: a slot can wait for that many streams.
	mostReads = 8
	// maxSize is the largest buffer: a decode task stores its chunk's offset in 32 bits.
	maxSize = math.MaxUint32
	// maxBuffers is more than any ring has.
	maxBuffers = 64
)

// checkSize checks the size of the buffers, which hold a share of each rank, before memory is allocated for them.
func (s *Spec) checkSize() error {
	most := s.Size // a decode task finds its chunk within this size
	if s.Mapped {
		most = max(s.Size/int64(s.Ranks)*int64(s.Buffers), s.Size*int64(s.Stages))
	}
	if s.Size > maxSize || most > maxSize || s.Size/shareAlign < int64(s.Ranks) {
		return errs.New(errs.ErrArgument,
			"relay: invalid buffers of %d bytes for %d ranks: expected at least %d each, and at most %d",
			s.Size, s.Ranks, shareAlign, maxSize)
	}
	return nil
}

// shareSpace is the space in a buffer for each rank's share.
func (s *Spec) shareSpace() int64 { return s.Size / int64(s.Ranks) &^ (shareAlign - 1) }

// shares are the shares of the ranks [firstRank, endRank) of a piece.
type shares struct{ piece, firstRank, endRank int }
