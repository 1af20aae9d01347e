package cuda

/*
#include "batch.h"
*/
import "C"

// This file shares device memory between the processes of a host.

import (
	"encoding/hex"
	"unsafe"

	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/errs"
)

// ExportMemory names memory, which Alloc returned alone, for MapExported in another process. The
// memory must stay until those have ended that use.
func (d *Device) ExportMemory(m device.Memory) (string, error) {
	var h C.struct_owcu_ipc
	err := d.call(func(e *C.struct_owcu_error) C.int { return C.owcu_export_ipc(d.ctx, deviceAddress(m.Ptr), &h, e) })
	return hex.EncodeToString(unsafe.Slice((*byte)(unsafe.Pointer(&h)), unsafe.Sizeof(h))), err
}

// MapExported maps memory that another process shares, on this device or one that it can
// reach, until UnmapExported. It fails where the devices or processes cannot reach each
// other.
func (d *Device) MapExported(name string) (unsafe.Pointer, error) {
	var h C.struct_owcu_ipc
	raw, err := hex.DecodeString(name)
	if err != nil || len(raw) != int(unsafe.Sizeof(h)) {
		return nil, errs.New(errs.ErrArgument, "%q names no memory of a device", name)
	}
	copy(unsafe.Slice((*byte)(unsafe.Pointer(&h)), len(raw)), raw)
	var p C.owcu_ptr
	err = d.call(func(e *C.struct_owcu_error) C.int { return C.owcu_map_ipc(d.ctx, &h, &p, e) })
	return devicePointer(p), err
}

// UnmapExported ends a MapExported, after the work that uses the memory.
func (d *Device) UnmapExported(at unsafe.Pointer) { d.freeOrDefer(C.OWCU_ATTACHED, at) }
