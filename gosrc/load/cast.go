package load

import (
	"context"
	"sync"
	"unsafe"

	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/device/cpu"
	"github.com/overwire/overwire/gosrc/device/cuda"
	"github.com/overwire/overwire/gosrc/fault"
	"github.com/overwire/overwire/gosrc/plan"
	"github.com/overwire/overwire/gosrc/tensor"
)

// castsOf says which requests become another type as they land: those for whose
// pair of types the GPU has a kernel.
func castsOf(ix *tensor.Index, wants []plan.Want, tgt target, to string) ([]device.Cast, error) {
	if to == "" {
		return nil, nil
	}
	d, ok := tensor.ParseDType(to)
	if !ok || tgt.gpu == nil {
		return nil, fault.New(fault.ErrArgument, "cast to %q: expected a dtype, and a GPU", to)
	}
	casts := make([]device.Cast, len(wants))
	for i := range wants {
		c := device.Cast{From: ix.Tensors[wants[i].Tensor].DType, To: d}
		if c.From != c.To && cuda.CanCast(c) {
			casts[i] = c
		}
	}
	return casts, nil
}

// landing is the bytes of a request where it lands.
func (l *Loading) landing(i int) int64 {
	n := l.wants[i].Bytes
	if l.casts != nil && l.casts[i].To != 0 {
		n = grown(n, l.casts[i])
	}
	return n
}

// grown is the bytes that so many bytes, of whole elements, have after a cast.
func grown(n int64, c device.Cast) int64 {
	return n / int64(c.From.Bits()/8) * int64(c.To.Bits()/8)
}

// late are the requests that cannot be cast chunk by chunk, because their chunks
// hold parts of rows, or of elements: they land beside their place first.
type late struct {
	l    *Loading
	dest []unsafe.Pointer
	mem  []device.Memory // by request; nil: none

	mu     sync.Mutex
	landed []int32
}

// plantCasts tells the jobs of a plan to cast, and where to.
func (l *Loading) plantCasts(p *plan.Plan, dest []unsafe.Pointer) (*late, error) {
	t := &late{l: l, dest: dest}
	if l.casts == nil {
		return t, nil
	}
	sizes := make([]int64, len(l.wants))
	var any bool
	for k, ref := range p.Refs {
		c, j := l.casts[ref.Want], &p.Jobs[k]
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
		mem, err := l.target.alloc(sizes)
		if err != nil {
			return nil, l.model.where("land", err)
		}
		t.mem = mem
	}
	for k, ref := range p.Refs {
		c, j := l.casts[ref.Want], &p.Jobs[k]
		if c.To == 0 {
			continue
		}
		at := int64(uintptr(j.Dst)) - int64(uintptr(dest[ref.Want]))
		if sizes[ref.Want] > 0 {
			j.Dst = unsafe.Add(t.mem[ref.Want].Ptr, at)
		} else {
			j.Dst, j.Cast = unsafe.Add(dest[ref.Want], grown(at, c)), c
		}
	}
	return t, nil
}

// or calls land for what is in its place, and keeps what is not.
func (t *late) or(land func(int32)) func(int32) {
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

// place is where a request lands, which is known by now.
func (t *late) place(i int32) unsafe.Pointer {
	if uintptr(t.dest[i]) == pending {
		return address(t.l.places.known[i].Load())
	}
	return t.dest[i]
}

// cast brings what landed beside its place there.
func (t *late) cast(ctx context.Context, queue *cuda.Queue, land func(int32)) error {
	for _, i := range t.landed {
		c := t.l.casts[i]
		dst := device.Memory{Ptr: t.place(i), Bytes: t.l.landing(int(i))}
		if err := queue.Cast(ctx, dst, t.mem[i], c.From, c.To); err != nil {
			x := &t.l.model.ix.Tensors[t.l.wants[i].Tensor]
			return &fault.At{Verb: "land", Source: t.l.model.ix.Sources[x.Source].URI, Tensor: x.Name, Chunk: -1, Offset: -1, Err: err}
		}
		t.mem[i].Release()
		t.mem[i] = device.Memory{}
		land(i)
	}
	return nil
}

// free gives up what was never cast.
func (t *late) free() { cpu.Release(t.mem) }
