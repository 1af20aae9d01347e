//go:build cgo && !owfake

package cuda_test

import (
	"testing"

	"github.com/overwire/overwire/gosrc/device/cuda"
	"github.com/overwire/overwire/gosrc/device/cuda/driver"
)

// engine skips the test where there is no GPU.
func engine(t *testing.T) {
	t.Helper()
	if err := driver.Available(); err != nil {
		t.Skip(err)
	}
	t.Cleanup(func() {
		_ = cuda.Trim() // the idle queues, with their goroutines
		quiet(t)
	})
}
