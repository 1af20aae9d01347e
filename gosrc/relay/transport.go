package relay

// The transport of shares between ranks, over memory that the processes of a host map of each other.

import (
	"context"
	"errors"
	"sync/atomic"

	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/device/cuda"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/peers"
)

// A transport brings the shares of a relay from rank to rank. No rank decodes what was not compared with its checksum
// where it was read.
//
// A rank reads its shares into memory that the other ranks map, one by one, while the first shares are read. It
// publishes a piece when its share was checked and has arrived there. Each other rank waits for that by itself, copies
// the share to memory of its own (staging), on a stream for each rank, and decodes after the copy. On the host it
// decodes where the bytes are. Then it says that it does not need the share any more. A rank fills its memory again
// when all others have said so, whatever they have of other ranks: one that reads late delays only what it reads.
type transport struct {
	*peers.Peers
	gpu      *cuda.Device  // nil: the host
	staging  device.Memory // on a GPU: Spec.Stages shares of each other rank
	streams  []uintptr     // on a GPU, by rank; its own: 0
	joined   chan struct{} // closed when the ranks are connected
	asked    bool          // Join was called; guarded by the relay's mu
	unmapped atomic.Bool   // the error is that another rank's memory cannot be mapped
}

// newTransport makes what the transport of a Spec needs. After an error close frees what there is.
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
	staging, err := gpu.Alloc([]int64{int64(spec.Stages*(spec.Ranks-1)) * spec.shareSpace()}) // of one rank: none
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

// join connects this rank with the others, by their offers in order.
func (t *transport) join(offers []peers.Offer) error {
	err := t.Join(offers)
	if err != nil {
		t.unmapped.Store(errors.Is(err, errs.ErrNotSupported))
	}
	return err
}

// mapOthers maps the other ranks' memory once they are connected, when it is this rank's turn, and waits until
// all ranks have done so.
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
	return t.Board.AwaitJoined(ctx) // also a relay without pieces does not end before the others have found it
}

// end waits for the pulls in flight, and for the other ranks to end theirs; when ctx has ended, not long. good: this
// rank has no error. fail is called with the error of another.
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
