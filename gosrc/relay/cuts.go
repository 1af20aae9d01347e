package relay

// This file divides a group's load where the ranks cut tensors: what one rank alone
// needs is read by that rank, and does not travel.

import (
	"sort"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/plan"
)

// Which rank of this host needs a chunk; other numbers are a rank that alone does.
const (
	noRank   = -1
	allRanks = -2 // more than one
)

// blockOf is the part of a dimension that a rank of the host gets: as torch.chunk cuts.
func (s *Spec) blockOf(size int64, rank int) (lo, hi int64) {
	block := (size + int64(s.World) - 1) / int64(s.World)
	lo = min(s.Members[rank]*block, size)
	return lo, min(lo+block, size)
}

// checkCuts checks what a spec says of cuts.
func (s *Spec) checkCuts() error {
	for _, n := range s.Needs {
		if !s.Exchange || len(s.Cuts) > 0 || n.Dest >= uintptr(s.Ranks) {
			return errs.New(errs.ErrArgument, "relay: rank %d of %d needs a block, beside %d cuts", int64(n.Dest), s.Ranks, len(s.Cuts))
		}
	}
	if len(s.Cuts) == 0 {
		return nil
	}
	bad := !s.Exchange || len(s.Cuts) != len(s.Tensors) || len(s.Members) != s.Ranks || s.World < s.Ranks
	for _, m := range s.Members {
		bad = bad || m < 0 || m >= int64(s.World)
	}
	if bad {
		return errs.New(errs.ErrArgument, "relay: %d cuts of %d tensors for ranks %v of %d", len(s.Cuts), len(s.Tensors), s.Members, s.World)
	}
	return nil
}

// divided reports whether the ranks need parts of the tensors only.
func (s *Spec) divided() bool { return len(s.Cuts)+len(s.Needs) > 0 }

// columns reports of which tensors, in the order of the spec, some rank needs columns.
func (s *Spec) columns() []bool {
	out, some := make([]bool, len(s.Tensors)), map[int64]bool{}
	for _, n := range s.Needs {
		if n.Lo1 != 0 || n.Hi1 != plan.Whole {
			some[n.Tensor] = true
		}
	}
	for i, t := range s.Tensors {
		out[i] = some[t] || len(s.Cuts) > 0 && s.Cuts[i] == 1
	}
	return out
}

// needs says for each chunk which rank of this host needs it.
func (r *Relay) needs(wants []plan.Want) ([]int16, error) {
	s := r.spec
	need := make([]int16, len(r.ix.Chunks))
	for i := range need {
		need[i] = noRank
	}
	reqs := make([][]plan.Request, s.Ranks)
	for _, n := range s.Needs {
		reqs[n.Dest] = append(reqs[n.Dest], n)
	}
	if len(s.Needs) > 0 {
		wants = nil
	}
	for i := range wants {
		shape := r.ix.Tensors[wants[i].Tensor].Shape
		if dim := s.Cuts[i]; dim < 0 || dim > 1 || dim >= int64(len(shape)) {
			t := &r.ix.Tensors[wants[i].Data]
			for n := range t.Count {
				need[t.First+n] = allRanks
			}
			continue
		}
		for rank := range reqs {
			q := plan.Request{Tensor: s.Tensors[i], Hi0: plan.Whole, Hi1: plan.Whole}
			lo, hi := s.blockOf(shape[s.Cuts[i]], rank)
			if s.Cuts[i] == 0 {
				q.Lo0, q.Hi0 = lo, hi
			} else {
				q.Lo1, q.Hi1 = lo, hi
			}
			if lo < hi {
				reqs[rank] = append(reqs[rank], q)
			}
		}
	}
	for rank, list := range reqs {
		ws, err := plan.Check(r.ix, list)
		if err != nil {
			return nil, err
		}
		for i := range ws {
			first := r.ix.Tensors[ws[i].Data].First
			ws[i].EachChunk(r.ix, func(n int32) {
				switch by := &need[first+n]; *by {
				case noRank:
					*by = int16(rank)
				case int16(rank):
				default:
					*by = allRanks
				}
			})
		}
	}
	return need, nil
}

// A stack is chunks that go to one rank, or to any of them, in the order of the files.
type stack struct {
	chunks []chunkOf
	bytes  int64
}

// layOutCuts divides chunks, in the order of the files, into pieces in which each rank
// reads as much as every other: first what all need, in front of its share, then what
// it alone needs.
func (r *Relay) layOutCuts(all []chunkOf, need []int16) error {
	ranks := r.spec.Ranks
	stacks := make([]stack, ranks+1) // the last is of all
	for i := range stacks {
		stacks[i].chunks = make([]chunkOf, 0, len(all))
	}
	for _, c := range all {
		k := need[r.ix.Tensors[c.data].First+c.n]
		if k == noRank { // another host's
			r.place(c).piece = -1
			continue
		}
		if k == allRanks {
			k = int16(ranks)
		}
		s := &stacks[k]
		s.chunks, s.bytes = append(s.chunks, c), s.bytes+roomOf(r.chunk(c))
	}
	full := r.spec.Size/int64(ranks) - shareAlign
	most := full - full/16 // as in layOut
	striped := r.striped()
	for {
		left := int64(0)
		for i := range stacks {
			left += stacks[i].bytes
		}
		if left == 0 {
			return nil
		}
		level := (left + int64(ranks) - 1) / int64(ranks) // for each rank, until all is read
		now := min(level, most)
		shares := make([]share, ranks)
		for rank := range shares {
			shares[rank].chunks = make([]chunkOf, 0, fewChunks)
			own := int64(float64(stacks[rank].bytes) * float64(now) / float64(level))
			if err := r.fill(&shares[rank], &stacks[ranks], now-own, most, full); err != nil {
				return err
			}
			common := shares[rank].chunks
			if striped {
				sort.SliceStable(common, func(i, k int) bool { return !r.isStrip(common[i]) && r.isStrip(common[k]) })
			}
			shares[rank].common = len(common)
		}
		for rank := range shares {
			if err := r.fill(&shares[rank], &stacks[rank], now, most, full); err != nil {
				return err
			}
		}
		r.piece(shares)
	}
}

// fill moves chunks to a share, until it has that number of bytes; it has `most` at
// most, or `full` if it is one chunk.
func (r *Relay) fill(to *share, from *stack, until, most, full int64) error {
	for len(from.chunks) > 0 && to.bytes < until {
		n := roomOf(r.chunk(from.chunks[0]))
		if n > full {
			return errs.New(errs.ErrArgument, "relay: buffers of %d bytes are too small for a chunk of %d and %d ranks", r.spec.Size, n, r.spec.Ranks)
		}
		if to.bytes > 0 && to.bytes+n > most {
			return nil
		}
		to.chunks, to.bytes = append(to.chunks, from.chunks[0]), to.bytes+n
		from.chunks, from.bytes = from.chunks[1:], from.bytes-n
	}
	return nil
}
