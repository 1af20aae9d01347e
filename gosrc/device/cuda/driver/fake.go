//go:build owfake

package driver

/*
#include "../cudatest/fake.h"
*/
import "C"

import _ "github.com/overwire/overwire/gosrc/device/cuda/cudatest" // the fake driver

// UseFake replaces the driver with the fake one, which reports the version (such as 13000) and the number of devices.
// Each device has `memory` bytes.
func UseFake(memory int64, version, devices int) {
	state.mu.Lock()
	defer state.mu.Unlock()
	state.ready = false
	C.owcu_fake_reset(C.uint64_t(memory))
	C.owcu_fake_version(C.int(version), C.int(devices))
	C.owcu_use_table(C.owcu_fake_api())
}

// UseSystemRoot replaces the directory of the host's sysfs until restore is called. cuda:N is at ffff:0N:00.0.
func UseSystemRoot(root string) (restore func()) {
	tables := System
	System = root
	return func() { System = tables }
}
