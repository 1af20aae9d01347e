//go:build owfake

package stream

/*
#include "../../../../cuda/abi_stream.h"
void ow_lz4_decode_host(ow_batch_item *items, uint32_t n);
void ow_snappy_decode_host(ow_batch_item *items, uint32_t n);
void ow_cascaded_decode_host(ow_batch_item *items, uint32_t n);
void ow_stream_x16_host(const ow_stream_head *head, uint32_t n, uint32_t *status);
void ow_x16_encode_host(ow_batch_item *items, uint32_t n);
*/
import "C"

import "unsafe"

// A twinItem is an ow_batch_item for tests, which cannot use cgo.
type twinItem struct {
	src, srcLen, dst, dstCap, written uint64
	status, arg                       uint32
}

// Status bits of an item that a batch kernel rejects.
const (
	batchInput  = C.OW_BATCH_INPUT
	batchOffset = C.OW_BATCH_OFFSET
	batchRoom   = C.OW_BATCH_ROOM
	batchGain   = C.OW_BATCH_GAIN
	batchArg    = C.OW_BATCH_ARG
)

// runTwin runs the host twin of a batch kernel. Addresses are host addresses.
func runTwin(kernel string, items []twinItem) {
	p, n := (*C.ow_batch_item)(unsafe.Pointer(&items[0])), C.uint32_t(len(items))
	switch kernel {
	case "lz4":
		C.ow_lz4_decode_host(p, n)
	case "snappy":
		C.ow_snappy_decode_host(p, n)
	case "cascaded":
		C.ow_cascaded_decode_host(p, n)
	case "x16_encode":
		C.ow_x16_encode_host(p, n)
	default:
		panic(kernel)
	}
}

// runX16StreamTwin decodes a raw X16 block with `warps` warps and returns its status word.
func runX16StreamTwin(src uint64, stored int, dst uint64, size, warps int) uint32 {
	few := C.ow_stream_few{head: C.ow_stream_head{streams: 1, rows: 1, split: C.uint32_t(warps)}}
	few.streams[0] = C.ow_stream{
		src: C.uint64_t(src), stored: C.uint64_t(stored), dst: C.uint64_t(dst), size: C.uint64_t(size),
		chunk: C.uint64_t(max(size, 1)), rows: 1, kind: C.OW_STREAM_RAW, format: C.OW_STREAM_X16,
	}
	var status C.uint32_t
	C.ow_stream_x16_host(&few.head, C.uint32_t(warps), &status)
	return uint32(status)
}
