//go:build owfake

package loadtest

// Tests run on the fake driver.

import (
	"testing"

	"github.com/overwire/overwire/gosrc/device/cuda"
)

// UseEngine gives the test a driver and holds it to leaving nothing behind.
func UseEngine(t *testing.T) {
	t.Helper()
	end := cuda.Fake(512 << 20)
	t.Cleanup(func() {
		if left := end(); left != "" {
			t.Error(left)
		}
		CheckQuiet(t)
	})
}
