package binding

// This file defines the verbs with which Python supplies pieces of objects; see package fed.

import (
	"context"
	"time"

	"github.com/overwire/overwire/gosrc/job"
	"github.com/overwire/overwire/gosrc/source/fed"
)

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
