//go:build !owfake

package cuda

import (
	"testing"

	"github.com/overwire/overwire/gosrc/device/cuda/driver"
)

// begun opens the first GPU, or skips the test if there is none. The same suite runs on the fake driver with the tag
// owfake.
func begun(t testing.TB) *Device {
	t.Helper()
	if err := driver.Available(); err != nil {
		t.Skip(err)
	}
	d, err := Open(0)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// fakes reports whether this build has the fake driver.
const fakes = false
