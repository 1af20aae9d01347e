//go:build cgo

package cuda

/*
#include "queue.h"
#include "../../../cuda/abi_move.h"
*/
import "C"

import (
	"context"
	"unsafe"

	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/tensor"
)

const kernelCast = 9

var castable = map[tensor.DType]C.uint32_t{
	tensor.F32: C.OW_CAST_F32, tensor.BF16: C.OW_CAST_BF16, tensor.F16: C.OW_CAST_F16,
	tensor.F8E4M3: C.OW_CAST_E4M3, tensor.F8E5M2: C.OW_CAST_E5M2,
}

// CanCast reports whether there is a kernel for a cast.
func CanCast(c device.Cast) bool {
	_, from := castable[c.From]
	_, to := castable[c.To]
	return from && to && c.To.Bits() > 8
}

// Cast converts the elements of src, of type from, to elements of type to at dst,
// on the device, and waits: floats of 32 and 16 bits into one another, and of 8
// bits into those. src and dst must not overlap.
func (q *Queue) Cast(ctx context.Context, dst, src device.Memory, from, to tensor.DType) error {
	cf, okf := castable[from]
	ct, okt := castable[to]
	if !okf || !okt || to.Bits() == 8 {
		return errs.New(errs.ErrNotSupported, "cast of %v to %v on a GPU", from, to)
	}
	n := src.Bytes / int64(from.Bits()/8)
	if n*int64(from.Bits()/8) != src.Bytes || n*int64(to.Bits()/8) != dst.Bytes {
		return errs.New(errs.ErrArgument, "cast of %d bytes of %v to %d bytes of %v", src.Bytes, from, dst.Bytes, to)
	}
	const step = 32 << 10 * C.OW_CAST_PART // elements that fit into the tables at once
	for at := int64(0); at < n; at += step {
		k := min(step, n-at)
		s, err := q.Get(ctx)
		if err != nil {
			return err
		}
		err = q.cast(s.(*Slot), C.ow_cast{
			src: C.uint64_t(uintptr(src.Ptr) + uintptr(at*int64(from.Bits()/8))),
			dst: C.uint64_t(uintptr(dst.Ptr) + uintptr(at*int64(to.Bits()/8))), n: C.uint64_t(k), from: cf, to: ct,
		})
		q.Put(s)
		if err != nil {
			return err
		}
	}
	return nil
}

func (q *Queue) cast(s *Slot, c C.ow_cast) error {
	n := int(c.n+C.OW_CAST_PART-1) / C.OW_CAST_PART
	parts := make([]C.ow_part, n)
	for i := range parts {
		parts[i].part = C.uint32_t(i)
	}
	head := int(unsafe.Sizeof(c))
	size := head + n*partSize
	base := unsafe.Add(s.host, -headBytes+statusBytes)
	dev := s.dev - headBytes + statusBytes
	put(base, 0, []C.ow_cast{c})
	put(base, head, parts)
	s.c.copies[0] = C.struct_owcu_copy{dst: C.owcu_ptr(dev), src: base, n: C.uint64_t(size)}
	s.c.launches[0] = C.struct_owcu_launch{kernel: kernelCast, n: C.uint32_t(n), a: C.owcu_ptr(dev), b: C.owcu_ptr(dev + uint64(head))}
	s.c.ncopies, s.c.nlaunches, s.c.stream, s.c.wait = 1, 1, 0, 1
	if q.inPlace {
		s.c.ncopies = 0 // dev is base
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.broken != nil {
		return q.broken
	}
	var e C.struct_owcu_error
	if C.owcu_submit(q.c, C.int(s.index), &e) != 0 {
		return q.fail(&e)
	}
	return nil
}
