package stream

/*
#include "../driver/context.h"
*/
import "C"

import (
	"sync"
	"unsafe"

	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/device/cuda/driver"
	"github.com/overwire/overwire/gosrc/device/cuda/memory"
	"github.com/overwire/overwire/gosrc/errs"
)

// An Order defines where work is queued: on a stream, after the work that is now queued on other streams. Streams have
// DLPack's numbers: 1 is the legacy default stream, 2 the per-thread default stream, any other number is a handle, and
// 0 means 1.
type Order struct {
	Stream uintptr
	After  []uintptr
}

// Streams makes streams of a device wait for each other, and copies on them.
type Streams struct {
	ctx *driver.Context
	mem *memory.Memory
	c   C.owcu_handle // handle of ctx

	linking sync.Mutex    // guards link
	link    C.owcu_handle // event of MakeStreamWait
}

// New returns the Streams of a device. mem frees its streams.
func New(ctx *driver.Context, mem *memory.Memory) *Streams {
	return &Streams{ctx: ctx, mem: mem, c: C.owcu_handle(ctx.Handle())}
}

// call runs a C function and returns its error.
func (d *Streams) call(run func(e *C.struct_owcu_error) C.int) error {
	var e C.struct_owcu_error
	if run(&e) != 0 {
		return d.errorOf(&e)
	}
	return nil
}

func (d *Streams) errorOf(e *C.struct_owcu_error) error { return d.ctx.ErrorOf(unsafe.Pointer(e)) }

// Copy queues a copy of n bytes between any two addresses of the device or the host. If wait is set, it waits for
// the copy. If host memory is not pinned, it always waits.
func (d *Streams) Copy(on Order, dst, src uint64, n int64, wait bool) error {
	if n <= 0 {
		return nil
	}
	if err := d.MakeStreamWait(on.Stream, on.After...); err != nil {
		return err
	}
	return d.call(func(e *C.struct_owcu_error) C.int {
		return C.owcu_copy(d.c, C.uint64_t(on.Stream), C.owcu_ptr(dst), C.owcu_ptr(src), C.uint64_t(n), cBool(wait), e)
	})
}

// MakeStreamWait makes a stream wait for the work that is now queued on other streams.
func (d *Streams) MakeStreamWait(stream uintptr, after ...uintptr) error {
	if len(after) == 0 {
		return nil
	}
	others := make([]C.uint64_t, len(after))
	for i, s := range after {
		others[i] = C.uint64_t(s)
	}
	d.linking.Lock()
	defer d.linking.Unlock()
	return d.call(func(e *C.struct_owcu_error) C.int {
		return C.owcu_stream_follow(d.c, &d.link, C.uint64_t(stream), &others[0], C.uint64_t(len(others)), e)
	})
}

// NewStream makes a stream, which the caller must free with FreeStream.
func (d *Streams) NewStream() (uintptr, error) {
	var s C.uint64_t
	err := d.call(func(e *C.struct_owcu_error) C.int { return C.owcu_stream_new(d.c, &s, e) })
	return uintptr(s), err
}

// FreeStream frees a stream after its work has ended. It does not wait.
func (d *Streams) FreeStream(stream uintptr) error {
	return d.call(func(e *C.struct_owcu_error) C.int { return C.owcu_stream_free(d.c, C.uint64_t(stream), e) })
}

// SyncAndFreeStream waits for a stream's work and frees the stream, even on a lost device.
func (d *Streams) SyncAndFreeStream(stream uintptr) {
	for range 2 { // after an error, try again
		if d.SyncStream(stream) == nil {
			break
		}
	}
	d.mem.Release(driver.Stream, device.Pointer(stream))
}

// SyncStream waits for the work that is queued on a stream.
func (d *Streams) SyncStream(stream uintptr) error {
	return d.call(func(e *C.struct_owcu_error) C.int { return C.owcu_stream_sync(d.c, C.uint64_t(stream), e) })
}

// A Mark is a point in the work of a stream. The zero value has passed.
type Mark struct{ event C.owcu_handle }

// SetMark moves a mark to the end of the work that is now queued on a stream.
func (d *Streams) SetMark(m *Mark, stream uintptr) error {
	at, isCaptured := C.uint64_t(stream), false
	err := d.call(func(e *C.struct_owcu_error) C.int {
		rc := C.owcu_try_record_events(d.c, 1, &at, &m.event, e)
		isCaptured = rc > 0
		return min(0, rc)
	})
	if isCaptured {
		err = errs.New(errs.ErrNotSupported, "stream %#x is being captured into a graph", stream)
	}
	return err
}

// HasPassed reports whether all work before a mark has ended.
func (d *Streams) HasPassed(m *Mark) (passed bool, err error) {
	err = d.call(func(e *C.struct_owcu_error) C.int {
		rc := C.owcu_events_passed(d.c, 1, &m.event, e)
		passed = rc > 0
		return min(0, rc)
	})
	return passed, err
}

// FreeMark frees a mark, which is then the zero value.
func (d *Streams) FreeMark(m *Mark) {
	d.mem.Release(driver.Event, driver.Handle(m.event))
	*m = Mark{}
}

// CheckStream returns an error for a stream of another device. The default streams belong to every device.
func (d *Streams) CheckStream(stream uintptr) error {
	if stream <= 2 {
		return nil
	}
	var here C.int
	err := d.call(func(e *C.struct_owcu_error) C.int {
		return C.owcu_check_stream(d.c, C.uint64_t(stream), &here, e)
	})
	if err == nil && here == 0 {
		err = errs.New(errs.ErrArgument, "stream %#x does not belong to cuda:%d", stream, d.ctx.Index())
	}
	return err
}

// Close frees the event of MakeStreamWait. Only tests call it.
func (d *Streams) Close() {
	for !d.ctx.TryRelease(driver.Event, driver.Handle(d.link)) {
	}
}

func cBool(yes bool) C.int {
	if yes {
		return 1
	}
	return 0
}
