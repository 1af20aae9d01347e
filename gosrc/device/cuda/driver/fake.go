//go:build owfake

package driver

/*
#include "../cudatest/fake.h"
*/
import "C"

import _ "github.com/overwire/overwire/gosrc/device/cuda/cudatest" // the fake driver

// UseFake replaces the driver by the fake one, with its version (13000), the number of its devices, and the
// memory of each in bytes.
func UseFake(memory int64, version, devices int) {
	state.mu.Lock()
	defer state.mu.Unlock()
	state.ready = false
	C.owcu_fake_reset(C.uint64_t(memory))
	C.owcu_fake_version(C.int(version), C.int(devices))
	C.owcu_use_table(C.owcu_fake_api())
}

// UseSystemRoot gives the host other tables of nodes and devices until restore is called. cuda:N is at
// ffff:0N:00.0.
func UseSystemRoot(root string) (restore func()) {
	tables := System
	System = root
	return func() { System = tables }
}
