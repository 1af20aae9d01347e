package cuda

/*
#cgo CFLAGS: -std=gnu11 -Wall -Wextra -O2
#include <stdlib.h>
#include "queue.h"
*/
import "C"

import (
	"runtime"
	"strings"
	"sync"
	"time"
	"unsafe"

	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/device/cuda/driver"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/nodes"
	"github.com/overwire/overwire/gosrc/internal/spawn"
)

// The kernels in the order of their numbers: transforms 1 to 8 of X16, then moves,
// casts and checksums.
const (
	kernelNames = "ow_x16_bf16\x00ow_x16_fp16\x00ow_x16_fp32\x00ow_x16_e4m3\x00ow_x16_e5m2\x00ow_x16_int8\x00" +
		"ow_x16_nibbles\x00ow_x16_bytes\x00ow_move_kernel\x00ow_cast_kernel\x00ow_crc\x00"
	kernelMove = 8
	kernelCRC  = 10
)

// A Device is one GPU. There is one for each index in a process.
type Device struct {
	index    int
	near     *nodes.Place // nil: the host has one node, or it is not known which is near
	coherent bool         // it reads the host's memory by the host's own page tables
	sms      int          // its multiprocessors
	number   C.int        // the driver's
	ctx      C.owcu_handle
	spare    chan hugePages // pinned memory for a first queue, made ready by Open

	making    sync.Mutex  // of a queue
	freeing   sync.Mutex  // of blocks
	pending   pendingFree // guarded by freeing
	deferring sync.Mutex  // guards what deferFree frees
	loading   sync.Mutex  // of modules, and of kernels in them
	module    *C.struct_owcu_module
	kernels   []C.owcu_handle // nil: not yet looked up

	reading sync.Mutex // of stream
	stream  C.owcu_handle
	linking sync.Mutex    // of link
	link    C.owcu_handle // event

	mu       sync.Mutex
	idle     [2]*Queue       // by idleIndexFor
	list     *unsafe.Pointer // device.Listed blocks without a holder; in C memory
	live     int             // blocks not yet freed
	kept     []keptBlock     // free memory for the next load
	touched  time.Time       // when kept was last added to or taken from
	deferred []func() bool   // what deferFree frees later
	users    []C.uint64_t    // streams passed to NoteStream
	reaping  bool
	taken    bool // spare was taken

	batch    batchPool
	resident residentModule
}

// opened are the devices of the process, by index.
var opened struct {
	mu      sync.Mutex
	devices map[int]*Device
}

// firstRing is the most pinned memory of a first queue; tests make it smaller.
var firstRing = dividedSlots * slotStride(DefaultSlotBytes)

// Open returns the device with the given index. The first call makes its context,
// which takes some 0.2 s unless torch has done so, and prepares the pinned memory
// of a first queue at the same time.
func Open(index int) (*Device, error) {
	opened.mu.Lock()
	defer opened.mu.Unlock()
	count, err := driver.Load()
	if err != nil {
		return nil, err
	}
	if index < 0 || index >= count {
		return nil, errs.New(errs.ErrDevice, "cuda:%d: there are %d CUDA devices", index, count)
	}
	if d := opened.devices[index]; d != nil {
		return d, nil
	}
	list := (*unsafe.Pointer)(unsafe.Pointer(C.owcu_block_list_new()))
	if list == nil {
		return nil, errs.New(errs.ErrMemory, "the state of cuda:%d", index)
	}
	d := &Device{index: index, near: nodes.Near(driver.System, func() string { return driver.Bus(index) }),
		spare: make(chan hugePages, 1), list: list,
		module: new(C.struct_owcu_module), resident: residentModule{module: new(C.struct_owcu_module)}}
	spawn.Go("cuda ring", func() {
		p, _ := newHugePages(firstRing, d.near) // zero if it failed: Queue tries again
		d.spare <- p
	})
	var e C.struct_owcu_error
	var coherent, sms C.int
	if C.owcu_ctx_open(C.int(index), &d.number, &d.ctx, &coherent, &sms, &e) != 0 {
		(<-d.spare).free()
		C.free(unsafe.Pointer(list))
		return nil, errorOf(index, &e)
	}
	d.coherent, d.sms = coherent != 0, int(sms)
	if opened.devices == nil {
		opened.devices = map[int]*Device{}
	}
	opened.devices[index] = d
	return d, nil
}

// Trim frees what the opened devices keep between loads, as Device.Trim does for
// one; memory of live tensors stays. It continues after an error and returns the first.
func Trim() (err error) {
	opened.mu.Lock()
	defer opened.mu.Unlock()
	for _, d := range opened.devices {
		if e := d.Trim(); err == nil {
			err = e
		}
	}
	return err
}

// Index is the number of the device.
func (d *Device) Index() int { return d.index }

// NearNode is the NUMA node near the device; nil: there is nothing to choose.
func (d *Device) NearNode() *nodes.Place { return d.near }

// ReadsInPlace reports whether kernels read slots where they are: then the device compares no checksums.
func (d *Device) ReadsInPlace() bool { return d.coherent }

