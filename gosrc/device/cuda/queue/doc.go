// Package queue does the work of one load on a GPU. A queue has pinned slots, streams and, unless the device is
// coherent, staging memory of the same size on the device. Chunks are copied in stored form and then decoded to their
// destinations in device memory. Only package cuda creates Pools.
//
// All functions are safe for concurrent use unless documented otherwise. Chunks are validated on the host before a
// kernel reads them, and kernels are safe for any bytes. A corrupt chunk fails only its own task, and the context stays
// usable.
//
// A coherent device reads host memory as fast as it could be copied. Its kernels read slots in place, and its queues
// have no staging memory. The slots are still pinned, which takes milliseconds per process. If they were not, the
// system might repeatedly migrate pages in use to the device and back, or between NUMA nodes. Kernels do not read
// mapped files: truncating the file would destroy the context, and writing to it would change bytes after their
// checksum was compared.
package queue

/*
#cgo CFLAGS: -std=gnu11 -Wall -Wextra -O2
#include "queue.h"
*/
import "C"

import (
	"unsafe"

	"github.com/overwire/overwire/gosrc/device/cuda/driver"
)

// call runs a C function and returns its error.
func call(ctx *driver.Context, run func(e *C.struct_owcu_error) C.int) error {
	var e C.struct_owcu_error
	if run(&e) != 0 {
		return ctx.ErrorOf(unsafe.Pointer(&e))
	}
	return nil
}

func cBool(yes bool) C.int {
	if yes {
		return 1
	}
	return 0
}

// PauseBriefly waits several hundred nanoseconds. It is for goroutines that poll.
func PauseBriefly() { C.owcu_pause(16) }
