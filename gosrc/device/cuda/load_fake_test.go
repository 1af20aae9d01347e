//go:build cgo && owfake

package cuda_test

import (
	"errors"
	"path/filepath"
	"testing"

	"github.com/overwire/overwire/gosrc/device/cuda"
	"github.com/overwire/overwire/gosrc/fault"
	"github.com/overwire/overwire/gosrc/job"
	"github.com/overwire/overwire/gosrc/load"
	"github.com/overwire/overwire/gosrc/save"
	"github.com/overwire/overwire/gosrc/tensor"
)

// engine gives the test a driver and holds it to leaving nothing behind.
func engine(t *testing.T) {
	t.Helper()
	end := cuda.Fake(512 << 20)
	t.Cleanup(func() {
		if left := end(); left != "" {
			t.Error(left)
		}
	})
}

// Whichever call of the driver fails during a load, the load ends with a typed
// error or goes on, and nothing is left behind.
func TestLoadEveryCallFails(t *testing.T) {
	path := filepath.Join(t.TempDir(), "model.safetensors")
	small := make([]byte, 6000)
	for i := range small {
		small[i] = byte(i % 3)
	}
	in := []save.Input{{Name: "w", DType: tensor.BF16, Shape: []int64{3000}, Data: small}, {Name: "x", DType: tensor.I64, Shape: []int64{2}, Data: small[:16]}}
	if _, err := save.Write(t.Context(), job.New("save"), save.Spec{Path: path, Compress: true}, in); err != nil {
		t.Fatal(err)
	}
	step := int64(1)
	if testing.Short() {
		step = 7
	}
	failed := 0
	for nth := int64(1); ; nth += step {
		end := cuda.Fake(512 << 20)
		cuda.FakeFail(nth, 999, false)
		m, err := load.Open(t.Context(), load.Spec{URIs: []string{path}})
		if err != nil {
			t.Fatal(err)
		}
		l, err := m.Start(nil, load.Options{Device: "cuda:1"})
		if err == nil {
			err = finish(t, l)
			l.Close()
		}
		m.Close()
		calls := cuda.FakeCalls()
		if left := end(); left != "" {
			t.Fatalf("call %d fails: %v; left: %s", nth, err, left)
		}
		if err != nil && !errors.Is(err, fault.ErrDevice) {
			t.Fatalf("call %d fails: %v", nth, err)
		}
		if err != nil {
			failed++
		}
		if calls < nth {
			break
		}
	}
	if failed < 10 {
		t.Errorf("only %d loads failed", failed)
	}
}
