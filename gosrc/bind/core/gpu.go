//go:build pyext

package main

/*
#include <stdlib.h>
#include "ow.h"
*/
import "C"

import (
	"unsafe"

	"github.com/overwire/overwire/gosrc/bind/face"
	"github.com/overwire/overwire/gosrc/device/cuda"
	"github.com/overwire/overwire/gosrc/dlpack"
	"github.com/overwire/overwire/gosrc/tensor"
)

func queueOf(stream C.uint64_t, after unsafe.Pointer, n C.int64_t) cuda.Order {
	q := cuda.Order{Stream: uintptr(stream)}
	if n > 0 {
		q.After = unsafe.Slice((*uintptr)(after), n)
	}
	return q
}

func numbers(p unsafe.Pointer, n C.int64_t) []int64 {
	if n == 0 {
		return nil
	}
	return unsafe.Slice((*int64)(p), n)
}

//export ow_go_gpu_decode
func ow_go_gpu_decode(device C.int, stream C.uint64_t, after unsafe.Pointer, nafter C.int64_t, kind C.int, name *C.char, nameLen C.int64_t,
	packed unsafe.Pointer, n C.int64_t, batch *C.uint64_t) *C.char {
	return guarded("decode", func() error {
		h, err := face.GPUDecode(int(device), queueOf(stream, after, nafter), int(kind), C.GoStringN(name, C.int(nameLen)), numbers(packed, n))
		*batch = C.uint64_t(h)
		return err
	})
}

//export ow_go_gpu_peek
func ow_go_gpu_peek(device C.int, stream C.uint64_t, after unsafe.Pointer, nafter C.int64_t, kind C.int, name *C.char, nameLen C.int64_t,
	packed unsafe.Pointer, n C.int64_t, told **C.struct_ow_told, count *C.int64_t) *C.char {
	return guarded("decode", func() error {
		all, err := face.GPUPeek(int(device), queueOf(stream, after, nafter), int(kind), C.GoStringN(name, C.int(nameLen)), numbers(packed, n))
		if err != nil || len(all) == 0 {
			return err
		}
		p := (*C.struct_ow_told)(C.calloc(C.size_t(len(all)), C.sizeof_struct_ow_told))
		out := unsafe.Slice(p, len(all))
		for i, g := range all {
			out[i].size, out[i].chunk = C.int64_t(g.Size), C.int64_t(g.Chunk)
			if g.Err != nil {
				out[i].error = C.CString(face.Text(g.Err))
			} else {
				out[i].algorithm = C.CString(g.Algorithm)
			}
		}
		*told, *count = p, C.int64_t(len(all))
		return nil
	})
}

//export ow_go_gpu_encode
func ow_go_gpu_encode(device C.int, stream C.uint64_t, after unsafe.Pointer, nafter C.int64_t, kind C.int, packed unsafe.Pointer, n C.int64_t,
	scratch C.uint64_t, room C.int64_t, batch *C.uint64_t) *C.char {
	return guarded("encode", func() error {
		h, err := face.GPUEncode(int(device), queueOf(stream, after, nafter), int(kind), numbers(packed, n), uint64(scratch), int64(room))
		*batch = C.uint64_t(h)
		return err
	})
}

//export ow_go_gpu_wait
func ow_go_gpu_wait(batch C.uint64_t, wait C.int, done *C.int, texts ***C.char, sizes **C.int64_t, n *C.int64_t) *C.char {
	return guarded("decode", func() error {
		all, made, ok, err := face.GPUWait(uint64(batch), wait != 0)
		if err != nil || !ok {
			return err
		}
		*done = 1
		if len(all) == 0 {
			return nil
		}
		p := (**C.char)(C.calloc(C.size_t(len(all)), C.size_t(unsafe.Sizeof(uintptr(0)))))
		for i, t := range all {
			if t != "" {
				unsafe.Slice(p, len(all))[i] = C.CString(t)
			}
		}
		*texts, *n = p, C.int64_t(len(all))
		if len(made) == len(all) {
			*sizes = (*C.int64_t)(C.calloc(C.size_t(len(all)), 8))
			for i, size := range made {
				unsafe.Slice(*sizes, len(all))[i] = C.int64_t(size)
			}
		}
		return nil
	})
}

//export ow_go_gpu_alloc
func ow_go_gpu_alloc(device C.int, n C.int64_t, managed, data *unsafe.Pointer) *C.char {
	return guarded("alloc", func() error {
		mem, err := face.GPUAlloc(int(device), int64(n))
		if err != nil {
			return err
		}
		t, shape := dlpack.Describe(tensor.U8, []int64{mem.Bytes}, mem.Bytes, true)
		m, err := dlpack.New(mem, t, shape)
		if err != nil {
			mem.Release()
			return err
		}
		*managed, *data = m, mem.Ptr
		return nil
	})
}

//export ow_go_gpu_copy
func ow_go_gpu_copy(device C.int, stream C.uint64_t, after unsafe.Pointer, nafter C.int64_t, dst, src C.uint64_t, n C.int64_t, wait C.int) *C.char {
	return guarded("copy", func() error {
		return face.GPUCopy(int(device), queueOf(stream, after, nafter), uint64(dst), uint64(src), int64(n), wait != 0)
	})
}
