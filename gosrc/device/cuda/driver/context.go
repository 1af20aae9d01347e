package driver

/*
#include <stdlib.h>
#include "context.h"
*/
import "C"

import (
	"errors"
	"runtime"
	"strings"
	"sync"
	"unsafe"

	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/nodes"
)

// A Handle is a context, stream, event, module or kernel of the driver.
type Handle = unsafe.Pointer

// A Thing is a kind of object that TryRelease frees.
type Thing C.int

// The kinds of things.
const (
	Event    Thing = C.OWCU_EVENT
	Stream   Thing = C.OWCU_STREAM
	Pinned   Thing = C.OWCU_PINNED
	Attached Thing = C.OWCU_ATTACHED
)

// A Context is a GPU's primary context, retained with its flags unchanged.
type Context struct {
	index    int
	number   C.int // the driver's number
	handle   C.owcu_handle
	near     *nodes.Place // nil if the host has one node or the near one is not known
	coherent bool         // the GPU reads host memory through the host's own page tables
	sms      int

	reading sync.Mutex    // held while stream is used
	stream  C.owcu_handle // for Read
}

// Near is the NUMA node near a device, nil if the host has one node or the near one is not known.
func Near(index int) *nodes.Place { return nodes.Near(System, func() string { return Bus(index) }) }

// OpenContext retains the primary context of a device. That takes some 0.2 s unless torch has done it already.
func OpenContext(index int, near *nodes.Place) (*Context, error) {
	c := &Context{index: index, near: near}
	var e C.struct_owcu_error
	var coherent, sms C.int
	if C.owcu_ctx_open(C.int(index), &c.number, &c.handle, &coherent, &sms, &e) != 0 {
		return nil, errorOf(index, &e)
	}
	c.coherent, c.sms = coherent != 0, int(sms)
	return c, nil
}

// Index is the number of the device.
func (c *Context) Index() int { return c.index }

// Handle is the driver's context.
func (c *Context) Handle() Handle { return Handle(c.handle) }

// Processors is the number of the GPU's multiprocessors.
func (c *Context) Processors() int { return c.sms }

// NearNode is the NUMA node near the device, nil if the host has one node or the near one is not known.
func (c *Context) NearNode() *nodes.Place { return c.near }

// ReadsInPlace reports whether kernels read slots in place. The device compares no checksums then.
func (c *Context) ReadsInPlace() bool { return c.coherent }

// ErrorOf is the error that C code recorded in a struct owcu_error.
func (c *Context) ErrorOf(noted unsafe.Pointer) error {
	return errorOf(c.index, (*C.struct_owcu_error)(noted))
}

// call returns the error of a C function.
func (c *Context) call(run func(e *C.struct_owcu_error) C.int) error {
	var e C.struct_owcu_error
	if run(&e) != 0 {
		return errorOf(c.index, &e)
	}
	return nil
}

// MemoryInfo returns the free and the total memory of the device, in bytes.
func (c *Context) MemoryInfo() (unused, total int64, err error) {
	var a, b C.uint64_t
	err = c.call(func(e *C.struct_owcu_error) C.int { return C.owcu_memory_info(c.handle, &a, &b, e) })
	return int64(a), int64(b), err
}

// AddSizes adds to an out-of-memory error how much was requested, for what, and how much there was. Other errors
// stay unchanged.
func (c *Context) AddSizes(err error, asked int64, what string) error {
	var mem *errs.Memory
	if !errors.As(err, &mem) {
		return err
	}
	full := *mem
	full.Asked, full.For = asked, what
	if free, total, e := c.MemoryInfo(); e == nil {
		full.Free, full.Total = free, total
	}
	return &full
}

// Read copies device memory to dst, which has the same length. It waits for the copy, but for no other work. It
// is slow, since dst is not pinned; use it for tests and small sizes.
func (c *Context) Read(dst []byte, m device.Memory) error {
	if int64(len(dst)) != m.Bytes {
		return errs.New(errs.ErrArgument, "cannot read %d bytes of device memory into %d bytes", m.Bytes, len(dst))
	}
	if len(dst) == 0 {
		return nil
	}
	c.reading.Lock()
	defer c.reading.Unlock()
	return c.call(func(e *C.struct_owcu_error) C.int {
		return C.owcu_copy_to_host(c.handle, &c.stream, unsafe.Pointer(&dst[0]), C.owcu_ptr(uintptr(m.Ptr)),
			C.uint64_t(len(dst)), e)
	})
}

