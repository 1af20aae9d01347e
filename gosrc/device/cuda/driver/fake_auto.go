//go:build owfake && owfakeauto

package driver

/*
#include "../cudatest/fake.h"
*/
import "C"

// useFakeDriver replaces the driver with the fake one, in engines built for Python's tests of GPU code.
func useFakeDriver() {
	C.owcu_fake_reset(4 << 30)
	C.owcu_use_table(C.owcu_fake_api())
}
