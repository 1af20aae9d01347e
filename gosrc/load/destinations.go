package load

// This file handles destinations that become known while a load runs.

import (
	"context"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/device/cuda"
	"github.com/overwire/overwire/gosrc/internal/spawn"
)

// The driver takes about 50 us to allocate a tensor's GPU memory, so most of it is allocated while the first bytes
// are being read. Until pipeline.Task.Destination resolves a destination, plans and tasks contain a placeholder
// plus an offset.
const (
	// BindLater, as the Dest of a Request, means that Loading.Bind will set the destination.
	BindLater = 1
	// pending is the placeholder. No memory has this address.
	pending = uintptr(1) << 62
)

// spare is the GPU memory in bytes that must stay free if memory is allocated during a load. allotment is about how
// many bytes one call allocates. Tests on the fake driver make them smaller.
var spare, allotment int64 = 1 << 30, 256 << 20

// destinations holds a load's destinations that become known while it runs.
type destinations struct {
	later []int64          // indexed by request: bytes that allocatePostponed allocates; nil means none
	bound []bool           // indexed by request: the caller binds the destination; nil means none
	known []atomic.Uintptr // indexed by request; 0 means not yet

	mu    sync.Mutex
	moved chan struct{} // closed and renewed when destinations become known
	err   error         // why no more destinations will become known
}

func newDestinations(n int) *destinations {
	return &destinations{known: make([]atomic.Uintptr, n), moved: make(chan struct{})}
}

// isPending reports whether a request's destination becomes known later. p may be nil.
func (p *destinations) isPending(i int) bool {
	return p != nil && (p.isBound(i) || p.later != nil && p.later[i] > 0)
}

// isBound reports whether the caller binds a request's destination.
func (p *destinations) isBound(i int) bool { return p.bound != nil && p.bound[i] }

// wake wakes the waiting workers. err, if not nil, is the reason why no more destinations will become known.
func (p *destinations) wake(err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.err == nil {
		p.err = err
	}
	close(p.moved)
	p.moved = make(chan struct{})
}

// resolveTask returns the destination of a task that was planned at dst. It waits until the destination is known.
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

// isPostponed reports whether memory of these sizes is allocated while the load runs. If free memory is scarce, the
// memory is allocated first, so the caller gets an out-of-memory error before the load begins.
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

// allocatePostponed allocates the load's postponed memory in the order of the requests, one allotment at a time,
// until everything is allocated or the load ends. It closes ended when it stops.
func allocatePostponed(ctx context.Context, l *Loading) (ended chan struct{}) {
	ended = make(chan struct{})
	spawn.Go("load memory", func() {
		defer close(ended)
		err := spawn.Guard("load memory", func() error {
			for from := 0; from < len(l.dests.later) && ctx.Err() == nil; {
				to, n := from, int64(0)
				for ; to < len(l.dests.later) && n < allotment; to++ {
					n += l.dests.later[to]
				}
				mem, err := l.target.allocateFor(l.dests.later[from:to])
				if err != nil {
					return l.model.LocateError("land", err)
				}
				l.out.mu.Lock()
				for i, m := range mem {
					if m.Bytes > 0 {
						l.out.mem[from+i] = m
						l.dests.known[from+i].Store(uintptr(m.Ptr))
					}
				}
				l.out.mu.Unlock()
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
