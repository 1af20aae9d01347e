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

// Event, Stream, Pinned and Attached are the kinds of objects.
const (
	Event    Thing = C.OWCU_EVENT
	Stream   Thing = C.OWCU_STREAM
	Pinned   Thing = C.OWCU_PINNED
	Attached Thing = C.OWCU_ATTACHED
)

// A Context is a GPU's primary context, retained with its flags unchanged.
type Context struct {
	index    int
	number   C.int // device number of the driver
	handle   C.owcu_handle
	near     *nodes.Place // nil if the host has only one node, or the GPU's node is unknown
	coherent bool         // the GPU reads host memory through the host's page tables
	sms      int

	reading sync.Mutex    // held while Read uses stream
	stream  C.owcu_handle // only used by Read
}

// Near returns the NUMA node of a device, or nil if the host has only one node or the device's node is unknown.
func Near(index int) *nodes.Place { return nodes.Near(System, func() string { return Bus(index) }) }

// OpenContext retains the primary context of a device. This takes about 0.2 s unless torch has already done so.
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

// Index returns the device number.
func (c *Context) Index() int { return c.index }

// Handle returns the driver's context.
func (c *Context) Handle() Handle { return Handle(c.handle) }

// Processors returns the number of multiprocessors.
func (c *Context) Processors() int { return c.sms }

// NearNode returns the NUMA node of the device, or nil if the host has only one node or the device's node is unknown.
func (c *Context) NearNode() *nodes.Place { return c.near }

// ReadsInPlace reports whether kernels read slots in place. In that case the device compares no checksums.
func (c *Context) ReadsInPlace() bool { return c.coherent }

// ErrorOf returns the error that C code recorded in a struct owcu_error.
func (c *Context) ErrorOf(noted unsafe.Pointer) error {
	return errorOf(c.index, (*C.struct_owcu_error)(noted))
}

// call runs a C function and returns its error.
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

// AddSizes adds to an out-of-memory error the requested size, its purpose, and the free and total memory. It returns
// other errors unchanged.
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

// Read copies device memory to dst, which must have the same length. It waits for the copy but not for other work. It
// is slow because dst is not pinned. Use it for tests and small sizes.
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
// fn can call other libraries. Afterwards WithContext restores the thread's state.
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

// TryRelease frees an unused object and reports whether it was freed. On a lost device, the object counts as freed.
func (c *Context) TryRelease(what Thing, thing unsafe.Pointer) bool {
	var e C.struct_owcu_error
	return C.owcu_try_release(c.handle, C.int(what), thing, &e) <= 0
}

// Close releases the context when nothing uses it. Only tests call it.
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

// A Module is a set of compiled kernels, which the first Kernels.Get loads into a context.
type Module struct {
	ctx   *Context
	image []byte
	mu    sync.Mutex // guards c and the kernels that were looked up in it
	c     *C.struct_owcu_module
}

// Module returns the module of an image, without loading it.
func (c *Context) Module(image []byte) *Module {
	return &Module{ctx: c, image: image, c: new(C.struct_owcu_module)}
}

// Close unloads the module. Only tests call it.
func (m *Module) Close() {
	var e C.struct_owcu_error
	for C.owcu_module_close(m.ctx.handle, m.c, &e) > 0 {
	}
}

// Kernels is a group of kernels of a module.
type Kernels struct {
	module *Module
	names  string
	all    []Handle // nil before they are looked up; guarded by module.mu
}

// Kernels returns the kernels with these names, each terminated by NUL.
func (m *Module) Kernels(names string) *Kernels { return &Kernels{module: m, names: names} }

// Get looks up the kernels once and returns them in the order of their names. The driver loads a kernel when it
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

// statusTexts explain the bits of the status word that a kernel writes for a chunk or a stream. See cuda/abi.h and
// cuda/abi_stream.h.
var statusTexts = []struct {
	bit  uint32
	text string
}{
	{1, "the parts do not match the chunk"},
	{2, "a lane ends in a wrong state"},
	{4, "words and escapes do not end at the end of their segment"},
	{8, "an escape is out of order"},
	{1 << 8, "the stream is of a different kind, or its header is damaged"},
	{1 << 9, "the algorithm, length or chunk size differs from the expected one"},
	{1 << 10, "a chunk is outside its payload or has an invalid form"},
	{1 << 12, "a block cannot be decoded"},
}

// StatusText describes the bits of a kernel's status word.
func StatusText(word uint32) string {
	var all []string
	for _, m := range statusTexts {
		if word&m.bit != 0 {
			all = append(all, m.text)
		}
	}
	return strings.Join(all, "; ")
}
