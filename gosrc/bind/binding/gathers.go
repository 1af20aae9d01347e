package binding

// This file defines the verbs with which ranks stream the blocks of a model together; see package gather.

import (
	"context"
	"time"

	"github.com/overwire/overwire/gosrc/device/cuda"
	"github.com/overwire/overwire/gosrc/gather"
	"github.com/overwire/overwire/gosrc/peers"
)

// withTimeout makes the function of a verb for a gather. Its last number is how many milliseconds it may take.
func withTimeout[Q, R any](
	run func(ctx context.Context, g *gather.Gather, q Q, n []int64) (R, error)) func(Q, []int64) (R, error) {
	return ofNumbered(gatherOf, func(g *gather.Gather, q Q, n []int64) (R, error) {
		last := len(n) - 1
		ctx, cancel := context.WithTimeout(context.Background(), time.Duration(n[last])*time.Millisecond)
		defer cancel()
		return run(ctx, g, q, n[:last])
	})
}

func gatherVerbs() []*Verb {
	return []*Verb{
		answered("gather_new", "Make a rank's part of a group that holds stored blocks together. A device of -1 is "+
			"the host. `nbytes` bounds the stored bytes of all blocks.",
			func(_ none, n []int64) (int64, error) {
				var gpu *cuda.Device
				var err error
				if n[0] >= 0 {
					gpu, err = cuda.Open(int(n[0]))
				}
				if err != nil {
					return 0, err
				}
				g, err := gather.New(gpu, n[3], int(n[1]), int(n[2]))
				if err != nil {
					return 0, err
				}
				return int64(keep(g)), nil
			}).ints("device", "rank", "ranks", "nbytes"),
		answered("gather_offer", "Return the offer of the store, or make this rank's buffers and return their offer.",
			ofNumbered(gatherOf, func(g *gather.Gather, _ none, n []int64) (peers.Offer, error) {
				if n[0] == 0 {
					return g.OfferStore(), nil
				}
				return g.OpenRing(int(n[0]), n[1])
			})).ints("gather", "buffers", "nbytes"),
		answered("gather_join", "Connect this rank's store or buffers to those of the others, with their offers in "+
			"rank order. Return the address of the store.",
			withTimeout(func(ctx context.Context, g *gather.Gather, q []peers.Offer, n []int64) (int64, error) {
				if n[0] != 0 {
					return 0, g.JoinRing(ctx, q)
				}
				at, err := g.JoinStore(ctx, q)
				return int64(at), err
			})).ints("gather", "buffers", "ms"),
		answered("gather_meet",
			"Announce a block and return the blocks that all ranks announce, or those of the first ranks after `ms`.",
			withTimeout(func(ctx context.Context, g *gather.Gather, _ none, n []int64) (*Result, error) {
				blocks, err := g.MeetRanks(ctx, uint32(n[0]))
				r := &Result{}
				for _, block := range blocks {
					r.Numbers = append(r.Numbers, int64(block))
				}
				return r, err
			})).ints("gather", "block", "ms"),
		answered("gather_copy", "Queue the copy of this rank's part of a block, or of all parts, after the work on a "+
			"stream. Return 1, or 0 if no buffer is free after `ms`.",
			withTimeout(func(ctx context.Context, g *gather.Gather, _ none, n []int64) (int64, error) {
				p := gather.BlockParts{At: n[0], Bytes: n[1], Part: n[2], Whole: n[3] != 0}
				ok, err := g.CopyPart(ctx, p, uintptr(n[4]))
				return truth(ok), err
			})).ints("gather", "offset", "nbytes", "part", "whole", "after", "ms"),
		answered("gather_take", "Make a stream wait for all parts of the oldest block in its buffers. Return the "+
			"address of the block's bytes, or 0 after `ms`.",
			withTimeout(func(ctx context.Context, g *gather.Gather, _ none, n []int64) (int64, error) {
				at, err := g.TakeBlock(ctx, uintptr(n[0]))
				return int64(at), err
			})).ints("gather", "stream", "ms"),
		answered("gather_end", "Free the buffers, or inform the other ranks that this rank has failed.",
			ofNumbered(gatherOf, func(g *gather.Gather, _ none, n []int64) (none, error) {
				if n[0] != 0 {
					g.ReportFailure()
				} else {
					g.CloseRing()
				}
				return none{}, nil
			})).ints("gather", "failed").afterPanics(),
	}
}

func gatherOf(h int64) (*gather.Gather, error) { return get[*gather.Gather](uint64(h)) }
