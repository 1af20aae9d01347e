//go:build cgo

package dlpack

/*
#cgo CFLAGS: -std=gnu11 -Wall -Wextra
#include "managed.h"
*/
import "C"

import (
	"unsafe"

	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/fault"
)

// New returns a DLManagedTensor in C memory that describes mem and takes over
// its hold: from then on mem belongs to whoever calls the deleter. On an error
// the hold is still the caller's.
func New(mem device.Memory, t Type, shape []int64) (unsafe.Pointer, error) {
	m := C.ow_managed_new(mem.Ptr, C.int64_t(mem.Bytes), (*C.struct_ow_block)(unsafe.Pointer(mem.Block)),
		C.struct_ow_type{code: C.uint8_t(t.Code), bits: C.uint8_t(t.Bits), lanes: C.uint16_t(t.Lanes)},
		C.int32_t(len(shape)), (*C.int64_t)(unsafe.SliceData(shape)), C.int32_t(mem.CUDA))
	if m == nil {
		return nil, fault.New(fault.ErrMemory, "the description of a tensor")
	}
	return unsafe.Pointer(m), nil
}

// Delete does what the last consumer of a tensor does.
func Delete(managed unsafe.Pointer) { C.ow_managed_delete(managed) }
