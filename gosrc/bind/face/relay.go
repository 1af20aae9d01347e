package face

import (
	"time"

	"github.com/overwire/overwire/gosrc/fault"
	"github.com/overwire/overwire/gosrc/load"
)

// RelayStart begins this rank's part in a load of several ranks; the spec is
// the JSON of a load.RelaySpec. The job's handle is the relay's.
func RelayStart(h uint64, spec string) (uint64, error) {
	s, err := parse[load.RelaySpec]("relay", spec)
	if err != nil {
		return 0, err
	}
	m, err := models.get(h)
	if err != nil {
		return 0, err
	}
	r, err := m.Relay(&s)
	if err != nil {
		return 0, err
	}
	return jobs.put(&entry{job: r.Job(), relay: r}), nil
}

func relayOf(h uint64) (*load.Relay, error) {
	e, err := jobs.get(h)
	if err != nil {
		return nil, err
	}
	if e.relay == nil {
		return nil, fault.New(fault.ErrArgument, "job %d is no relay", h)
	}
	return e.relay, nil
}

// RelayAim says what this rank wants; a JSON list of requests, six numbers each.
func RelayAim(h uint64, requests string) error {
	r, err := relayOf(h)
	if err != nil {
		return err
	}
	list, err := parse[[][6]int64]("relay", requests)
	if err != nil {
		return err
	}
	return r.Aim(list)
}

// RelayShares tells, as a JSON list, how many bytes each rank's share of each
// piece has in its buffer.
func RelayShares(h uint64) (string, error) {
	r, err := relayOf(h)
	if err != nil {
		return "", err
	}
	return encode(r.Shares())
}

// RelayWait waits, at most for d, until this rank's share of a piece is there, or
// on its way.
func RelayWait(h uint64, piece int, d time.Duration) (bool, error) {
	r, err := relayOf(h)
	if err != nil {
		return false, err
	}
	return r.Wait(piece, d)
}

// RelayDecode decodes a piece, after what is queued on a stream of the device.
func RelayDecode(h uint64, piece int, stream uint64) error {
	r, err := relayOf(h)
	if err != nil {
		return err
	}
	return r.Decode(piece, stream)
}
