//go:build !owfake

package cuda

import (
	"testing"

	"github.com/overwire/overwire/gosrc/device/cuda/driver"
)

// begun opens the first GPU. Without one the test is skipped; the same suite runs on the fake driver under the tag
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

// fakes reports that this build has the fake driver.
const fakes = false