// Trim frees what is kept between loads: the idle queue with its pinned memory and
// staging, and tensor memory without a holder. It waits for the work that uses
// that, and the driver may wait for more. Memory whose users are being captured
// into a graph stays until the capture ends.
func (d *Device) Trim() error {
	d.mu.Lock()
	idle := d.idle
	d.idle = [2]*Queue{}
	d.mu.Unlock()
	d.takeSparePages().free()
	var err error
	for _, queue := range idle {
		if queue != nil {
			if e := queue.destroy(); err == nil {
				err = e
			}
		}
	}
	if e := d.trimBatches(); err == nil {
		err = e
	}
	if e := d.trimTables(); err == nil {
		err = e
	}
	if e := d.reapAndFreeKept(); err == nil {
		err = e
	}
	d.freeDeferred()
	return err
}

// takeSparePages returns what Open prepared, to the first caller, when it is ready.
func (d *Device) takeSparePages() hugePages {
	d.mu.Lock()
	again := d.taken
	d.taken = true
	d.mu.Unlock()
	if again {
		return hugePages{}
	}
	return <-d.spare
}

// MemoryInfo is how much of the device's memory is free, and how much it has, in bytes.
func (d *Device) MemoryInfo() (unused, total int64, err error) {
	var a, b C.uint64_t
	err = d.call(func(e *C.struct_owcu_error) C.int { return C.owcu_memory_info(d.ctx, &a, &b, e) })
	return int64(a), int64(b), err
}

// Read copies device memory to dst, which has the same length, and waits for the
// copy, but for no other work. It is slow, since dst is not pinned: for tests and
// small sizes.
func (d *Device) Read(dst []byte, m device.Memory) error {
	if int64(len(dst)) != m.Bytes {
		return errs.New(errs.ErrArgument, "%d bytes of device memory into %d", m.Bytes, len(dst))
	}
	if len(dst) == 0 {
		return nil
	}
	d.reading.Lock()
	defer d.reading.Unlock()
	return d.call(func(e *C.struct_owcu_error) C.int {
		to, from := unsafe.Pointer(&dst[0]), deviceAddress(m.Ptr)
		return C.owcu_copy_to_host(d.ctx, &d.stream, to, from, C.uint64_t(len(dst)), e)
	})
}

// WithContext runs fn on a thread where the device's context is current and whose calls
// cannot destroy a graph capture, for calls of other libraries; it restores the
// thread's state.
func (d *Device) WithContext(fn func() error) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var g C.struct_owcu_guard
	var e C.struct_owcu_error
	if C.owcu_enter(&g, d.ctx, &e) != 0 {
		return errorOf(d.index, &e)
	}
	defer C.owcu_leave(&g)
	return fn()
}

// loadKernels looks up kernels of a module by names, which end with NUL, and keeps them. The first
// call for a module loads its image. The driver loads a kernel when it is looked up.
func (d *Device) loadKernels(kernels *[]C.owcu_handle, in *C.struct_owcu_module, image []byte,
	names string) ([]C.owcu_handle, error) {
	d.loading.Lock()
	defer d.loading.Unlock()
	if *kernels != nil {
		return *kernels, nil
	}
	all, text := make([]C.owcu_handle, strings.Count(names, "\x00")), []byte(names)
	err := d.call(func(e *C.struct_owcu_error) C.int {
		return C.owcu_module_open(d.ctx, unsafe.Pointer(&image[0]), C.uint64_t(len(image)),
			(*C.char)(unsafe.Pointer(&text[0])),
			C.int(len(all)), in, &all[0], e)
	})
	if err != nil {
		return nil, err
	}
	*kernels = all
	return all, nil
}

// close frees a device without live memory; only tests do that.
func (d *Device) close() error {
	err := d.Trim()
	end := time.Now().Add(time.Minute)
	for d.mu.Lock(); d.reaping; d.mu.Lock() {
		live := d.live
		d.mu.Unlock()
		if time.Now().After(end) {
			return errs.New(errs.ErrEngine, "cuda:%d: %d blocks are still held", d.index, live)
		}
		time.Sleep(time.Millisecond)
	}
	d.mu.Unlock()
	for { // the reaper may have kept what it has just freed
		e := d.reapAndFreeKept()
		d.freeDeferred()
		if e == nil {
			break
		}
		if err == nil {
			err = e
		}
	}
	for _, event := range append(d.pending.events, d.link) {
		for !d.tryFreeThing(C.OWCU_EVENT, unsafe.Pointer(event)) {
		}
	}
	for !d.tryFreeThing(C.OWCU_STREAM, unsafe.Pointer(d.stream)) {
	}
	var e C.struct_owcu_error
	for _, m := range []*C.struct_owcu_module{d.module, d.resident.module} {
		for C.owcu_module_close(d.ctx, m, &e) > 0 {
		}
	}
	C.free(unsafe.Pointer(d.list))
	opened.mu.Lock()
	defer opened.mu.Unlock()
	delete(opened.devices, d.index)
	C.owcu_ctx_close(d.number, &e)
	if e.call != nil && err == nil {
		err = errorOf(d.index, &e)
	}
	return err
}

// errorOf turns an error noted by C into one of Go.
func errorOf(device int, e *C.struct_owcu_error) error {
	return driver.Error(device, C.GoString(e.call), C.GoString(&e.text[0]), int(e.code))
}

// call returns the error of a C function of the device.
func (d *Device) call(run func(e *C.struct_owcu_error) C.int) error {
	var e C.struct_owcu_error
	if run(&e) != 0 {
		return errorOf(d.index, &e)
	}
	return nil
}

func deviceAddress(p unsafe.Pointer) C.owcu_ptr { return C.owcu_ptr(uintptr(p)) }

// devicePointer is the pointer of a device address.
func devicePointer(a C.owcu_ptr) unsafe.Pointer { return device.Pointer(uintptr(a)) }
