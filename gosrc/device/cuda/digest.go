package cuda

/*
#include "../../../cuda/abi_digest.h"
*/
import "C"

import (
	"math/bits"
	"unsafe"

	"github.com/overwire/overwire/gosrc/codec/digest"
	"github.com/overwire/overwire/gosrc/errs"
)

const (
	digestSums = 16 // bytes of a tensor's sums
	digestJob  = int(unsafe.Sizeof(C.ow_digest_job{}))
	digestDim  = int(unsafe.Sizeof(C.ow_digest_dim{}))
	maxDigests = 1 << 24
)

// Digest computes the digests of tensors in the device's memory, after what is queued on
// the caller's stream and on those of `on.After`, and waits. It reads each byte once and
// copies no tensor.
func (d *Device) Digest(on Order, views []digest.View) ([]digest.Sum, error) {
	if len(views) > maxDigests {
		return nil, errs.New(errs.ErrArgument, "the digests of more than %d tensors", maxDigests)
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
		j := C.ow_digest_job{bytes: C.uint64_t(n), first: C.uint64_t(tiles), dims: C.uint32_t(len(dims))}
		dims = fillDigestShape(&j, views[i], dims)
		jobs, owner = append(jobs, j), append(owner, i)
		tiles += (uint64(n) + C.OW_DIGEST_TILE - 1) / C.OW_DIGEST_TILE
	}
	states := make([]digest.State, len(views))
	if len(jobs) > 0 {
		at, end := digestSums*len(jobs), digestSums*len(jobs)+digestJob*len(jobs)
		warps := uint64(C.OW_DIGEST_THREADS / 32)
		err := d.runResident(on, residentLaunch{
			kernel: residentDigest, grid: int(min((tiles+warps-1)/warps, 1<<30)), block: C.OW_DIGEST_THREADS,
			blocks: C.OW_DIGEST_BLOCKS,
			bytes:  end + digestDim*len(dims), back: at,
			fill: func(table unsafe.Pointer, _ uint64) {
				clear(unsafe.Slice((*byte)(table), at))
				copyTable(table, at, jobs)
				copyTable(table, end, dims)
			},
			args: func(table uint64) []uint64 {
				return []uint64{table + uint64(at), uint64(len(jobs)), tiles, table + uint64(end), table}
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

// commonAlignment is the largest power of two, up to 16, that divides all of its arguments.
func commonAlignment(all ...uint64) int64 {
	v := uint64(16)
	for _, a := range all {
		v |= a
	}
	return 1 << bits.TrailingZeros64(v)
}

// fillDigestShape fills in how the kernel reads a tensor: as bytes in order, or by
// dimensions, which it appends.
func fillDigestShape(j *C.ow_digest_job, v digest.View, dims []C.ow_digest_dim) []C.ow_digest_dim {
	m := v.Merged()
	j.src = C.uint64_t(m.Address)
	last := len(m.Shape) - 1
	if m.IsContiguous() {
		align := commonAlignment(m.Address)
		if align >= 8 {
			j.item = C.uint16_t(align)
			return dims
		}
		// Elements of the address's alignment: as many bytes as that divides.
		m.Item = commonAlignment(uint64(align), uint64(m.Shape[0]))
		m.Shape[0], m.Strides[0] = m.Shape[0]/m.Item, m.Item
	} else {
		common := []uint64{m.Address, 8, uint64(m.Item)}
		for i, s := range m.Strides {
			if i < last || s != m.Item {
				common = append(common, uint64(s))
			}
		}
		switch align := commonAlignment(common...); {
		case align < m.Item: // an element is a row of smaller ones
			m.Shape, m.Strides = append(m.Shape, m.Item/align), append(m.Strides, align)
			m.Item = align
		case m.Strides[last] == m.Item: // a row is one of larger ones
			wide := commonAlignment(append(common[:1:1], append(common[3:], 8, uint64(m.Shape[last]*m.Item))...)...)
			m.Shape[last], m.Item, m.Strides[last] = m.Shape[last]*m.Item/wide, wide, wide
		}
	}
	j.rank, j.item = C.uint16_t(len(m.Shape)), C.uint16_t(m.Item)
	for i := range m.Shape {
		dims = append(dims, C.ow_digest_dim{size: C.uint64_t(m.Shape[i]), stride: C.int64_t(m.Strides[i])})
	}
	return dims
}
