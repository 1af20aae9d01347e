package api

/*
#include <stdlib.h>
#include "result.h"
*/
import "C"

import (
	"unsafe"

	"github.com/overwire/overwire/gosrc/bind/binding"
	"github.com/overwire/overwire/gosrc/dlpack"
)

// given copies a result to C memory and returns its address, or 0 if there is none. After an
// error the result has been freed.
func given(r *binding.Result, err error) (uint64, error) {
	if r == nil || err != nil {
		return 0, err
	}
	to := (*C.struct_ow_result)(C.calloc(1, C.sizeof_struct_ow_result))
	if err := export(r.Tensors, r.Raw, to); err != nil {
		r.Drop()
		C.free(unsafe.Pointer(to))
		return 0, err
	}
	if r.Text != "" {
		to.text, to.text_len = C.CString(r.Text), C.int64_t(len(r.Text))
	}
	if len(r.Numbers) > 0 {
		to.numbers, to.count = (*C.int64_t)(C.CBytes(
			unsafe.Slice((*byte)(unsafe.Pointer(&r.Numbers[0])), 8*len(r.Numbers)))), C.int64_t(len(r.Numbers))
	}
	if r.Table != nil {
		to.table = (*C.char)(C.CBytes(binding.PackTable(r.Table)))
	}
	to.model = C.uint64_t(r.Model)
	return uint64(uintptr(unsafe.Pointer(to))), nil
}

func export(tensors []binding.Exported, raw bool, to *C.struct_ow_result) error {
	if len(tensors) == 0 {
		return nil
	}
	p := (*unsafe.Pointer)(C.calloc(C.size_t(len(tensors)), C.size_t(unsafe.Sizeof(uintptr(0)))))
	out := unsafe.Slice(p, len(tensors))
	batch, at := dlpack.NewBatch(len(tensors)), make([]int32, 0, len(tensors))
	for i := range tensors {
		if t := &tensors[i]; t.OK {
			kind, shape := dlpack.Describe(t.DType, t.Shape, t.Mem.Bytes, raw)
			batch.Add(t.Mem, kind, shape)
			at = append(at, int32(i))
		}
	}
	if err := batch.Make(func(n int, managed unsafe.Pointer) { out[at[n]] = managed }); err != nil {
		C.free(unsafe.Pointer(p))
		return err
	}
	to.managed, to.tensors = (*unsafe.Pointer)(p), C.int64_t(len(tensors))
	return nil
}
