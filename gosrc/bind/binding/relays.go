package binding

// This file defines the verbs of group loads.

import (
	"time"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/load"
	"github.com/overwire/overwire/gosrc/peers"
	"github.com/overwire/overwire/gosrc/relay"
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
		begun[relayRequest, relay.Report]("relay",
			"Run this rank's part of a group load of one or several models.",
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
