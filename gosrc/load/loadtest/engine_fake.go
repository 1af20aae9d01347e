//go:build owfake

package loadtest

// Replaces the driver by the fake one.

import (
	"testing"

	"github.com/overwire/overwire/gosrc/device/cuda"
)

// UseEngine gives the test a driver and fails it if anything leaks.
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
