package relay

import (
	"testing"
	"time"

	"github.com/overwire/overwire/gosrc/internal/spawn"
	"github.com/overwire/overwire/gosrc/peers"
)

// Relays that bring nothing find each other, too, in whatever order they join: the first
// one stays until the last has come.
func TestNothingToBring(t *testing.T) {
	m := plain(t, []int64{7})
	const ranks = 3
	relays, offers := make([]*Relay, ranks), make([]peers.Offer, ranks)
	for rank := range relays {
		r, err := Start(m, &Spec{Size: ranks * 4096, Ranks: ranks, Rank: rank, Exchange: true, Buffers: 2})
		if err != nil {
			t.Fatal(err)
		}
		if err := r.Aim(nil); err != nil {
			t.Fatal(err)
		}
		if offers[rank], err = r.Offer(); err != nil {
			t.Fatal(err)
		}
		relays[rank] = r
	}
	for _, r := range relays {
		select {
		case <-relays[0].Job().Done():
		case <-time.After(50 * time.Millisecond):
		}
		if err := r.Join(offers); err != nil {
			t.Error(err)
		}
	}
	for rank, r := range relays {
		if _, err := r.Job().Wait(-1); err != nil {
			t.Errorf("rank %d: %v", rank, err)
		}
	}
	if left := spawn.Left(); len(left) != 0 {
		t.Errorf("still running: %v", left)
	}
}
