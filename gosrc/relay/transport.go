package relay

// This file transports shares between ranks, over memory that the processes of a host map of each other.

import (
	"context"
	"errors"
	"sync/atomic"

	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/device/cuda"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/peers"
)

// A transport moves the shares of a relay between ranks. No rank decodes a share before its reader has compared
// it with its checksums.
//
// A rank reads its shares into memory that the other ranks map, one after the other, while the first shares are
// read. It publishes a piece when its share has arrived there and was checked. Each other rank polls for that,
// copies the share to memory of its own (staging), on one stream for each rank, and decodes after the copy; on
// the host it decodes the bytes in place. Then it announces that it no longer needs the share. A rank refills its
// memory when all others have announced that, independently of shares from other ranks, so a slow reader delays
// only what it reads.
type transport struct {
	*peers.Peers
	gpu      *cuda.Device  // nil: the host
	staging  device.Memory // on a GPU: Spec.Stages shares of each other rank
	streams  []uintptr     // on a GPU, by rank; 0 for this rank
	joined   chan struct{} // closed when the ranks are connected
	asked    bool          // Join was called; guarded by the relay's mu
	unmapped atomic.Bool   // the error is that another rank's memory cannot be mapped
}

// newTransport makes the transport of a Spec. After an error, close frees what was made.
func newTransport(spec *Spec, gpu *cuda.Device) (*transport, error) {
	if spec.Buffers < 1 || spec.Buffers > maxBuffers || gpu != nil && spec.Stages < 1 || spec.Stages > maxBuffers ||
		len(spec.Ring) > 0 {
		return nil, errs.New(errs.ErrArgument, "relay: invalid exchange of %d and %d shares of %d bytes for %d ranks, "+
			"with %d buffers: expected 1 to %d shares, and no buffers", spec.Buffers, spec.Stages, spec.Size,
			spec.Ranks, len(spec.Ring), maxBuffers)
	}
	p, err := peers.New(gpu, int64(spec.Buffers)*spec.shareSpace(), spec.Rank, spec.Ranks)
	if err != nil {
		return nil, err
	}
	t := &transport{Peers: p, gpu: gpu, joined: make(chan struct{})}
	if gpu == nil {
		return t, nil
	}
	staging, err := gpu.Alloc([]int64{int64(spec.Stages*(spec.Ranks-1)) * spec.shareSpace()}) // none for a single rank
	if err != nil {
		return t, err
	}
	t.staging = staging[0]
	t.streams = make([]uintptr, spec.Ranks)
	for rank := 0; rank < spec.Ranks && err == nil; rank++ {
		if rank != spec.Rank {
			t.streams[rank], err = gpu.NewStream()
		}
	}
	return t, err
}

// join connects this rank with the others, by their offers in rank order.
func (t *transport) join(offers []peers.Offer) error {
	err := t.Join(offers)
	if err != nil {
		t.unmapped.Store(errors.Is(err, errs.ErrNotSupported))
	}
	return err
}

// mapOthers maps the other ranks' memory once they are connected and it is this rank's turn. It waits until all
// ranks have done so.
func (t *transport) mapOthers(ctx context.Context, rank, ranks int) error {
	if err := awaitChannel(ctx, t.joined); err != nil {
		return err
	}
	if err := t.Board.AwaitMapTurn(ctx); err != nil {
		return err
	}
	for n := range ranks - 1 {
		if err := t.MapMemoryOf((rank + 1 + n) % ranks); err != nil {
			t.unmapped.Store(errors.Is(err, errs.ErrNotSupported))
			return err
		}
	}
	t.Board.EndMapTurn()
	return t.Board.AwaitJoined(ctx) // even a relay without pieces must not end before the others have found it
}

// end waits for the pulls in flight, and for the other ranks to end theirs; after ctx has ended, only briefly.
// good reports that this rank has no error. end calls fail with the error of another rank.
func (t *transport) end(ctx context.Context, good func() bool, fail func(error)) {
	if t == nil {
		return
	}
	for _, s := range t.streams {
		if s != 0 {
			t.gpu.SyncAndFreeStream(s)
		}
	}
	t.staging.Release()
	if err := t.End(ctx, good()); err != nil {
		fail(err)
	}
	t.Close()
}

func awaitChannel(ctx context.Context, ready chan struct{}) error {
	select {
	case <-ready:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
