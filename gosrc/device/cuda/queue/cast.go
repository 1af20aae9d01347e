package queue

/*
#include "../../../../cuda/abi_move.h"
*/
import "C"

import (
	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/tensor"
)

var castable = map[tensor.DType]C.uint32_t{
	tensor.F32: C.OW_CAST_F32, tensor.BF16: C.OW_CAST_BF16, tensor.F16: C.OW_CAST_F16,
	tensor.F8E4M3: C.OW_CAST_E4M3, tensor.F8E5M2: C.OW_CAST_E5M2,
}

// CanCast reports whether there is a kernel for a cast.
func CanCast(c device.Cast) bool {
	_, from := castable[c.From]
	_, to := castable[c.To]
	return from && to && c.To.Bits() > 8
}
