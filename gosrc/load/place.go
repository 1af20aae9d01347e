package load

import (
	"context"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/overwire/overwire/gosrc/device/cuda"
	"github.com/overwire/overwire/gosrc/fault"
	"github.com/overwire/overwire/gosrc/internal/spawn"
)

// Memory of a GPU takes the driver some 50 us a tensor, so most of it is got
// while the first bytes are on their way: plans and jobs then have a place that
// only counts from its beginning, until Place of the pipeline puts the real one
// there.
const (
	// Later as the Dest of a Request: Loading.Settle will tell.
	Later = 1
	// pending is where such requests seem to begin: no memory is there.
	pending = uintptr(1) << 62
)

// Bytes of a GPU that must be left for that, and that are got at once; tests on
// the fake driver make them smaller.
var spare, allotment int64 = 1 << 30, 256 << 20

// places are those of a load that become known while it runs.
type places struct {
	known []atomic.Uintptr // by request; 0: not yet

	mu    sync.Mutex
	moved chan struct{} // closed and renewed when some become known
	err   error         // none will any more
}

func newPlaces(n int) *places {
	return &places{known: make([]atomic.Uintptr, n), moved: make(chan struct{})}
}

// tell wakes who waits; err, if not nil, is why there will be no more places.
func (p *places) tell(err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.err == nil {
		p.err = err
	}
	close(p.moved)
	p.moved = make(chan struct{})
}

// real is where a job of a request lands that was planned at dst. It waits for
// the place to be known.
func (p *places) real(ctx context.Context, want int32, dst unsafe.Pointer) (unsafe.Pointer, error) {
	at := uintptr(dst)
	if at < pending {
		return dst, nil
	}
	for {
		p.mu.Lock()
		moved, err := p.moved, p.err
		p.mu.Unlock()
		if base := p.known[want].Load(); base != 0 {
			return address(base + at - pending), nil
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

// address is a pointer to memory outside Go's heap.
func address(at uintptr) unsafe.Pointer { return *(*unsafe.Pointer)(unsafe.Pointer(&at)) }

// postpone says which of the sizes, memory on a GPU, are got while the load
// runs: all or none. With little room left it is none, so that a caller who is
// out of memory learns it before the load begins.
func postpone(gpu *cuda.Device, sizes []int64) bool {
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
	unused, _, err := gpu.Free()
	return err == nil && unused >= total+total/8+spare
}

// provide gets the postponed memory of the load, part by part in the order of
// the requests, until it has it or the load ends. The end of what it returns is
// the end of it.
func (l *Loading) provide(ctx context.Context) (ended chan struct{}) {
	ended = make(chan struct{})
	spawn.Go("load memory", func() {
		defer close(ended)
		err := spawn.Guard("load memory", func() error {
			for from := 0; from < len(l.later) && ctx.Err() == nil; {
				to, n := from, int64(0)
				for ; to < len(l.later) && n < allotment; to++ {
					n += l.later[to]
				}
				mem, err := l.target.alloc(l.later[from:to])
				if err != nil {
					return l.model.where("land", err)
				}
				l.mu.Lock()
				for i, m := range mem {
					if m.Bytes > 0 {
						l.mem[from+i] = m
						l.places.known[from+i].Store(uintptr(m.Ptr))
					}
				}
				l.mu.Unlock()
				l.places.tell(nil)
				from = to
			}
			return nil
		})
		if err != nil {
			l.places.tell(err)
		}
	})
	return ended
}

// Settle tells where requests land that were to learn it later: request, place,
// request, place. Work that is queued on the stream now precedes what lands
// there; 0 is no stream. It may be called while the load runs and after it.
func (l *Loading) Settle(pairs []int64, stream uint64) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.over {
		return nil
	}
	if l.places == nil || len(pairs)%2 != 0 {
		return fault.New(fault.ErrArgument, "settle: no request waits for a place, or half a pair")
	}
	if l.queue != nil && stream != 0 {
		if err := l.queue.WaitFor(uintptr(stream)); err != nil {
			return l.model.where("stage", err)
		}
	}
	for i := 0; i < len(pairs); i += 2 {
		at, place := pairs[i], uintptr(pairs[i+1])
		if at < 0 || at >= int64(len(l.wants)) || !l.told[at] || place == 0 || !l.places.known[at].CompareAndSwap(0, place) {
			return fault.New(fault.ErrArgument, "settle: request %d waits for no place, or %#x is none", at, place)
		}
	}
	l.places.tell(nil)
	return nil
}
