package cuda

/*
#include "batch.h"
*/
import "C"

import "github.com/overwire/overwire/gosrc/errs"

// Copy queues a copy of n bytes between any two addresses of the device or the
// host; with wait it returns when the copy is done. It waits for host memory that
// is not pinned in any case.
func (d *Device) Copy(on Order, dst, src uint64, n int64, wait bool) error {
	if n <= 0 {
		return nil
	}
	if err := d.MakeStreamWait(on.Stream, on.After...); err != nil {
		return err
	}
	return d.call(func(e *C.struct_owcu_error) C.int {
		return C.owcu_copy(d.ctx, C.uint64_t(on.Stream), C.owcu_ptr(dst), C.owcu_ptr(src), C.uint64_t(n), cBool(wait),
			e)
	})
}

// MakeStreamWait makes a stream wait for what is queued on others now.
func (d *Device) MakeStreamWait(stream uintptr, after ...uintptr) error {
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
		return C.owcu_stream_follow(d.ctx, &d.link, C.uint64_t(stream), &others[0], C.uint64_t(len(others)), e)
	})
}

// NewStream makes a stream, to be freed with FreeStream.
func (d *Device) NewStream() (uintptr, error) {
	var s C.uint64_t
	err := d.call(func(e *C.struct_owcu_error) C.int { return C.owcu_stream_new(d.ctx, &s, e) })
	return uintptr(s), err
}

// FreeStream frees a stream once its work is done, without waiting for that.
func (d *Device) FreeStream(stream uintptr) error {
	return d.call(func(e *C.struct_owcu_error) C.int { return C.owcu_stream_free(d.ctx, C.uint64_t(stream), e) })
}

// SyncAndFreeStream waits for a stream's work and frees it. On a lost device it is simply
// dropped.
func (d *Device) SyncAndFreeStream(stream uintptr) {
	for range 2 { // a call that fails once may not fail again
		if d.SyncStream(stream) == nil {
			break
		}
	}
	d.freeOrDefer(C.OWCU_STREAM, devicePointer(C.owcu_ptr(stream)))
}

// SyncStream waits for what is queued on a stream.
func (d *Device) SyncStream(stream uintptr) error {
	return d.call(func(e *C.struct_owcu_error) C.int { return C.owcu_stream_sync(d.ctx, C.uint64_t(stream), e) })
}

// CheckStream refuses a stream of another device. The special ones belong to every
// device.
func (d *Device) CheckStream(stream uintptr) error {
	if stream <= 2 {
		return nil
	}
	var here C.int
	err := d.call(func(e *C.struct_owcu_error) C.int {
		return C.owcu_check_stream(d.ctx, C.uint64_t(stream), &here, e)
	})
	if err == nil && here == 0 {
		err = errs.New(errs.ErrArgument, "the stream %#x is not one of cuda:%d", stream, d.index)
	}
	return err
}

func cBool(yes bool) C.int {
	if yes {
		return 1
	}
	return 0
}
