//go:build owfake

package cudatest

/*
#cgo CFLAGS: -std=gnu11 -Wall -Wextra -O2
#include "fake.h"
*/
import "C" // also compiles fake.c and twins.cc

import (
	"strings"
	"unsafe"
)

// Lets tests control the fake driver, which driver.UseFake installs.

// A State counts the resources that users of the driver hold. Broken is counted since UseFake.
type State struct {
	// Currently in use.
	Blocks, Bytes, Pins, Streams, Events, Modules, Contexts, Attached int64

	Pending int64  // operations that have not ended
	Relaxed int64  // threads that are still in the relaxed capture mode
	Broken  int64  // broken rules
	What    string // the first broken rule
}

// HasLeaks reports whether a resource was not freed.
func (s State) HasLeaks() bool {
	return s.Blocks+s.Bytes+s.Pins+s.Streams+s.Events+s.Modules+s.Contexts+s.Pending+s.Relaxed+s.Attached != 0
}

func readCounters() (s C.struct_owcu_fake_state) {
	C.owcu_fake_get(&s)
	return s
}

// ReadState returns the driver's state.
func ReadState() State {
	s := readCounters()
	return State{
		Blocks: int64(s.blocks), Bytes: int64(s.bytes), Pins: int64(s.pins),
		Streams: int64(s.streams), Events: int64(s.events), Modules: int64(s.modules),
		Contexts: int64(s.contexts), Attached: int64(s.attached),
		Pending: int64(s.pending), Relaxed: int64(s.relaxed), Broken: int64(s.broken), What: C.GoString(&s.what[0]),
	}
}

// FailCall makes the nth driver call from now fail with a code. If sticky is set, all later calls also fail. If nth is
// 0, no call fails.
func FailCall(nth int64, code int, sticky bool) {
	C.owcu_fake_fail(C.int64_t(nth), C.int(code), cBool(sticky))
}

// RefuseContext lets the driver refuse the next requests for the current context. Queued work continues.
func RefuseContext(times int) { C.owcu_fake_refuse_context(C.int(times)) }

// LoseDevice simulates a lost device: every later call fails with code.
func LoseDevice(code int) { C.owcu_fake_fail(1, C.int(code), 2) }

// TakeHistory returns the names, such as "mem_alloc", of the driver calls since the last TakeHistory, up to several
// thousand.
func TakeHistory() []string {
	text := make([]C.char, 64<<10)
	C.owcu_fake_history(&text[0], C.size_t(len(text)), 1)
	return strings.Fields(strings.ReplaceAll("\n"+C.GoString(&text[0]), "\nf_", "\n"))
}

// CountCalls returns the number of calls since UseFake.
func CountCalls() int64 { return int64(readCounters().calls) }

// BytesReadInPlace returns how many stored bytes kernels have read in pinned memory since UseFake. cuda:1 is coherent,
// and cuda:0 is not.
func BytesReadInPlace() int64 { return int64(readCounters().in_place) }

// OccupyStream queues work on a stream that does not end before idle is called. CountWaits counts the calls that wait
// for that work.
func OccupyStream(stream uintptr) (idle func()) {
	C.owcu_fake_busy(C.uint64_t(stream))
	return func() { C.owcu_fake_idle() }
}

// CountWaits returns the number of calls since UseFake that waited, or could have waited, for work of OccupyStream.
func CountWaits() int64 { return int64(readCounters().waited) }

// CaptureStream begins a graph capture in the global mode on a stream, or on a stream of another library (0). Calls
// that would destroy the capture break a rule. blocking means that the default stream waits for the captured stream.
func CaptureStream(stream uintptr, blocking bool) (end func()) {
	C.owcu_fake_capture(C.uint64_t(stream), cBool(blocking), 1)
	return func() { C.owcu_fake_capture(C.uint64_t(stream), cBool(blocking), 0) }
}

// QueueFill queues a fill of device memory on another user's stream.
func QueueFill(at unsafe.Pointer, n int64, v byte, stream uintptr) {
	C.owcu_fake_fill(C.owcu_ptr(uintptr(at)), C.int(v), C.uint64_t(n), C.uint64_t(stream))
}

// IsChildRefused reports whether a forked child that uses the driver gets an error before any driver call.
func IsChildRefused(ctx unsafe.Pointer) bool { return C.owcu_fake_fork(C.owcu_handle(ctx)) == 0 }

func cBool(yes bool) C.int {
	if yes {
		return 1
	}
	return 0
}
