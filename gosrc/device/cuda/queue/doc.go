// Package queue does a GPU's work for one load: it has pinned slots, staging of the same size on the device
// unless that is coherent, and streams. Stored chunks are copied in stored form and decoded to their destinations
// in the GPU's memory. Only package cuda makes a Pool.
//
// Everything is safe for concurrent use unless it says otherwise. Chunks are validated on the host before a
// kernel sees them, and the kernels are safe for any bytes: a corrupt chunk is an error of its task, and the
// context stays usable.
//
// A coherent device reads host memory as fast as a copy would. Its kernels read slots in place, and its queues
// have no staging. The slots are still pinned. Pinning costs milliseconds per process, and without it the system
// may repeatedly move pages that are in use to the device and back, or between nodes. Files are not mapped for
// the kernels to read: a file that is truncated meanwhile would end the context, and one that is written to would
// change after its checksum was compared.
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

// call returns the error of a C function.
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

// PauseBriefly waits some hundred nanoseconds, for goroutines that poll.
func PauseBriefly() { C.owcu_pause(16) }
