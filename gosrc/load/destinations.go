package load

// This file has destinations that become known while a load runs.

import (
	"context"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/device/cuda"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/spawn"
)

// Allocating GPU memory takes the driver some 50 us a tensor, so most of it is
// allocated while the first bytes are on their way. Plans and tasks then have a
// placeholder plus an offset for a destination, until pipeline.Task.Destination
// resolves it.
const (
	// SettleLater as the Dest of a Request says that Loading.Settle will set it.
	SettleLater = 1
	// pending is the placeholder; no memory has this address.
	pending = uintptr(1) << 62
)

// spare is how many bytes of a GPU must stay free for memory to be allocated during
// a load, allotment how many are allocated at once. Tests on the fake driver make
// them smaller.
var spare, allotment int64 = 1 << 30, 256 << 20

// destinations are those of a load that become known while it runs.
type destinations struct {
	known []atomic.Uintptr // by request; 0: not yet

	mu    sync.Mutex
	moved chan struct{} // closed and renewed when some become known
	err   error         // why no more will become known
}

func newDestinations(n int) *destinations {
	return &destinations{known: make([]atomic.Uintptr, n), moved: make(chan struct{})}
}

// wake wakes the waiting workers; err, if not nil, says why no more destinations
// will become known.
func (p *destinations) wake(err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.err == nil {
		p.err = err
	}
	close(p.moved)
	p.moved = make(chan struct{})
}

// resolveTask returns the destination of a task that was planned at dst. It waits until
// it is known.
func (p *destinations) resolveTask(ctx context.Context, want int32, dst unsafe.Pointer) (unsafe.Pointer, error) {
	at := uintptr(dst)
	if at < pending {
		return dst, nil
	}
	for {
		p.mu.Lock()
		moved, err := p.moved, p.err
		p.mu.Unlock()
		if base := p.known[want].Load(); base != 0 {
			return device.Pointer(base + at - pending), nil
		}
		if err != nil {
			return nil, err
		}
		select {
		case <-moved:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

// isPostponed reports whether the memory of these sizes is allocated while the load
// runs. It is not when little is left, so that a caller that is out of memory
// learns it before the load begins.
func isPostponed(gpu *cuda.Device, sizes []int64) bool {
	if gpu == nil {
		return false
	}
	var total int64
	for _, n := range sizes {
		total += n
	}
	if total <= allotment {
		return false
	}
	unused, _, err := gpu.MemoryInfo()
	return err == nil && unused >= total+total/8+spare
}

// allocatePostponed allocates the postponed memory of the load, allotment by allotment in the
// order of the requests, until all is there or the load ends. It closes ended when
// it stops.
func (l *Loading) allocatePostponed(ctx context.Context) (ended chan struct{}) {
	ended = make(chan struct{})
	spawn.Go("load memory", func() {
		defer close(ended)
		err := spawn.Guard("load memory", func() error {
			for from := 0; from < len(l.later) && ctx.Err() == nil; {
				to, n := from, int64(0)
				for ; to < len(l.later) && n < allotment; to++ {
					n += l.later[to]
				}
				mem, err := l.target.allocateFor(l.later[from:to])
				if err != nil {
					return l.model.PlaceError("land", err)
				}
				l.mu.Lock()
				for i, m := range mem {
					if m.Bytes > 0 {
						l.mem[from+i] = m
						l.dests.known[from+i].Store(uintptr(m.Ptr))
					}
				}
				l.mu.Unlock()
				l.dests.wake(nil)
				from = to
			}
			return nil
		})
		if err != nil {
			l.dests.wake(err)
		}
	})
	return ended
}

// settlesMeanwhile reports whether the job should wait for the load's queue, and not Start:
// one is being made, the caller can make destinations meanwhile, and enough memory is free
// that the queue's is no question.
func (l *Loading) settlesMeanwhile() bool {
	if l.settles == nil || !l.target.GPU.IsMakingQueue() {
		return false
	}
	room, _, err := l.target.GPU.MemoryInfo()
	return err == nil && room >= spare
}

// Settle sets destinations of requests with SettleLater: request, address, request,
// address. Work that is queued on the stream now precedes what lands there; 0 is no
// stream. It may be called while the load runs and after it.
func (l *Loading) Settle(pairs []int64, stream uint64) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.over {
		return nil
	}
	if l.dests == nil || len(pairs)%2 != 0 {
		return errs.New(errs.ErrArgument, "settle: no request waits for a destination, or half a pair")
	}
	if l.queue != nil && stream != 0 {
		if err := l.queue.FollowStream(uintptr(stream)); err != nil {
			return l.model.PlaceError("stage", err)
		}
	}
	for i := 0; i < len(pairs); i += 2 {
		at, dst := pairs[i], uintptr(pairs[i+1])
		if at < 0 || at >= int64(len(l.wants)) || !l.settles[at] || dst == 0 ||
			!l.dests.known[at].CompareAndSwap(0, dst) {
			return errs.New(errs.ErrArgument, "settle: request %d waits for no destination, or %#x is none", at, dst)
		}
	}
	l.dests.wake(nil)
	return nil
}
