//go:build pyext

// Package main is the library that Python imports as overwire._core. Three of
// its files are written by `make gen` (core.go, core.c, core_go.h: the calls
// with simple arguments, bound by gopy); the others, by hand, do what gopy
// cannot or does slowly: waits that obey Ctrl-C, capsules, tables, lists.
//
// C calls Go, never Go C here: the functions below return a text of malloc on
// an error, else NULL, and put their results where C asks. They run without
// the GIL.
package main

/*
#include <stdlib.h>
#include "ow.h"
*/
import "C"

import (
	"time"
	"unsafe"

	"github.com/overwire/overwire/gosrc/bind/face"
	"github.com/overwire/overwire/gosrc/dlpack"
	"github.com/overwire/overwire/gosrc/load"
	"github.com/overwire/overwire/gosrc/save"
)

// guarded runs one exported function under face.Call.
func guarded(name string, fn func() error) *C.char {
	_, err := face.Call(name, func() (struct{}, error) { return struct{}{}, fn() })
	if err != nil {
		return C.CString(err.Error())
	}
	return nil
}

//export ow_go_wait
func ow_go_wait(h C.uint64_t, ns C.int64_t, done *C.int) *C.char {
	return guarded("wait", func() error {
		ended, err := face.Wait(uint64(h), time.Duration(ns))
		if ended {
			*done = 1
		}
		return err
	})
}

// batch bounds what one job_next returns: enough to make the call cheap,
// little enough to let the caller work while the rest arrives.
const batch = 1024

//export ow_go_next
func ow_go_next(h C.uint64_t, ns C.int64_t, raw C.int, items **C.struct_ow_item, n *C.int64_t, over *C.int) *C.char {
	return guarded("next", func() error {
		landed, ended, err := face.Next(uint64(h), batch, time.Duration(ns))
		if ended {
			*over = 1
		}
		if err != nil {
			return err
		}
		return handOut(landed, raw != 0, items, n)
	})
}

//export ow_go_take
func ow_go_take(h C.uint64_t, raw C.int, items **C.struct_ow_item, n *C.int64_t) *C.char {
	return guarded("take", func() error {
		landed, err := face.TakeAll(uint64(h))
		if err != nil {
			return err
		}
		return handOut(landed, raw != 0, items, n)
	})
}

// handOut turns landed tensors into an array of items for C, which owns it.
func handOut(landed []face.Landed, raw bool, items **C.struct_ow_item, n *C.int64_t) error {
	if len(landed) == 0 {
		return nil
	}
	p := (*C.struct_ow_item)(C.calloc(C.size_t(len(landed)), C.sizeof_struct_ow_item))
	out := unsafe.Slice(p, len(landed))
	batch, numbers := dlpack.NewBatch(len(landed)), make([]int32, 0, len(landed))
	for i := range landed {
		l := &landed[i]
		out[i].at = C.int64_t(l.At)
		if !l.OK {
			continue
		}
		t, shape := dlpack.Describe(l.DType, l.Shape, l.Mem.Bytes, raw)
		batch.Add(l.Mem, t, shape)
		numbers = append(numbers, int32(i))
	}
	err := batch.Make(func(at int, managed unsafe.Pointer) {
		i := numbers[at]
		out[i].managed, out[i].data = managed, landed[i].Mem.Ptr
	})
	if err != nil { // give up what was to be handed out
		for _, l := range landed {
			if l.OK {
				l.Mem.Release()
			}
		}
		C.free(unsafe.Pointer(p))
		return err
	}
	*items, *n = p, C.int64_t(len(landed))
	return nil
}

//export ow_go_table
func ow_go_table(h C.uint64_t, buffer **C.char) *C.char {
	return guarded("table", func() error {
		ix, err := face.Index(uint64(h))
		if err != nil {
			return err
		}
		*buffer = (*C.char)(C.CBytes(face.PackTable(ix)))
		return nil
	})
}

//export ow_go_load
func ow_go_load(h C.uint64_t, packed *C.char, bytes C.int64_t, options *C.char, n C.int64_t, out *C.uint64_t) *C.char {
	return guarded("load", func() error {
		var reqs []load.Request // nil: every tensor, whole
		if bytes >= 0 {
			var err error
			// A load starts with the numbers copied: the bytes are Python's.
			if reqs, err = face.Requests(unsafe.Slice((*byte)(unsafe.Pointer(packed)), bytes)); err != nil {
				return err
			}
		}
		id, err := face.LoadStart(uint64(h), reqs, C.GoStringN(options, C.int(n)))
		*out = C.uint64_t(id)
		return err
	})
}

//export ow_go_save
func ow_go_save(spec *C.char, specLen C.int64_t, in *C.struct_ow_input, n C.int64_t, out *C.uint64_t) *C.char {
	return guarded("save", func() error {
		inputs := make([]save.Input, n)
		for i, v := range unsafe.Slice(in, n) {
			var err error
			name, dtype := C.GoStringN(v.name, C.int(v.name_len)), C.GoStringN(v.dtype, C.int(v.dtype_len))
			shape := unsafe.Slice((*int64)(unsafe.Pointer(v.shape)), v.ndim)
			if inputs[i], err = face.Input(name, dtype, shape, v.data, int64(v.bytes)); err != nil {
				return err
			}
		}
		id, err := face.SaveStart(C.GoStringN(spec, C.int(specLen)), inputs)
		*out = C.uint64_t(id)
		return err
	})
}
