package driver

/*
#cgo CFLAGS: -std=gnu11 -Wall -Wextra -O2
#cgo LDFLAGS: -ldl -lpthread
#include <stdlib.h>
#include "context.h"
*/
import "C"

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"unsafe"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/nodes"
)

const (
	library   = "libcuda.so.1"
	minDriver = 12000
)

// state is the process-wide state of the driver.
var state struct {
	mu             sync.Mutex
	ready          bool // loaded and initialized
	version, count int
}

// loadDriver loads and initializes the driver once. It may be called again after a failure. The caller holds state.mu.
func loadDriver() error {
	if C.owcu_forked() != 0 {
		return errForked()
	}
	if state.ready {
		return nil
	}
	useFakeDriver()
	if C.owcu == nil {
		why := make([]C.char, 256)
		name := C.CString(library)
		defer C.free(unsafe.Pointer(name))
		if C.owcu_load_driver(name, &why[0], C.size_t(len(why))) != 0 {
			return errs.New(errs.ErrDevice, "cannot load the NVIDIA driver: %s", C.GoString(&why[0]))
		}
	}
	var e C.struct_owcu_error
	var version, count C.int
	if C.owcu_init_driver(&version, &count, &e) != 0 {
		if e.code == 100 { // CUDA_ERROR_NO_DEVICE
			return errs.New(errs.ErrDevice, "the NVIDIA driver finds no GPU (hidden by CUDA_VISIBLE_DEVICES?)")
		}
		return errorOf(-1, &e)
	}
	if version < minDriver {
		return errs.New(errs.ErrDevice, "the NVIDIA driver supports CUDA %s, but 12.0 or later is needed",
			versionText(int(version)))
	}
	if count == 0 {
		return errs.New(errs.ErrDevice, "the NVIDIA driver finds no GPU")
	}
	state.ready, state.version, state.count = true, int(version), int(count)
	return nil
}

// Load loads and initializes the driver once, and returns the number of devices. It may be called again after a
// failure.
func Load() (devices int, err error) {
	state.mu.Lock()
	defer state.mu.Unlock()
	err = loadDriver()
	return state.count, err
}

// Available returns nil if there is a GPU, otherwise an errs.ErrDevice with the reason.
func Available() error {
	_, err := Load()
	return err
}

// Info describes the GPUs of this machine.
func Info() ([]DeviceInfo, error) {
	state.mu.Lock()
	defer state.mu.Unlock()
	if err := loadDriver(); err != nil {
		return nil, err
	}
	all := make([]DeviceInfo, state.count)
	for i := range all {
		var c C.struct_owcu_info
		var e C.struct_owcu_error
		if C.owcu_get_device_info(C.int(i), &c, &e) != 0 {
			return nil, errorOf(i, &e)
		}
		bus := busName(&c)
		all[i] = DeviceInfo{
			Index: i, Name: C.GoString(&c.name[0]), Memory: int64(c.memory), Processors: int(c.sms),
			Compute: fmt.Sprintf("%d.%d", c.major, c.minor), PCI: bus, Driver: versionText(state.version),
			Coherent: c.coherent != 0, Node: nodes.Of(System, bus),
		}
		all[i].LinkWidth, all[i].LinkGen = readPCILink(bus)
	}
	return all, nil
}

// System is the directory of the host's sysfs. Tests replace it.
var System = nodes.System

func busName(c *C.struct_owcu_info) string { return strings.ToLower(C.GoString(&c.bus[0])) }

// Bus returns the PCI address of a device, or "" if the driver does not report it.
func Bus(index int) string {
	var c C.struct_owcu_info
	var e C.struct_owcu_error
	if C.owcu_get_device_info(C.int(index), &c, &e) != 0 {
		return "" // OpenContext will report the error
	}
	return busName(&c)
}

// readPCILink reads the maximum width and generation of a device's PCI Express link from sysfs. The current values are
// lower while the GPU is idle.
func readPCILink(bus string) (width, gen int) {
	dir := System + "/bus/pci/devices/" + bus
	read := func(name string) string {
		b, err := os.ReadFile(dir + "/" + name)
		if err != nil {
			return ""
		}
		return strings.TrimSpace(string(b))
	}
	width, _ = strconv.Atoi(read("max_link_width"))
	speed, _, _ := strings.Cut(read("max_link_speed"), " ")
	for i, s := range []string{"2.5", "5.0", "8.0", "16.0", "32.0", "64.0"} {
		if speed == s {
			gen = i + 1
		}
	}
	return width, gen
}

func versionText(v int) string { return fmt.Sprintf("%d.%d", v/1000, v%1000/10) }

func errForked() error {
	return errs.New(errs.ErrForked, "CUDA cannot be used in a forked child: "+
		"start processes with spawn, or load only to the host before forking")
}

func errorOf(device int, e *C.struct_owcu_error) error {
	return Error(device, C.GoString(e.call), C.GoString(&e.text[0]), int(e.code))
}

// Error returns the error of a driver call that C code recorded: out of memory, forked, or a device error with the
// call and the driver's text. device is -1 if the error does not concern a device.
func Error(device int, call, text string, code int) error {
	where := "CUDA"
	if device >= 0 {
		where = fmt.Sprintf("cuda:%d", device)
	}
	switch code {
	case C.OWCU_FORKED:
		return errForked()
	case C.OWCU_CAPTURED:
		return errs.New(errs.ErrNotSupported, "%s: the stream is being captured into a CUDA graph, "+
			"which cannot include this operation: do it before the capture, or on another stream", where)
	case C.OWCU_OUT_OF_MEMORY:
		return &errs.Memory{Where: where, Asked: -1, Free: -1, Total: -1, Err: call + ": " + text}
	}
	return errs.New(errs.ErrDevice, "%s: %s failed: %s (%d)", where, call, text, code)
}

// SwapCaptureMode sets the calling thread's mode of stream capture, a CUstreamCaptureMode, and returns the previous
// one. If there is no driver or the mode is unknown, it returns -1 and changes nothing. It is for Python threads that
// will call torch.
func SwapCaptureMode(mode int) int {
	if mode < 0 || Available() != nil {
		return -1
	}
	return int(C.owcu_swap_capture_mode(C.int(mode)))
}

// DeviceOf returns the number of the device that an address belongs to, or -1 for host memory.
func DeviceOf(address uint64) int {
	if Available() != nil {
		return -1
	}
	return int(C.owcu_pointer_device(C.owcu_ptr(address)))
}
