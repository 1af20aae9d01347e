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
	"github.com/overwire/overwire/gosrc/dlpack"
	"github.com/overwire/overwire/gosrc/nvcomp"
	"github.com/overwire/overwire/gosrc/tensor"
)

func buffersOf(in *C.struct_ow_buffer, n C.int64_t) ([]nvcomp.Buffer, error) {
	buffers := make([]nvcomp.Buffer, n)
	for i, v := range unsafe.Slice(in, n) {
		var err error
		if buffers[i], err = face.CodecBuffer(v.src, int64(v.bytes), v.own != 0, v.out, int64(v.room)); err != nil {
			return nil, err
		}
	}
	return buffers, nil
}

//export ow_go_codec
func ow_go_codec(spec *C.char, specLen C.int64_t, in *C.struct_ow_buffer, n C.int64_t, out *C.uint64_t) *C.char {
	return guarded("codec", func() error {
		buffers, err := buffersOf(in, n)
		if err != nil {
			return err
		}
		id, err := face.CodecStart(C.GoStringN(spec, C.int(specLen)), buffers)
		*out = C.uint64_t(id)
		return err
	})
}

//export ow_go_codec_now
func ow_go_codec_now(spec *C.char, specLen C.int64_t, in *C.struct_ow_buffer, n C.int64_t, items **C.struct_ow_coded, made *C.int64_t, done *C.int) *C.char {
	return guarded("codec", func() error {
		buffers, err := buffersOf(in, n)
		if err != nil {
			return err
		}
		coded, ok, err := face.CodecNow(C.GoStringN(spec, C.int(specLen)), buffers)
		if err != nil || !ok {
			return err
		}
		*done = 1
		return give(coded, items, made)
	})
}

//export ow_go_codec_take
func ow_go_codec_take(h C.uint64_t, items **C.struct_ow_coded, n *C.int64_t) *C.char {
	return guarded("codec", func() error {
		coded, err := face.CodecTake(uint64(h))
		if err != nil {
			return err
		}
		return give(coded, items, n)
	})
}

// give makes rows of results; all of them, or an error and nothing is left.
func give(coded []face.Coded, items **C.struct_ow_coded, n *C.int64_t) error {
	if len(coded) == 0 {
		return nil
	}
	p := (*C.struct_ow_coded)(C.calloc(C.size_t(len(coded)), C.sizeof_struct_ow_coded))
	out := unsafe.Slice(p, len(coded))
	for i, c := range coded {
		out[i].bytes = C.int64_t(c.Bytes)
		if c.Summed {
			out[i].summed = 1
		}
		if c.Error != "" {
			out[i].error = C.CString(c.Error)
		}
		if c.Mem.Block == nil {
			continue
		}
		t, shape := dlpack.Describe(tensor.U8, []int64{c.Mem.Bytes}, c.Mem.Bytes, true)
		m, err := dlpack.New(c.Mem, t, shape)
		if err != nil { // give up what is made and what is not
			for _, o := range out[:i+1] {
				if o.managed != nil {
					dlpack.Delete(o.managed)
				}
				C.free(unsafe.Pointer(o.error))
			}
			for _, c := range coded[i:] {
				c.Mem.Release()
			}
			C.free(unsafe.Pointer(p))
			return err
		}
		out[i].managed, out[i].data = m, c.Mem.Ptr
	}
	*items, *n = p, C.int64_t(len(coded))
	return nil
}
