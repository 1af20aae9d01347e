//go:build cgo

package cuda

/*
#include <stdlib.h>
#include "lane.h"
*/
import "C"

import (
	"runtime"
	"sync"
	"time"
	"unsafe"

	"github.com/overwire/overwire/cuda/built"
	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/fault"
	"github.com/overwire/overwire/gosrc/internal/spawn"
)

// The kernels in the order of their numbers: transforms 1 to 8 of X16, then
// what moves and casts.
const (
	kernelNames = "ow_x16_bf16\x00ow_x16_fp16\x00ow_x16_fp32\x00ow_x16_e4m3\x00ow_x16_e5m2\x00ow_x16_int8\x00" +
		"ow_x16_nibbles\x00ow_x16_bytes\x00ow_move_kernel\x00ow_cast_kernel\x00"
	kernelMove = 8
	kernels    = C.OWCU_KERNELS
)

// A Device is one GPU. There is one for each index in a process.
type Device struct {
	index  int
	number C.int // the driver's
	ctx    C.owcu_handle
	spare  chan pages // one of them: the host memory of a first queue, when touched

	making  sync.Mutex // of a queue
	freeing sync.Mutex // of blocks
	parting parting    // guarded by freeing
	burying sync.Mutex // of what is given back later
	load    sync.Mutex // of the module
	module  C.struct_owcu_module
	loaded  bool
	kernels [kernels]C.owcu_handle

	reading sync.Mutex // of stream
	stream  C.owcu_handle
	linking sync.Mutex    // of link
	link    C.owcu_handle // event

	mu      sync.Mutex
	idle    [2]*Queue       // by rank
	list    *unsafe.Pointer // device.Listed blocks that nobody holds; in C memory
	live    int             // blocks not yet freed
	kept    []span          // free memory for the next load
	touched time.Time       // when kept was last added to or taken from
	graves  []func() bool   // what is given back later
	users   []C.uint64_t    // streams that Used was told of
	reaping bool
	taken   bool // spare was

	batch batches
}

// firstRing is the pinned memory of a default queue; tests make it smaller.
var firstRing = DefaultSlots * stride(DefaultSlotBytes)

// Open gives the device with the given index. The first call makes its context,
// which takes some 0.2 s, unless torch has done so; the pinned memory of a first
// queue is made ready beside that.
func Open(index int) (*Device, error) {
	driver.mu.Lock()
	defer driver.mu.Unlock()
	if err := begin(); err != nil {
		return nil, err
	}
	if index < 0 || index >= driver.count {
		return nil, fault.New(fault.ErrDevice, "cuda:%d: there are %d CUDA devices", index, driver.count)
	}
	if d := driver.devices[index]; d != nil {
		return d, nil
	}
	list := (*unsafe.Pointer)(unsafe.Pointer(C.owcu_list_new()))
	if list == nil {
		return nil, fault.New(fault.ErrMemory, "the state of cuda:%d", index)
	}
	d := &Device{index: index, spare: make(chan pages, 1), list: list}
	spawn.Go("cuda ring", func() {
		p, _ := newPages(firstRing) // zero if there is none: Queue tries again
		d.spare <- p
	})
	var e C.struct_owcu_error
	if C.owcu_ctx_open(C.int(index), &d.number, &d.ctx, &e) != 0 {
		(<-d.spare).free()
		C.free(unsafe.Pointer(list))
		return nil, failure(index, &e)
	}
	if driver.devices == nil {
		driver.devices = map[int]*Device{}
	}
	driver.devices[index] = d
	return d, nil
}

// Shutdown gives back what all devices keep between loads. It is for the end of
// the process, before the driver's own exit handlers; the memory of tensors
// that somebody holds stays.
func Shutdown() { _ = Trim() }

// Trim gives back what the devices that were opened keep between loads, as
// Device.Trim does for one. It goes on after an error and returns the first.
func Trim() (err error) {
	driver.mu.Lock()
	defer driver.mu.Unlock()
	for _, d := range driver.devices {
		if e := d.Trim(); err == nil {
			err = e
		}
	}
	return err
}

// Index is the number of the device.
func (d *Device) Index() int { return d.index }

// Trim gives back what is kept between loads: the idle queue with its pinned
// memory and staging, and tensors' memory that has no holder any more. It waits
// for the work that uses that, and the driver may for more; memory whose users
// are captured into a graph stays until that is over.
func (d *Device) Trim() error {
	d.mu.Lock()
	idle := d.idle
	d.idle = [2]*Queue{}
	d.mu.Unlock()
	d.takeSpare().free()
	var err error
	for _, l := range idle {
		if l != nil {
			if e := l.destroy(); err == nil {
				err = e
			}
		}
	}
	if e := d.trimBatches(); err == nil {
		err = e
	}
	if e := d.giveBack(); err == nil {
		err = e
	}
	d.inter()
	return err
}

