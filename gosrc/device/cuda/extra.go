package cuda

/*
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

// CastAndWait converts the elements of src, of type from, to elements of type to at dst,
// on the device, and waits: floats of 32 and 16 bits into one another, and of 8
// bits into those. src, at a multiple of 16, and dst must not overlap.
func (q *Queue) CastAndWait(ctx context.Context, dst, src device.Memory, from, to tensor.DType) error {
	c := device.Cast{From: from, To: to}
	if !CanCast(c) {
		return errs.New(errs.ErrNotSupported, "cast of %v to %v on a GPU", from, to)
	}
	in, out := int64(from.Bits()/8), int64(to.Bits()/8)
	n := src.Bytes / in
	if n*in != src.Bytes || n*out != dst.Bytes {
		return errs.New(errs.ErrArgument, "cast of %d bytes of %v to %d bytes of %v", src.Bytes, from, dst.Bytes, to)
	}
	const step = 64 << 20 // elements that fit into the tables at once
	for at := int64(0); at < n; at += step {
		s, err := q.Get(ctx)
		if err != nil {
			return err
		}
		bytes := min(step, n-at) * in
		s.(*Slot).ViewDevice(uintptr(src.Ptr)+uintptr(at*in), bytes)
		task := device.DecodeTask{Chunk: tensor.Chunk{Codec: tensor.CodecRaw, Stored: uint32(bytes),
			Logical: uint32(bytes)},
			Dst: unsafe.Add(dst.Ptr, at*out), Cast: c}
		results := make(chan error, 1)
		if err := q.Submit(s, bytes, []device.DecodeTask{task}, func(_ int, err error) { results <- err }); err != nil {
			return err
		}
		if err := <-results; err != nil {
			return err
		}
	}
	return nil
}
