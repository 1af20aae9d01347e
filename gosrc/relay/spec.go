package relay

// This file describes a group load, the limits of its buffers, and the cores on which a rank reads.

import (
	"cmp"
	"math"
	"runtime"

	"golang.org/x/sys/unix"

	"github.com/overwire/overwire/gosrc/device/cuda"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/nodes"
	"github.com/overwire/overwire/gosrc/load"
	"github.com/overwire/overwire/gosrc/plan"
)

// A Spec describes what the ranks of a group load together. Tensors and Size must be equal on all ranks of the group.
type Spec struct {
	Tensors []int64 `json:"tensors"` // shared as whole tensors
	// Ring has the addresses of buffers of Size bytes on the device. They must stay valid until the job has ended.
	Ring []uint64 `json:"ring"`
	Size int64    `json:"size"`
	// Mapped makes the engine move the shares between ranks, after Join. It allocates memory for Buffers shares that
	// this rank has read, which the other ranks map, and on a GPU also staging memory for Stages shares of each other
	// rank. The caller then only sets the requests (Aim).
	Mapped  bool `json:"exchange"`
	Buffers int  `json:"buffers"`
	Stages  int  `json:"stages"`
	// Needs, if Mapped is set, are the slices that each rank of this host needs. Dest of each request holds the rank.
	// Slices may overlap. Without Needs, every rank needs everything. If only one rank needs a slice, that rank
	// reads it.
	Needs []plan.Request `json:"-"`
	Ranks int            `json:"ranks"` // number of ranks in the group
	Here  int            `json:"here"`  // how many of them are on this host; 0 means all
	Rank  int            `json:"rank"`  // this rank, in [0, Ranks)
	load.Options
}

const (
	// shareAlign is the alignment of shares in a buffer.
	shareAlign = 256
	// chunkAlign is the alignment of chunks that are aligned in the file. X16 needs it.
	chunkAlign = 16
	// plainChunkBytes is the size of the chunks that plain tensors are cut into.
	plainChunkBytes = 1<<20 - 8<<10
	// maxRanks exceeds the number of GPUs of any host. If the caller exchanges the shares, there may be more ranks,
	// on several hosts.
	maxRanks = 256
	// slotsForSums is the number of slots of the decoding queue that are reserved for comparing checksums.
	slotsForSums = 2
	// mostBatches is the maximum number of batches of shares that a GPU decodes or waits for. Shares that become ready
	// in the meantime form the next batch, because decoding a few chunks takes as long as decoding many.
	mostBatches = load.ExchangeBatches - slotsForSums
	// mostReads is the maximum number of shares in a batch. A slot can wait for that many streams.
	mostReads = 8
	// maxSize is the maximum size of a buffer. A decode task stores its chunk's offset in 32 bits.
	maxSize = math.MaxUint32
	// maxBuffers exceeds the number of buffers of any ring.
	maxBuffers = 64
)

// checkSize checks the size of the buffers before memory is allocated for them. A buffer holds a share of each rank.
func (s *Spec) checkSize() error {
	most := s.Size // upper bound of a chunk's offset in a decode task
	if s.Mapped {
		most = max(s.Size/int64(s.Ranks)*int64(s.Buffers), s.Size*int64(s.Stages))
	}
	if s.Size > maxSize || most > maxSize || s.Size/shareAlign < int64(s.Ranks) {
		return errs.New(errs.ErrArgument,
			"group load: invalid buffers of %d bytes for %d ranks: expected at least %d per rank, and at most %d",
			s.Size, s.Ranks, shareAlign, maxSize)
	}
	return nil
}

// shareSpace returns the space for each rank's share in a buffer.
func (s *Spec) shareSpace() int64 { return s.Size / int64(s.Ranks) &^ (shareAlign - 1) }

// shares identifies the shares of the ranks [firstRank, endRank) of a piece.
type shares struct{ piece, firstRank, endRank int }

// coresAndRanks returns how many cores this rank reads on, and how many ranks share them. On a host with several
// NUMA nodes these are the cores of its GPU's node.
func coresAndRanks(gpu *cuda.Device, spec *Spec) (cores, ranks int) {
	var may unix.CPUSet
	var place *nodes.Place
	if gpu != nil && gpu.NearNode() != nil && unix.SchedGetaffinity(0, &may) == nil {
		place = gpu.NearNode()
	}
	return countCores(cmp.Or(spec.Here, spec.Ranks), runtime.NumCPU(), place, &may, nodes.System)
}

// countCores implements coresAndRanks for a number of ranks. It counts the cores of the place that are in `may`, or all
// cores of the process if there are none. root is the directory of the host's sysfs.
func countCores(ranks, cores int, place *nodes.Place, may *unix.CPUSet, root string) (mine, with int) {
	if near, all := place.Within(may); near.Count() > 0 {
		return near.Count(), ranksSharing(place.Ranks(ranks), near.Count(), all)
	}
	return cores, ranksSharing(ranks, cores, nodes.Online(root))
}

// ranksSharing returns how many ranks share the cores that this process may run on: all ranks, or 1 if a launcher has
// given each rank its own part of the host's cores.
func ranksSharing(ranks, cores, all int) int {
	if all >= ranks && cores <= all/ranks {
		return 1
	}
	return ranks
}
