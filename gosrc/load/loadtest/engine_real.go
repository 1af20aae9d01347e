//go:build !owfake

package loadtest

// Skips tests without a GPU.

import (
	"testing"

	"github.com/overwire/overwire/gosrc/device/cuda"
	"github.com/overwire/overwire/gosrc/device/cuda/driver"
)

// UseEngine skips the test without a GPU.
func UseEngine(t *testing.T) {
	t.Helper()
	if err := driver.Available(); err != nil {
		t.Skip(err)
	}
	t.Cleanup(func() {
		_ = cuda.Trim() // ends the idle queues with their goroutines
		CheckQuiet(t)
	})
}
