//go:build owfake

package driver

import (
	"errors"
	"strings"
	"testing"

	"github.com/overwire/overwire/gosrc/errs"
)

// Available refuses a driver that is too old or finds no GPU, and reports the reason.
func TestAvailable(t *testing.T) {
	UseFake(1<<20, 13000, 2)
	if err := Available(); err != nil {
		t.Error(err)
	}
	for _, c := range []struct {
		version, devices int
		says             string
	}{{11080, 1, "12.0 or later"}, {13000, 0, "no GPU"}} {
		UseFake(1<<20, c.version, c.devices)
		err := Available()
		if !errors.Is(err, errs.ErrDevice) || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%+v: %v", c, err)
		}
	}
	UseFake(1<<20, 13000, 2)
}
