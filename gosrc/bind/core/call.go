//go:build pyext

package main

/*
#include <stdlib.h>
#include "ow.h"
*/
import "C"

import "github.com/overwire/overwire/gosrc/bind/face"

//export ow_go_begin
func ow_go_begin(name *C.char, nameLen C.int64_t, text *C.char, textLen C.int64_t, out *C.uint64_t) *C.char {
	return guarded("call", func() error {
		h, err := face.Begin(C.GoStringN(name, C.int(nameLen)), C.GoStringN(text, C.int(textLen)))
		*out = C.uint64_t(h)
		return err
	})
}

//export ow_go_result
func ow_go_result(h C.uint64_t, text **C.char, n *C.int64_t) *C.char {
	return guarded("call", func() error {
		s, err := face.Result(uint64(h))
		if err == nil {
			*text, *n = C.CString(s), C.int64_t(len(s))
		}
		return err
	})
}

//export ow_go_abandon
func ow_go_abandon(h C.uint64_t) { face.Abandon(uint64(h)) }
