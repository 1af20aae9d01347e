package tensors

import (
	"cmp"
	"context"
	"hash"
	"hash/crc32"
	"slices"

	"github.com/overwire/overwire/gosrc/fault"
	"github.com/overwire/overwire/gosrc/internal/ordered"
	"github.com/overwire/overwire/gosrc/internal/sha256"
	"github.com/overwire/overwire/gosrc/internal/sizes"
)

// A Flow is the data of one tensor on their way past its sums. Its functions are
// called by one worker at a time.
type Flow struct {
	Sum   *Summer
	Bytes int64
	// Next gives bytes [off, off+len(buf)): either buf, filled, or others that
	// stay until the next call.
	Next func(ctx context.Context, buf []byte, off int64) ([]byte, error)
	// Step is what Next gives in one, or a multiple of it; 0: anything.
	Step int64
	// Memory, if not nil, is all of the data: Next is not needed then.
	Memory []byte
	// Pass, if not nil, gets every piece once it was summed up, in order.
	Pass func(p []byte) error
	// Done is called when all bytes have passed.
	Done func() error
}

// Pieces of memory stay in the second-level cache from the sums to Pass; other
// bodies are read in blocks.
const (
	memoryPiece = 64 << 10
	readPiece   = 1 << 20
)

// Run lets all flows pass on several workers. What the processor hashes together
// goes together, unless the flows must keep their order, the first first. The
// first error ends everything.
func Run(ctx context.Context, name string, workers int, inOrder bool, flows []Flow) error {
	groups := inGroups(flows, workers, inOrder)
	return ordered.Each(ctx, name, workers, len(groups), func(k int) error { return pass(ctx, flows, groups[k]) })
}

// inGroups says which flows pass together. SHA-256 of sixteen at once is twice
// as fast, and that of each of them eight times slower: what is much larger than
// the rest goes alone, first, so that nobody waits for it at the end.
func inGroups(flows []Flow, workers int, inOrder bool) [][]int {
	var groups [][]int
	order := make([]int, len(flows))
	var total int64
	for i := range flows {
		order[i] = i
		total += flows[i].Bytes
	}
	each := sizes.CeilDiv(len(flows), workers)
	if inOrder || !sha256.Together(each) {
		return slices.Collect(slices.Chunk(order, 1))
	}
	slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(flows[b].Bytes, flows[a].Bytes) })
	for len(order) > 0 && flows[order[0]].Bytes > total/int64(8*workers) {
		groups, order = append(groups, order[:1]), order[1:]
	}
	each = min(sizes.CeilDiv(len(order), workers), sha256.Lanes)
	return slices.AppendSeq(groups, slices.Chunk(order, max(1, each)))
}

// pass lets a group of flows pass, a piece of each at a time.
func pass(ctx context.Context, flows []Flow, group []int) error {
	offs, bufs := make([]int64, len(flows)), make([][]byte, len(flows))
	var pieces [][]byte
	var sums []*Summer
	for len(group) > 0 {
		if ctx.Err() != nil {
			return fault.FromOS(context.Cause(ctx))
		}
		pieces, sums = pieces[:0], sums[:0]
		for _, i := range group {
			p, err := flows[i].piece(ctx, &bufs[i], offs[i])
			if err != nil {
				return err
			}
			pieces, sums = append(pieces, p), append(sums, flows[i].Sum)
			offs[i] += int64(len(p))
		}
		sumUp(sums, pieces)
		left := group[:0:0]
		for k, i := range group {
			if flows[i].Pass != nil && len(pieces[k]) > 0 {
				if err := flows[i].Pass(pieces[k]); err != nil {
					return err
				}
			}
			if offs[i] < flows[i].Bytes {
				left = append(left, i)
				continue
			}
			if bufs[i] = nil; flows[i].Done != nil {
				if err := flows[i].Done(); err != nil {
					return err
				}
			}
		}
		group = left
	}
	return nil
}

func (f *Flow) piece(ctx context.Context, buf *[]byte, off int64) ([]byte, error) {
	if f.Memory != nil || f.Bytes == 0 {
		return f.Memory[off:min(off+memoryPiece, f.Bytes)], nil
	}
	step := max(1, f.Step)
	n := min(sizes.RoundUp(readPiece, step), f.Bytes-off)
	if *buf == nil {
		*buf = make([]byte, n)
	}
	return f.Next(ctx, (*buf)[:n], off)
}

// sumUp does s.Write(p) for each summer and its piece.
func sumUp(sums []*Summer, pieces [][]byte) {
	hashes := make([]hash.Hash, len(sums))
	for i, s := range sums {
		s.crc = crc32.Update(s.crc, crc32.IEEETable, pieces[i])
		hashes[i] = s.sha
	}
	sha256.Write(hashes, pieces)
}
