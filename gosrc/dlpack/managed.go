package dlpack

/*
#cgo CFLAGS: -std=gnu11 -Wall -Wextra
#include "managed.h"
*/
import "C"

import (
	"unsafe"

	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/errs"
)

// A Batch creates DLManagedTensors in C memory. Each describes a tensor and takes over the tensor's reference,
// which the deleter releases. One C call creates all of them, because the overhead of one call per tensor would
// be as large as the work itself.
type Batch struct {
	all  []C.struct_ow_wanted
	dims []int64
}

// NewBatch returns a batch with space for n tensors.
func NewBatch(n int) *Batch {
	return &Batch{make([]C.struct_ow_wanted, 0, n), make([]int64, 0, 2*n)}
}

// Add adds a tensor, for which Make will create a DLManagedTensor.
func (b *Batch) Add(mem device.Memory, t Type, shape []int64) {
	b.all = append(b.all, C.struct_ow_wanted{
		data: C.uint64_t(uintptr(mem.Ptr)), block: C.uint64_t(uintptr(unsafe.Pointer(mem.Block))),
		bytes: C.int64_t(mem.Bytes),
		_type: C.struct_ow_type{code: C.uint8_t(t.Code), bits: C.uint8_t(t.Bits), lanes: C.uint16_t(t.Lanes)},
		ndim:  C.int32_t(len(shape)), cuda: C.int32_t(mem.CUDA),
	})
	b.dims = append(b.dims, shape...)
}

// Make calls fn with each DLManagedTensor, in order. If Make fails, it frees all of
// them, and the caller still owns all references.
func (b *Batch) Make(fn func(i int, managed unsafe.Pointer)) error {
	count := int(C.ow_managed_many(unsafe.SliceData(b.all), C.int64_t(len(b.all)),
		(*C.int64_t)(unsafe.SliceData(b.dims))))
	if count < len(b.all) {
		for _, w := range b.all[:count] {
			C.ow_managed_forget(w.managed)
		}
		return errs.New(errs.ErrMemory, "cannot allocate DLPack structures for %d tensors", len(b.all))
	}
	for i := range b.all {
		fn(i, *(*unsafe.Pointer)(unsafe.Pointer(&b.all[i].managed)))
	}
	return nil
}

// Delete calls the deleter, as the last consumer of a tensor does.
func Delete(managed unsafe.Pointer) { C.ow_managed_delete(managed) }
