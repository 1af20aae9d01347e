//go:build cgo && owfake

package cuda

/*
#include "../../../cuda/abi_batch.h"
void ow_lz4_decode_host(ow_batch_item *items, uint32_t n);
void ow_snappy_decode_host(ow_batch_item *items, uint32_t n);
void ow_cascaded_decode_host(ow_batch_item *items, uint32_t n);
void ow_x16_decode_batch_host(ow_batch_item *items, uint32_t n);
void ow_x16_encode_host(ow_batch_item *items, uint32_t n);
*/
import "C"

import "unsafe"

// A twinItem is an ow_batch_item for tests, which cannot see C.
type twinItem struct {
	src, srcLen, dst, dstCap, written uint64
	status, arg                       uint32
}

// What a batch kernel says of an item that it refuses.
const (
	batchInput  = C.OW_BATCH_INPUT
	batchOffset = C.OW_BATCH_OFFSET
	batchRoom   = C.OW_BATCH_ROOM
	batchGain   = C.OW_BATCH_GAIN
	batchArg    = C.OW_BATCH_ARG
)

// runTwin runs a batch kernel's host twin; addresses are host addresses.
func runTwin(kernel string, items []twinItem) {
	p, n := (*C.ow_batch_item)(unsafe.Pointer(&items[0])), C.uint32_t(len(items))
	switch kernel {
	case "lz4":
		C.ow_lz4_decode_host(p, n)
	case "snappy":
		C.ow_snappy_decode_host(p, n)
	case "cascaded":
		C.ow_cascaded_decode_host(p, n)
	case "x16_decode_batch":
		C.ow_x16_decode_batch_host(p, n)
	case "x16_encode":
		C.ow_x16_encode_host(p, n)
	default:
		panic(kernel)
	}
}
