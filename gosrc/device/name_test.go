package device

import (
	"errors"
	"testing"

	"github.com/overwire/overwire/gosrc/errs"
)

// Number parses devices as torch writes them, and refuses all other names.
func TestNumber(t *testing.T) {
	for name, want := range map[string]int64{"cpu": Host, "cpu:0": Host, "cuda": AnyGPU, "cuda:0": 0, "cuda:17": 17, "cuda:007": 7, "cuda:65535": 65535} {
		if n, err := Number(name); n != want || err != nil {
			t.Errorf("%q: %d, %v", name, n, err)
		}
	}
	for _, name := range []string{"", ":", ":1", "cuda:", "cuda:-1", "cuda:+1", "cuda:1:2", "cuda: 1", "cuda:1e3", "cuda:65536", "cuda:99999999999999999999", "cpu:x", "mps:x"} {
		if _, err := Number(name); !errors.Is(err, errs.ErrArgument) {
			t.Errorf("%q: %v", name, err)
		}
	}
	for _, name := range []string{"mps", "meta", "CUDA", "cuda ", "xpu:0", "hip"} {
		if _, err := Number(name); !errors.Is(err, errs.ErrNotSupported) {
			t.Errorf("%q: %v", name, err)
		}
	}
}