// WithContext runs fn on a thread where the device's context is current and calls cannot destroy a graph capture.
// It serves calls of other libraries and restores the thread's state.
func (c *Context) WithContext(fn func() error) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var g C.struct_owcu_guard
	var e C.struct_owcu_error
	if C.owcu_enter(&g, c.handle, &e) != 0 {
		return errorOf(c.index, &e)
	}
	defer C.owcu_leave(&g)
	return fn()
}

// TryRelease frees a thing that nothing uses, and reports whether it is gone. With a lost device it is.
func (c *Context) TryRelease(what Thing, thing unsafe.Pointer) bool {
	var e C.struct_owcu_error
	return C.owcu_try_release(c.handle, C.int(what), thing, &e) <= 0
}

// Close releases the context when nothing uses it any more. Only tests do that.
func (c *Context) Close() error {
	for !c.TryRelease(Stream, Handle(c.stream)) {
	}
	var e C.struct_owcu_error
	C.owcu_ctx_close(c.number, &e)
	if e.call != nil {
		return errorOf(c.index, &e)
	}
	return nil
}

// A Module is a set of compiled kernels, loaded into a context at the first Kernels.Get.
type Module struct {
	ctx   *Context
	image []byte
	mu    sync.Mutex // guards c and the kernels that were looked up in it
	c     *C.struct_owcu_module
}

// Module is the module of an image. It is not loaded yet.
func (c *Context) Module(image []byte) *Module {
	return &Module{ctx: c, image: image, c: new(C.struct_owcu_module)}
}

// Close unloads the module. Only tests do that.
func (m *Module) Close() {
	var e C.struct_owcu_error
	for C.owcu_module_close(m.ctx.handle, m.c, &e) > 0 {
	}
}

// Kernels are some kernels of a module.
type Kernels struct {
	module *Module
	names  string
	all    []Handle // nil before they are looked up; guarded by module.mu
}

// Kernels returns the kernels with these names, each terminated by NUL.
func (m *Module) Kernels(names string) *Kernels { return &Kernels{module: m, names: names} }

// Get looks the kernels up once and returns them in the order of their names. The driver loads a kernel when it
// is looked up.
func (k *Kernels) Get() ([]Handle, error) {
	m := k.module
	m.mu.Lock()
	defer m.mu.Unlock()
	if k.all != nil {
		return k.all, nil
	}
	all, names := make([]Handle, strings.Count(k.names, "\x00")), []byte(k.names)
	err := m.ctx.call(func(e *C.struct_owcu_error) C.int {
		return C.owcu_module_open(m.ctx.handle, unsafe.Pointer(&m.image[0]), C.uint64_t(len(m.image)),
			(*C.char)(unsafe.Pointer(&names[0])), C.int(len(all)), m.c, (*C.owcu_handle)(unsafe.Pointer(&all[0])), e)
	})
	if err != nil {
		return nil, err
	}
	k.all = all
	return all, nil
}

// statusTexts explain the bits of the status word that a kernel writes for a chunk or a stream: cuda/abi.h and
// abi_stream.h.
var statusTexts = []struct {
	bit  uint32
	text string
}{
	{1, "the parts do not match the chunk"},
	{2, "a lane ends in a wrong state"},
	{4, "words and escapes do not end at the end of their segment"},
	{8, "an escape is out of order"},
	{1 << 8, "this is not such a stream, or its header is damaged"},
	{1 << 9, "the algorithm, length or chunk size differs from the expected one"},
	{1 << 10, "a chunk is outside its payload or has an invalid form"},
	{1 << 12, "a block cannot be decoded"},
}

// StatusText says what the bits of a kernel's status word mean.
func StatusText(word uint32) string {
	var all []string
	for _, m := range statusTexts {
		if word&m.bit != 0 {
			all = append(all, m.text)
		}
	}
	return strings.Join(all, "; ")
}
