//go:build cgo && owfake && owfakeauto

package cuda

/*
#include "fake.h"
*/
import "C"

// preset puts the fake driver in place of the real one from the start: a build
// of the engine for Python tests of what is on a GPU.
func preset() {
	C.owcu_fake_reset(4 << 30)
	C.owcu_use(C.owcu_fake_api())
}
