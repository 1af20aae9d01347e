package relay

// The load of a group, and the limits of its buffers.

import (
	"math"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/load"
	"github.com/overwire/overwire/gosrc/plan"
)

// A Spec says what the ranks of a group load together. Tensors and Size are the same on all
// ranks that exchange.
type Spec struct {
	Tensors []int64 `json:"tensors"` // their stored bytes are shared, each one whole
	// buffers of Size bytes on the device; the caller keeps them valid until the job has ended
	Ring []uint64 `json:"ring"`
	Size int64    `json:"size"`
	// Mapped: the engine brings the pieces from rank to rank itself, once it has joined the
	// others. It makes memory for this number of shares that this rank has read, which the
	// others map, and on a GPU for Stages shares that each other rank has. The caller then
	// only sets the requests (Aim).
	Mapped  bool `json:"exchange"`
	Buffers int  `json:"buffers"`
	Stages  int  `json:"stages"`
	// Needs, with Mapped: the blocks that each rank of this host needs, as requests with
	// the rank in the place of the address. They may overlap; without them every rank needs
	// all. What only one rank needs is read by that rank.
	Needs []plan.Request `json:"-"`
	Ranks int            `json:"ranks"` // that exchange
	Here  int            `json:"here"`  // how many of them this host has; 0: all
	Rank  int            `json:"rank"`  // this one, of [0, Ranks)
	load.Options
}

const (
	// shareAlign is the alignment of shares in a buffer.
	shareAlign = 256
	// chunkAlign is the alignment of chunks that are aligned in the file: X16 needs
	// it.
	chunkAlign = 16
	// plainChunkBytes is the size of the chunks of plain tensors, which have none in the file.
	plainChunkBytes = 1<<20 - 8<<10
	// maxRanks is more GPUs than any host has. Where the caller exchanges, also between hosts, there may be more.
	maxRanks = 256
	// slotsForSums is how many slots of the queue that decodes are left for sums.
	slotsForSums = 2
	// mostBatches is how many batches of shares a GPU decodes at a time, or waits for the copies of. What is
	// ready meanwhile is the next batch: the decoding of a few chunks takes as long as that of many.
	mostBatches = load.ExchangeBatches - slotsForSums
	// mostReads is how many shares a batch may have: a slot can wait for a stream of each.
	mostReads = 8
	// maxSize is the largest buffer: a decode task has 32 bits for where its chunk lies.
	maxSize = math.MaxUint32
	// maxBuffers is more than any ring has.
	maxBuffers = 64
)

// checkSize checks the size of the buffers, in which each rank has a share, before there is
// memory for them.
func (s *Spec) checkSize() error {
	most := s.Size // in which a decode task finds its chunk
	if s.Mapped {
		most = max(s.Size/int64(s.Ranks)*int64(s.Buffers), s.Size*int64(s.Stages))
	}
	if s.Size > maxSize || most > maxSize || s.Size/shareAlign < int64(s.Ranks) {
		return errs.New(errs.ErrArgument, "relay: buffers of %d bytes for %d ranks: at least %d each, and at most %d",
			s.Size, s.Ranks, shareAlign, maxSize)
	}
	return nil
}

// shareSpace is what a buffer has for each rank.
func (s *Spec) shareSpace() int64 { return s.Size / int64(s.Ranks) &^ (shareAlign - 1) }

// shares are those of the ranks [firstRank, endRank) of a piece.
type shares struct{ piece, firstRank, endRank int }
