package binding

// This file defines the verbs of processes that load together: of group loads, of ranks that stream the blocks of a
// model (package gather), and of processes that supply pieces of objects (package fed).

import (
	"context"
	"time"

	"github.com/overwire/overwire/gosrc/device/cuda"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/gather"
	"github.com/overwire/overwire/gosrc/job"
	"github.com/overwire/overwire/gosrc/load"
	"github.com/overwire/overwire/gosrc/peers"
	"github.com/overwire/overwire/gosrc/relay"
	"github.com/overwire/overwire/gosrc/source/fed"
)

// relayRequest describes what to load together, and from which models.
type relayRequest struct {
	relay.Spec
	// More lists further models. The tensor numbers of each model follow those of the previous model.
	More []uint64 `json:"more"`
}

// relayVerbs returns the verbs that run one rank's part of a group load.
func relayVerbs() []*Verb {
	return []*Verb{
		begun[relayRequest, relay.Report]("relay", "Run this rank's part of a group load of one or several models.",
			startRelay).ints("model").
			tail("load requests of all ranks of this host, with the rank in place of the destination; default: all " +
				"tensors"),
		answered("relay_shares", "Return, for each piece, the size of each rank's share in its buffer.",
			ofNumbered(relayOf, func(r *relay.Relay, _ none, _ []int64) ([]int64, error) { return r.ShareSizes() })).
			ints("job"),
		answered("relay_aim", "Set this rank's requests, before the first decode.",
			ofNumbered(relayOf, func(r *relay.Relay, _ none, n []int64) (none, error) {
				reqs, err := requests(n)
				if err != nil {
					return none{}, err
				}
				return none{}, r.Aim(reqs)
			})).ints("job").tail("requests like those of a load"),
		answered("relay_offer", "Return the offer with which the host's other ranks map this rank's memory.",
			ofNumbered(relayOf, func(r *relay.Relay, _ none, _ []int64) (peers.Offer, error) { return r.Offer() })).
			ints("job"),
		answered("relay_join", "Connect this rank to the other ranks, with the offers of all ranks in rank order.",
			ofNumbered(relayOf, func(r *relay.Relay, q []peers.Offer, _ []int64) (none, error) {
				return none{}, r.Join(q)
			})).ints("job"),
		answered("relay_wait",
			"Wait up to `ms` for this rank's verified share of a piece. Return 1 if it is ready, otherwise 0.",
			ofNumbered(relayOf, func(r *relay.Relay, _ none, n []int64) (int64, error) {
				there, err := r.AwaitOwnShare(int(n[0]), time.Duration(n[1])*time.Millisecond)
				return truth(there), err
			})).ints("job", "piece", "ms"),
		answered("relay_decode", "Decode a piece after the work queued on a stream (0: none), and free its buffer.",
			ofNumbered(relayOf, func(r *relay.Relay, _ none, n []int64) (none, error) {
				return none{}, r.DecodePiece(int(n[0]), uintptr(n[1]))
			})).ints("job", "piece", "stream"),
	}
}

func startRelay(_ *Verb, q relayRequest, n []int64) (*entry, error) {
	m, err := modelOf(n[0])
	if err != nil {
		return nil, err
	}
	if q.Needs, err = requests(n[1:]); err != nil {
		return nil, err
	}
	if len(q.More) > 0 {
		more, err := getAll[*load.Model](q.More)
		if err == nil {
			m, err = load.Several(append([]*load.Model{m}, more...))
		}
		if err != nil {
			return nil, err
		}
		defer m.Close() // the relay has its own reference
	}
	r, err := relay.Start(m, &q.Spec)
	if err != nil {
		return nil, err
	}
	return &entry{job: r.Job(), relay: r}, nil
}

func relayOf(h int64) (*relay.Relay, error) {
	e, err := jobOf(h)
	if err != nil {
		return nil, err
	}
	if e.relay == nil {
		return nil, errs.New(errs.ErrArgument, "job %d is not a group load", h)
	}
	return e.relay, nil
}

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

func feedVerbs() []*Verb {
	return []*Verb{
		answered("feed_open", "Make a feed of pieces of `size` bytes. Sources that are opened with `fed` from now on "+
			"request pieces from it, up to `ahead` of them before they are read. It replaces the previous feed.",
			func(_ none, n []int64) (int64, error) {
				f, err := fed.New(n[0], int(n[1]))
				if err != nil {
					return 0, err
				}
				fed.Use(f)
				return int64(keep(f)), nil
			}).ints("size", "ahead"),
		started("feed_next", "Wait up to `ms` for events, and return them. The memory of a piece must stay valid and "+
			"unchanged until the event that frees it.",
			func(ctx context.Context, _ *job.Job, _ none, n []int64) (feedEvents, error) {
				f, err := feedOf(n[0])
				if err != nil {
					return feedEvents{}, err
				}
				events, err := f.Next(ctx, time.Duration(n[1])*time.Millisecond)
				return feedEvents{events}, err
			}).awaited().ints("feed", "ms"),
		answered("feed_answer", "Answer a request for a piece. Without an address, the source reads its store. "+
			"Return 1 if the memory is used, otherwise 0.",
			func(_ none, n []int64) (int64, error) {
				f, err := feedOf(n[0])
				if err != nil {
					return 0, err
				}
				var sums []uint32 // nil means that the bytes are known to be correct
				for _, sum := range n[5:] {
					sums = append(sums, uint32(sum))
				}
				var data []byte // nil means that the source reads its store
				if n[3] != 0 {
					if data, err = dataAt(uint64(n[3]), n[4]); err != nil {
						return 0, err
					}
				}
				used, err := f.Answer(n[1], n[2], data, sums)
				return truth(used), err
			}).ints("feed", "file", "piece", "address", "nbytes").tail("the CRC32C of each 64 KiB, or nothing"),
		answered("feed_wait", "Make reads of a piece wait at least `ms` from now for its answer.",
			func(_ none, n []int64) (none, error) {
				f, err := feedOf(n[0])
				if err == nil {
					f.Wait(n[1], n[2], time.Duration(n[3])*time.Millisecond)
				}
				return none{}, err
			}).ints("feed", "file", "piece", "ms"),
		started("feed_read", "Read a piece from its store to memory. Return the CRC32C of each 64 KiB.",
			func(ctx context.Context, _ *job.Job, _ none, n []int64) (feedSums, error) {
				f, err := feedOf(n[0])
				if err != nil {
					return feedSums{}, err
				}
				to, err := dataAt(uint64(n[3]), n[4])
				if err != nil {
					return feedSums{}, err
				}
				sums, err := f.Read(ctx, n[1], n[2], to)
				return feedSums{sums}, err
			}).awaited().ints("feed", "file", "piece", "address", "nbytes").onCallersMemory(),
		answered("feed_close", "Make all sources of a feed read only from their stores. On return, none of them uses "+
			"the memory of a piece.",
			func(_ none, n []int64) (none, error) {
				f, err := feedOf(n[0])
				if err == nil {
					f.Close()
				}
				return none{}, err
			}).ints("feed").afterPanics(),
	}
}

type feedEvents struct {
	Events []fed.Event `json:"events"`
}

type feedSums struct {
	Sums []uint32 `json:"sums"`
}

func feedOf(h int64) (*fed.Feed, error) { return get[*fed.Feed](uint64(h)) }
