package plan

// This file divides stored chunks among the ranks of a group. It decides which rank reads a chunk, and with which
// piece the chunk is sent.

import (
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/tensor"
)

// A ChunkOf identifies a chunk by the tensor that contains it and its number there.
type ChunkOf struct{ Data, N int32 }

// NoRank means that no rank needs a chunk, and Several that several do. If exactly one rank needs it, its number is
// used.
const (
	NoRank  = -1
	Several = -2
)

// NeededBy returns, for each chunk of an index, the rank that needs it, NoRank or Several. needs are the slices that
// the ranks need. Their Dest holds the rank's number.
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
			return nil, errs.New(errs.ErrArgument, "request %d is for rank %d, but there are %d ranks", i, int64(rank),
				ranks)
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

// A RankShare lists the chunks of a piece that one rank reads. The first Common ones are needed by several ranks and
// the others only by this rank. Bytes is the maximum that they take in a buffer.
type RankShare struct {
	Chunks []ChunkOf
	Common int
	Bytes  int64
}

// Divide divides chunks, in the order of the files, into pieces for which all ranks read about the same amount. A chunk
// that several ranks need may be read by any rank. A chunk that one rank needs is read by that rank, and a chunk that
// no rank needs is not read. needed returns which rank needs a chunk, and room the maximum bytes that the chunk takes
// in a share. A share has at most full bytes. A sixteenth of full stays free unless a single chunk needs it, so that
// shares fit in slots with a power-of-two size.
func Divide(chunks []ChunkOf, ranks int, full int64, needed func(ChunkOf) int32,
	room func(ChunkOf) int64) (pieces [][]RankShare, err error) {
	stacks := make([]stack, ranks+1) // the last one holds chunks for any rank
	for _, c := range chunks {
		k := needed(c)
		switch n := room(c); {
		case k == NoRank:
			continue
		case n > full:
			return nil, errs.New(errs.ErrArgument,
				"group load: buffers of %d bytes for each of %d ranks are too small for a chunk of %d bytes",
				full, ranks, n)
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
		level := (remaining + int64(ranks) - 1) / int64(ranks) // what each rank still has to read
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

// fill moves chunks to a share until it has `until` bytes. Only a single chunk may exceed `most`.
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
