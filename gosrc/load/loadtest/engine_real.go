//go:build !owfake

package loadtest

// This file skips tests if there is no GPU.

import (
	"testing"

	"github.com/overwire/overwire/gosrc/device/cuda"
	"github.com/overwire/overwire/gosrc/device/cuda/driver"
)

// UseEngine skips the test if there is no GPU.
func UseEngine(t *testing.T) {
	t.Helper()
	if err := driver.Available(); err != nil {
		t.Skip(err)
	}
	t.Cleanup(func() {
		_ = cuda.Trim() // ends idle queues and their goroutines
		CheckQuiet(t)
	})
}
