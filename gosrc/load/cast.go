package load

// This file casts floats to another dtype as they land on a GPU.

import (
	"context"
	"sync"
	"unsafe"

	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/device/cuda/queue"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/plan"
	"github.com/overwire/overwire/gosrc/tensor"
)

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
