package load

// This file handles destinations that become known while a load runs, and casts floats as they land on a GPU.

import (
	"context"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/device/cuda"
	"github.com/overwire/overwire/gosrc/device/cuda/queue"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/spawn"
	"github.com/overwire/overwire/gosrc/plan"
	"github.com/overwire/overwire/gosrc/tensor"
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

// castsOf returns the cast of each request. A zero Cast means that the request is not cast on the GPU: it already has
// the dtype, or there is no kernel for the two dtypes.
func castsOf(ix *tensor.Index, wants []plan.Want, tgt Target, to string) ([]device.Cast, error) {
	if to == "" {
		return nil, nil
	}
	d, ok := tensor.ParseDType(to)
	if !ok || tgt.GPU == nil {
		return nil, errs.New(errs.ErrArgument, "cannot cast to %q: expected a dtype and a GPU", to)
	}
	casts := make([]device.Cast, len(wants))
	for i := range wants {
		c := device.Cast{From: ix.Tensors[wants[i].Tensor].DType, To: d}
		if c.From != c.To && queue.CanCast(c) {
			casts[i] = c
		}
	}
	return casts, nil
}

// castBytes returns how many bytes the elements in n bytes take after a cast.
func castBytes(n int64, c device.Cast) int64 {
	return n / int64(c.From.Bits()/8) * int64(c.To.Bits()/8)
}

// wholeCasts holds the requests that cannot be cast chunk by chunk, because chunk borders split rows or elements.
// Such a request first lands completely in temporary memory and is then cast to its destination.
type wholeCasts struct {
	l    *Loading
	dest []unsafe.Pointer
	mem  []device.Memory // temporary memory by request; nil means none

	mu     sync.Mutex
	landed []int32
}

// plantCasts adds the casts and their destinations to the tasks of a plan.
func plantCasts(l *Loading, p *plan.Plan, dest []unsafe.Pointer) (*wholeCasts, error) {
	t := &wholeCasts{l: l, dest: dest}
	if l.casts == nil {
		return t, nil
	}
	sizes := make([]int64, len(l.wants))
	var any bool
	for k, ref := range p.Refs {
		c, j := l.casts[ref.Want], &p.Tasks[k]
		if c.To == 0 {
			continue
		}
		each := int64(c.From.Bits() / 8)
		at := int64(uintptr(j.Dst)) - int64(uintptr(dest[ref.Want]))
		if j.View != nil || at%each != 0 || int64(j.Chunk.Logical)%each != 0 {
			sizes[ref.Want], any = l.wants[ref.Want].Bytes, true
		}
	}
	if any {
		mem, err := l.target.allocateFor(sizes)
		if err != nil {
			return nil, l.model.LocateError("land", err)
		}
		t.mem = mem
	}
	for k, ref := range p.Refs {
		c, j := l.casts[ref.Want], &p.Tasks[k]
		if c.To == 0 {
			continue
		}
		at := int64(uintptr(j.Dst)) - int64(uintptr(dest[ref.Want]))
		if sizes[ref.Want] > 0 {
			j.Dst = unsafe.Add(t.mem[ref.Want].Ptr, at)
		} else {
			j.Dst, j.Cast = unsafe.Add(dest[ref.Want], castBytes(at, c)), c
		}
	}
	return t, nil
}

// wrapLand returns a function that calls land for requests that are at their destination, and records the requests
// that must still be cast.
func (t *wholeCasts) wrapLand(land func(int32)) func(int32) {
	if t.mem == nil {
		return land
	}
	return func(i int32) {
		if t.mem[i].Block == nil {
			land(i)
			return
		}
		t.mu.Lock()
		t.landed = append(t.landed, i)
		t.mu.Unlock()
	}
}

func (t *wholeCasts) castLanded(ctx context.Context, queue *queue.Queue, land func(int32)) error {
	for _, i := range t.landed {
		c := t.l.casts[i]
		dst := device.Memory{Ptr: t.dest[i], Bytes: t.l.landingBytes(int(i))}
		if uintptr(dst.Ptr) == pending { // its address is known, because the request has landed
			dst.Ptr = device.Pointer(t.l.dests.known[i].Load())
		}
		if err := queue.CastAndWait(ctx, dst, t.mem[i], c.From, c.To); err != nil {
			x := &t.l.model.ix.Tensors[t.l.wants[i].Tensor]
			return errs.Locate("land", t.l.model.ix.Sources[x.Source].URI, x.Name, -1, err)
		}
		t.mem[i].Release()
		t.mem[i] = device.Memory{}
		land(i)
	}
	return nil
}
