//go:build owfake

package loadtest

// This file replaces the driver with the fake one.

import (
	"testing"

	"github.com/overwire/overwire/gosrc/device/cuda"
)

// UseEngine replaces the driver with the fake one, and fails the test if anything leaks.
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
