package stream

/*
#include "../../../../cuda/abi_digest.h"
*/
import "C"

import (
	"math/bits"
	"unsafe"

	"github.com/overwire/overwire/gosrc/codec/digest"
	"github.com/overwire/overwire/gosrc/device/cuda/memory"
	"github.com/overwire/overwire/gosrc/errs"
)

const (
	digestSums = 16 // bytes of a tensor's sums
	digestJob  = int(unsafe.Sizeof(C.ow_digest_job{}))
	digestDim  = int(unsafe.Sizeof(C.ow_digest_dim{}))
	maxDigests = 1 << 24
)

// Digests computes digests of tensors on a device.
type Digests struct{ On *Resident }

// Digest computes the digests of tensors in device memory, after the work that is queued on the caller's stream and on
// those of `on.After`, and waits. It reads each byte once and does not copy tensors. The digests are keyed if key is
// not nil.
func (d Digests) Digest(on Order, views []digest.View, key *digest.Key) ([]digest.Sum, error) {
	if len(views) > maxDigests {
		return nil, errs.New(errs.ErrArgument, "cannot compute digests of more than %d tensors in one call", maxDigests)
	}
	sizes := make([]int64, len(views))
	var jobs []C.ow_digest_job
	var dims []C.ow_digest_dim
	var owner []int
	tiles := uint64(0)
	for i := range views {
		n, err := views[i].Bytes()
		if err != nil {
			return nil, err
		}
		if sizes[i] = n; n == 0 {
			continue
		}
		job := C.ow_digest_job{bytes: C.uint64_t(n), first: C.uint64_t(tiles), dims: C.uint32_t(len(dims))}
		dims = fillDigestShape(&job, views[i], dims)
		jobs, owner = append(jobs, job), append(owner, i)
		tiles += (uint64(n) + C.OW_DIGEST_TILE - 1) / C.OW_DIGEST_TILE
	}
	states := make([]digest.State, len(views))
	if len(jobs) > 0 {
		kernel, secret := residentDigest, []digest.Key(nil)
		if key != nil {
			kernel, secret = residentDigestKeyed, []digest.Key{*key}
		}
		sums := len(secret) * int(unsafe.Sizeof(*key))
		at := sums + digestSums*len(jobs)
		end := at + digestJob*len(jobs)
		warps := uint64(C.OW_DIGEST_THREADS / 32)
		err := d.On.run(on, residentLaunch{
			kernel: kernel, grid: int(min((tiles+warps-1)/warps, 1<<30)), block: C.OW_DIGEST_THREADS,
			blocks: C.OW_DIGEST_BLOCKS,
			bytes:  end + digestDim*len(dims), back: at - sums, backAt: sums,
			fill: func(table unsafe.Pointer, _ uint64) {
				memory.CopyTable(table, 0, secret)
				clear(unsafe.Slice((*byte)(table), at)[sums:])
				memory.CopyTable(table, at, jobs)
				memory.CopyTable(table, end, dims)
			},
			args: func(table uint64) []uint64 {
				return []uint64{table + uint64(at), uint64(len(jobs)), tiles, table + uint64(end), table + uint64(sums)}
			},
			take: func(answers unsafe.Pointer) {
				for k, s := range unsafe.Slice((*digest.State)(answers), len(jobs)) {
					states[owner[k]] = s
				}
			},
		})
		if err != nil {
			return nil, err
		}
	}
	out := make([]digest.Sum, len(views))
	for i := range out {
		out[i] = states[i].Sum(sizes[i])
	}
	return out, nil
}

// commonAlignment returns the largest power of two, at most 16, that divides all arguments.
func commonAlignment(all ...uint64) int64 {
	v := uint64(16)
	for _, a := range all {
		v |= a
	}
	return 1 << bits.TrailingZeros64(v)
}

// fillDigestShape sets how the kernel reads a tensor: as contiguous bytes, or by dimensions, which it appends to dims.
func fillDigestShape(job *C.ow_digest_job, v digest.View, dims []C.ow_digest_dim) []C.ow_digest_dim {
	view := v.Merged()
	job.src = C.uint64_t(view.Address)
	last := len(view.Shape) - 1
	if view.IsContiguous() {
		align := commonAlignment(view.Address)
		if align >= 8 {
			job.item = C.uint16_t(align)
			return dims
		}
		// Use elements as large as the address's alignment if that divides the number of bytes.
		view.Item = commonAlignment(uint64(align), uint64(view.Shape[0]))
		view.Shape[0], view.Strides[0] = view.Shape[0]/view.Item, view.Item
	} else {
		common := []uint64{view.Address, 8, uint64(view.Item)}
		for i, s := range view.Strides {
			if i < last || s != view.Item {
				common = append(common, uint64(s))
			}
		}
		switch align := commonAlignment(common...); {
		case align < view.Item: // read an element as a row of smaller elements
			view.Shape, view.Strides = append(view.Shape, view.Item/align), append(view.Strides, align)
			view.Item = align
		case view.Strides[last] == view.Item: // read a row as one larger element
			bytesOfRow := uint64(view.Shape[last] * view.Item)
			wide := commonAlignment(append(common[:1:1], append(common[3:], 8, bytesOfRow)...)...)
			view.Shape[last], view.Item, view.Strides[last] = view.Shape[last]*view.Item/wide, wide, wide
		}
	}
	job.rank, job.item = C.uint16_t(len(view.Shape)), C.uint16_t(view.Item)
	for i := range view.Shape {
		dims = append(dims, C.ow_digest_dim{size: C.uint64_t(view.Shape[i]), stride: C.int64_t(view.Strides[i])})
	}
	return dims
}
