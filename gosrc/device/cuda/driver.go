//go:build cgo

package cuda

/*
#cgo CFLAGS: -std=gnu11 -Wall -Wextra -O2
#cgo LDFLAGS: -ldl -lpthread
#include <stdlib.h>
#include "queue.h"
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

// driver is the state of the process's driver.
var driver struct {
	mu             sync.Mutex
	ready          bool // loaded and initialized
	version, count int
	devices        map[int]*Device
}

// loadDriver loads and initializes the driver, once; after a failure it may be called
// again. driver.mu is held.
func loadDriver() error {
	if C.owcu_forked() != 0 {
		return errForked()
	}
	if driver.ready {
		return nil
	}
	useFakeDriver()
	if C.owcu == nil {
		why := make([]C.char, 256)
		name := C.CString(library)
		defer C.free(unsafe.Pointer(name))
		if C.owcu_load(name, &why[0], C.size_t(len(why))) != 0 {
			return errs.New(errs.ErrDevice, "no NVIDIA driver: %s", C.GoString(&why[0]))
		}
	}
	var e C.struct_owcu_error
	var version, count C.int
	if C.owcu_begin(&version, &count, &e) != 0 {
		if e.code == 100 { // CUDA_ERROR_NO_DEVICE
			return errs.New(errs.ErrDevice, "the NVIDIA driver sees no GPU (hidden by CUDA_VISIBLE_DEVICES?)")
		}
		return errorOf(-1, &e)
	}
	if version < minDriver {
		return errs.New(errs.ErrDevice, "the NVIDIA driver is for CUDA %s; 12.0 or later is needed", versionText(int(version)))
	}
	if count == 0 {
		return errs.New(errs.ErrDevice, "the NVIDIA driver sees no GPU")
	}
	driver.ready, driver.version, driver.count = true, int(version), int(count)
	return nil
}

// Available returns nil if there is a GPU, else an errs.ErrDevice with the reason.
func Available() error {
	driver.mu.Lock()
	defer driver.mu.Unlock()
	return loadDriver()
}

// Info describes the GPUs of this machine.
func Info() ([]DeviceInfo, error) {
	driver.mu.Lock()
	defer driver.mu.Unlock()
	if err := loadDriver(); err != nil {
		return nil, err
	}
	all := make([]DeviceInfo, driver.count)
	for i := range all {
		var c C.struct_owcu_info
		var e C.struct_owcu_error
		if C.owcu_info_get(C.int(i), &c, &e) != 0 {
			return nil, errorOf(i, &e)
		}
		bus := busName(&c)
		all[i] = DeviceInfo{
			Index: i, Name: C.GoString(&c.name[0]), Memory: int64(c.memory), Processors: int(c.sms),
			Compute: fmt.Sprintf("%d.%d", c.major, c.minor), PCI: bus, Driver: versionText(driver.version),
			Coherent: c.coherent != 0, Node: nodes.Of(system, bus),
		}
		all[i].LinkWidth, all[i].LinkGen = readLink(bus)
	}
	return all, nil
}

// system is where the host's tables are; tests have others.
var system = nodes.System

func busName(c *C.struct_owcu_info) string { return strings.ToLower(C.GoString(&c.bus[0])) }

// busOf is the PCI address of a device; "": the driver does not say.
func busOf(index int) string {
	var c C.struct_owcu_info
	var e C.struct_owcu_error
	if C.owcu_info_get(C.int(index), &c, &e) != 0 {
		return "" // Open will say why
	}
	return busName(&c)
}

// readLink reads a device's PCI Express link from the system: its maximum, because an
// idle GPU slows its link down.
func readLink(bus string) (width, gen int) {
	dir := system + "/bus/pci/devices/" + bus
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
	return errs.New(errs.ErrForked, "CUDA cannot be used in a forked child: start processes with spawn, or load before forking to the host only")
}

// errorOf turns an error noted by C into one of Go: out of memory, forked, or a
// device error with the call and the driver's text. device -1: none in particular.
func errorOf(device int, e *C.struct_owcu_error) error {
	where := "CUDA"
	if device >= 0 {
		where = fmt.Sprintf("cuda:%d", device)
	}
	switch e.code {
	case C.OWCU_FORKED:
		return errForked()
	case C.OWCU_CAPTURED:
		return errs.New(errs.ErrNotSupported, "%s: the stream is being captured into a CUDA graph, of which this cannot be a part: do it before the capture, or on another stream", where)
	case C.OWCU_OUT_OF_MEMORY:
		return &errs.Memory{Where: where, Asked: -1, Free: -1, Total: -1, Err: C.GoString(e.call) + ": " + C.GoString(&e.text[0])}
	}
	return errs.New(errs.ErrDevice, "%s: %s failed: %s (%d)", where, C.GoString(e.call), C.GoString(&e.text[0]), int(e.code))
}

// call returns the error of a C function of the device.
func (d *Device) call(run func(e *C.struct_owcu_error) C.int) error {
	var e C.struct_owcu_error
	if run(&e) != 0 {
		return errorOf(d.index, &e)
	}
	return nil
}
