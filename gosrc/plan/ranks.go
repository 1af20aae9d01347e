package plan

// This file divides stored chunks among the ranks of a group. From what each rank needs it decides which rank
// reads which chunk, and in which piece the chunk travels.

import (
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/tensor"
)

// A ChunkOf names a chunk: the tensor that contains it, and its number there.
type ChunkOf struct{ Data, N int32 }

// Values that say which ranks need a chunk. Other values are the number of the only rank that needs it.
const (
	NoRank  = -1
	Several = -2
)

// NeededBy says of each chunk of an index which rank needs it. needs are the blocks that the ranks need, with the
// rank's number in place of the address.
func NeededBy(ix *tensor.Index, ranks int, needs []Request) ([]int32, error) {
	by := make([]int32, len(ix.Chunks))
	for i := range by {
		by[i] = NoRank
	}
	wants, err := Check(ix, needs)
	if err != nil {
		return nil, err
	}
	for i := range wants {
		rank := needs[i].Dest
		if rank >= uintptr(ranks) {
			return nil, errs.New(errs.ErrArgument, "request %d is for invalid rank %d of %d", i, int64(rank), ranks)
		}
		first := ix.Tensors[wants[i].Data].First
		wants[i].EachChunk(ix, func(n int32) {
			switch who := &by[first+n]; *who {
			case NoRank:
				*who = int32(rank)
			case int32(rank):
			default:
				*who = Several
			}
		})
	}
	return by, nil
}

// A RankShare is what one rank reads of a piece: first the chunks that several ranks need, then those that only
// it needs. Bytes is the most that it takes in a buffer.
type RankShare struct {
	Chunks []ChunkOf
	Common int
	Bytes  int64
}

// Divide divides chunks, in the order of the files, into pieces in which all ranks read the same amount. A chunk
// that several ranks need is read by any one of them, a chunk that only one needs by that rank, and a chunk that
// no rank needs by none. needed says who needs a chunk, and room how many bytes it takes in a share at most. A
// share has at most full bytes. A sixteenth of it stays free unless a chunk needs it, so that shares fill slots
// with a power of two as size.
func Divide(chunks []ChunkOf, ranks int, full int64, needed func(ChunkOf) int32,
	room func(ChunkOf) int64) (pieces [][]RankShare, err error) {
	stacks := make([]stack, ranks+1) // the last one is for any rank
	for _, c := range chunks {
		k := needed(c)
		switch n := room(c); {
		case k == NoRank:
			continue
		case n > full:
			return nil, errs.New(errs.ErrArgument,
				"relay: buffers have %d bytes for each of %d ranks, too few for a chunk of %d", full, ranks, n)
		case k == Several:
			k = int32(ranks)
		}
		s := &stacks[k]
		s.chunks, s.takes, s.bytes = append(s.chunks, c), append(s.takes, room(c)), s.bytes+room(c)
	}
	most := full - full/16
	for {
		remaining := int64(0)
		for i := range stacks {
			remaining += stacks[i].bytes
		}
		if remaining == 0 {
			return pieces, nil
		}
		level := (remaining + int64(ranks) - 1) / int64(ranks) // for each rank, until everything is read
		now := min(level, most)
		shares, over := make([]RankShare, ranks), int64(0)
		for rank := range shares {
			s := &shares[rank]
			own := int64(float64(stacks[rank].bytes) * float64(now) / float64(level))
			s.fill(&stacks[ranks], now-own-over, most)
			s.Common = len(s.Chunks)
			s.fill(&stacks[rank], now-over, most)
			over += s.Bytes - now
		}
		pieces = append(pieces, shares)
	}
}

// A stack holds chunks for one rank, or for any rank.
type stack struct {
	chunks []ChunkOf
	takes  []int64
	bytes  int64
}

// fill moves chunks to a share until it has `until` bytes. It never exceeds `most`, except for a single chunk.
func (s *RankShare) fill(from *stack, until, most int64) {
	n := 0
	for ; n < len(from.chunks) && s.Bytes < until; n++ {
		room := from.takes[n]
		if s.Bytes > 0 && s.Bytes+room > most {
			break
		}
		s.Bytes, from.bytes = s.Bytes+room, from.bytes-room
	}
	s.Chunks = append(s.Chunks, from.chunks[:n]...)
	from.chunks, from.takes = from.chunks[n:], from.takes[n:]
}
