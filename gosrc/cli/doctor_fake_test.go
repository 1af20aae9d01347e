//go:build owfake

package cli

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/overwire/overwire/gosrc/device/cuda"
	"github.com/overwire/overwire/gosrc/device/cuda/cudatest"
	"github.com/overwire/overwire/gosrc/device/cuda/driver"
	"github.com/overwire/overwire/gosrc/internal/nodes"
)

// doctor shows each GPU, its kernels and its link, and with --measure its copy rate. It leaves nothing on the GPUs.
func TestDoctorFake(t *testing.T) {
	end := cuda.Fake(1 << 30)
	out := must(t, "doctor")
	for _, want := range []string{"for CUDA 13.0", "cuda:1", "Fake GPU 1", "compute 9.0", "kernels sm_90",
		"unknown link", "coherent link"} {
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
	// On a host with several NUMA nodes, doctor shows each GPU's node, and why slots cannot be placed on it.
	root := t.TempDir()
	put := func(name, text string) {
		path := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	put("devices/system/node/online", "0-1")
	put("devices/system/node/node0/cpulist", "0-1021")
	put("devices/system/node/node1/cpulist", "1022,1023")
	put("bus/pci/devices/ffff:01:00.0/numa_node", "1")
	restore := driver.UseSystemRoot(root)
	tables = root
	defer func() { tables = nodes.System }()
	out = must(t, "doctor")
	for _, want := range []string{"node 0 with 1,022 cores, node 1 with 2 cores", "at ffff:01:00.0 on NUMA node 1",
		"cuda:1 is on NUMA node 1, but", "may not run on the cores of node 1"} {
		if !strings.Contains(out, want) {
			t.Errorf("doctor lacks %q:\n%s", want, out)
		}
	}
	restore()
	if left := end(); left != "" {
		t.Errorf("left behind: %s", left)
	}
	cuda.Fake(1 << 30)
	cudatest.FailCall(1, 100, true)
	if out := must(t, "doctor", "--measure"); !strings.Contains(out, "none: the NVIDIA driver finds no GPU") {
		t.Errorf("without a device:\n%s", out)
	}
}

// doctor reports whether a model fits on a GPU. If not, doctor shows the fastest offload that leaves a fifth of the GPU
// free.
func TestDoctorOfModelsFake(t *testing.T) {
	plain := layered(t)
	packed := plain + ".packed.safetensors"
	must(t, "compress", plain, "-o", packed)
	for _, want := range []struct {
		path        string
		bytes       int64
		where, text string
	}{
		{plain, 1 << 30, "resident", "fits\n"}, {packed, 1 << 30, "resident", "fits\n"},
		{packed, 16 << 20, "device", "2 to 3 times as long as with resident weights"},
		{plain, 16 << 20, "auto", `where="auto", room=8921772)`},
		{plain, 16 << 20, "auto", "at most 8.0 MB on the host for each of 2 ranks, together 16 MB instead of 32 MB"},
		{plain, 4 << 20, "", "cannot run it here"}, {packed, 1 << 20, "", "cannot run it here"},
	} {
		path, bytes := want.path, want.bytes
		end := cuda.Fake(bytes)
		if out := must(t, "doctor", path); !strings.Contains(out, want.text) {
			t.Errorf("GPUs of %d bytes: doctor lacks %q:\n%s", bytes, want.text, out)
		}
		var d Diagnosis
		if err := json.Unmarshal([]byte(must(t, "doctor", "--json", path)), &d); err != nil {
			t.Fatal(err)
		}
		for _, fit := range d.Model.GPUs {
			o, used := fit.Offload, int64(0)
			switch fit.Where {
			case "device":
				used = o.Rest + o.Stored + o.Slots + fit.Keep
			case "auto":
				used = o.DeviceBytes() + fit.Room
			}
			if fit.Where != want.where || fit.Fits != (want.where == "resident") || used > bytes/5*4 || len(fit.Tiers) != 3 ||
				(o == nil) != (used == 0) {
				t.Errorf("GPU of %d bytes: %+v, %+v", bytes, fit, o)
			}
		}
		if left := end(); left != "" {
			t.Errorf("left behind: %s", left)
		}
	}
}