// takeSpare gives what Open made ready, to the first who asks, when it is ready.
func (d *Device) takeSpare() pages {
	d.mu.Lock()
	again := d.taken
	d.taken = true
	d.mu.Unlock()
	if again {
		return pages{}
	}
	return <-d.spare
}

// Free is how much memory of the device is unused, and how much there is.
func (d *Device) Free() (unused, total int64, err error) {
	var e C.struct_owcu_error
	var a, b C.uint64_t
	if C.owcu_memory(d.ctx, &a, &b, &e) != 0 {
		return 0, 0, failure(d.index, &e)
	}
	return int64(a), int64(b), nil
}

// Read copies device memory to dst, which is as long, and waits for it, but for
// no other work. It is for tests and small things: the copy is not pinned.
func (d *Device) Read(dst []byte, m device.Memory) error {
	if int64(len(dst)) != m.Bytes {
		return fault.New(fault.ErrArgument, "%d bytes of device memory into %d", m.Bytes, len(dst))
	}
	if len(dst) == 0 {
		return nil
	}
	var e C.struct_owcu_error
	d.reading.Lock()
	defer d.reading.Unlock()
	if C.owcu_read(d.ctx, &d.stream, unsafe.Pointer(&dst[0]), address(m.Ptr), C.uint64_t(len(dst)), &e) != 0 {
		return failure(d.index, &e)
	}
	return nil
}

// Current runs fn on a thread where the device's context is current, and whose
// calls harm no graph that another captures, for other libraries; what was there
// before comes back after it.
func (d *Device) Current(fn func() error) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var g C.struct_owcu_guard
	var e C.struct_owcu_error
	if C.owcu_enter(&g, d.ctx, &e) != 0 {
		return failure(d.index, &e)
	}
	defer C.owcu_leave(&g)
	return fn()
}

// functions loads the kernels, once.
func (d *Device) functions() (*[kernels]C.owcu_handle, error) {
	d.load.Lock()
	defer d.load.Unlock()
	if !d.loaded {
		names := []byte(kernelNames)
		var e C.struct_owcu_error
		if C.owcu_module_open(d.ctx, unsafe.Pointer(&built.X16[0]), C.uint64_t(len(built.X16)), (*C.char)(unsafe.Pointer(&names[0])),
			kernels, &d.module, &d.kernels[0], &e) != 0 {
			return nil, failure(d.index, &e)
		}
		d.loaded = true
	}
	return &d.kernels, nil
}

// close ends a device whose memory nobody holds any more; only tests do that.
func (d *Device) close() error {
	err := d.Trim()
	end := time.Now().Add(5 * time.Second)
	for d.mu.Lock(); d.reaping; d.mu.Lock() {
		live := d.live
		d.mu.Unlock()
		if time.Now().After(end) {
			return fault.New(fault.ErrEngine, "cuda:%d: %d blocks are still held", d.index, live)
		}
		time.Sleep(time.Millisecond)
	}
	d.mu.Unlock()
	for { // the reaper may have kept what it found last
		e := d.giveBack()
		d.inter()
		if e == nil {
			break
		}
		if err == nil {
			err = e
		}
	}
	for _, event := range append(d.parting.events, d.link) {
		for gone := event == nil; !gone; {
			var e C.struct_owcu_error
			gone = C.owcu_event(d.ctx, &event, &e) <= 0
		}
	}
	var e C.struct_owcu_error
	for C.owcu_stream_end(d.ctx, &d.stream, &e) > 0 {
	}
	for C.owcu_module_close(d.ctx, &d.module, &e) > 0 {
	}
	C.free(unsafe.Pointer(d.list))
	driver.mu.Lock()
	defer driver.mu.Unlock()
	delete(driver.devices, d.index)
	C.owcu_ctx_close(d.number, &e)
	if e.call != nil && err == nil {
		err = failure(d.index, &e)
	}
	return err
}

// address is a device pointer as the driver takes it.
func address(p unsafe.Pointer) C.owcu_ptr { return C.owcu_ptr(uintptr(p)) }

// pointer is the other way. Device addresses mean nothing to Go's collector.
func pointer(a C.owcu_ptr) unsafe.Pointer {
	p := uintptr(a)
	return *(*unsafe.Pointer)(unsafe.Pointer(&p))
}
