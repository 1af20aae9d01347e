//go:build !owfake

package loadtest

// Tests run on a GPU, or are skipped.

import (
	"testing"

	"github.com/overwire/overwire/gosrc/device/cuda"
	"github.com/overwire/overwire/gosrc/device/cuda/driver"
)

// UseEngine skips the test where there is no GPU.
func UseEngine(t *testing.T) {
	t.Helper()
	if err := driver.Available(); err != nil {
		t.Skip(err)
	}
	t.Cleanup(func() {
		_ = cuda.Trim() // the idle queues, with their goroutines
		CheckQuiet(t)
	})
}
