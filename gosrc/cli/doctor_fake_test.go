//go:build cgo && owfake

package cli

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/overwire/overwire/gosrc/device/cuda"
)

// Doctor shows each GPU, what it runs, and its wire if that is asked for; it
// leaves nothing on them.
func TestDoctorFake(t *testing.T) {
	end := cuda.Fake(1 << 30)
	out := must(t, "doctor")
	for _, want := range []string{"for CUDA 13.0", "cuda:1", "Fake GPU 1", "compute 9.0", "kernels sm_90", "unknown link", "coherent link"} {
		if !strings.Contains(out, want) {
			t.Errorf("doctor lacks %q:\n%s", want, out)
		}
	}
	if strings.Contains(out, "measured wire") {
		t.Errorf("measured without being asked:\n%s", out)
	}
	var d Diagnosis
	if err := json.Unmarshal([]byte(must(t, "doctor", "--measure", "--json")), &d); err != nil {
		t.Fatal(err)
	}
	if d.GPU.Devices[0].Coherent || !d.GPU.Devices[1].Coherent {
		t.Errorf("%+v", d.GPU.Devices)
	}
	if len(d.GPU.Devices) != 2 || d.GPU.Devices[1].Wire <= 0 || d.GPU.Reason != "" {
		t.Errorf("%+v", d.GPU)
	}
	if left := end(); left != "" {
		t.Errorf("left behind: %s", left)
	}
	cuda.Fake(1 << 30)
	cuda.FakeFail(1, 100, true)
	if out := must(t, "doctor", "--measure"); !strings.Contains(out, "none: the NVIDIA driver sees no GPU") {
		t.Errorf("without a device:\n%s", out)
	}
}
