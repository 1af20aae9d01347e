package relay

// This file moves shares between ranks of a host that map each other's memory.

import (
	"context"
	"errors"
	"sync/atomic"

	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/device/cuda"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/peers"
)

// A transport moves the shares of a relay between ranks. No rank decodes a share before the rank that read it has
// compared its checksums.
//
// A rank reads its shares into memory that the other ranks map. The ranks map it one after another, while the first
// shares are being read. A rank publishes a piece when its share has been read and verified. Each other rank polls
// until then. On a GPU it copies the share to its own memory (staging), on one stream per rank, and then decodes it. On
// the host it decodes the share in place. Then it announces that it no longer needs the share. A rank refills its
// memory when all other ranks have announced that, independently of other ranks' shares, so a slow reader delays only
// what it reads.
type transport struct {
	*peers.Peers
	staging  device.Memory // on a GPU: space for Spec.Stages shares of each other rank
	streams  []uintptr     // on a GPU, by rank; 0 for this rank
	joined   chan struct{} // closed when the ranks are connected
	asked    bool          // Join was called; guarded by the relay's mu
	unmapped atomic.Bool   // another rank's memory could not be mapped
}

// newTransport makes the transport of a Spec. After an error, end frees what was allocated.
func newTransport(spec *Spec, gpu *cuda.Device) (*transport, error) {
	if spec.Buffers < 1 || spec.Buffers > maxBuffers || gpu != nil && spec.Stages < 1 || spec.Stages > maxBuffers ||
		len(spec.Ring) > 0 {
		return nil, errs.New(errs.ErrArgument, "group load: invalid transport with %d buffers and %d stages "+
			"of %d bytes for %d ranks, and a ring of %d: expected 1 to %d buffers and stages, and no ring",
			spec.Buffers, spec.Stages, spec.Size, spec.Ranks, len(spec.Ring), maxBuffers)
	}
	p, err := peers.New(gpu, int64(spec.Buffers)*spec.shareSpace(), spec.Rank, spec.Ranks)
	if err != nil {
		return nil, err
	}
	t := &transport{Peers: p, joined: make(chan struct{})}
	if gpu == nil {
		return t, nil
	}
	staging, err := gpu.Alloc([]int64{int64(spec.Stages*(spec.Ranks-1)) * spec.shareSpace()}) // empty for a single rank
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

// join connects this rank to the others, with their offers in rank order.
func (t *transport) join(offers []peers.Offer) error {
	err := t.Join(offers)
	if err != nil {
		t.unmapped.Store(errors.Is(err, errs.ErrNotSupported))
	}
	return err
}

// mapOthers maps the other ranks' memory when the ranks are connected. It returns when all ranks have joined.
func (t *transport) mapOthers(ctx context.Context) error {
	err := awaitChannel(ctx, t.joined)
	if err == nil {
		err = t.MapOthers(ctx)
		t.unmapped.Store(errors.Is(err, errs.ErrNotSupported))
	}
	return err
}

// end waits for the pulls in flight and for the other ranks to finish theirs. After ctx has ended, it waits only
// briefly. good reports whether this rank has no error. end calls fail if another rank has failed.
func (t *transport) end(ctx context.Context, good func() bool, fail func(error)) {
	if t == nil {
		return
	}
	for _, s := range t.streams {
		if s != 0 {
			t.GPU.SyncAndFreeStream(s)
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
