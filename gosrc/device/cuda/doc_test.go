package cuda

import (
	"fmt"
	"os"
	"strings"
	"testing"
)

// The list of architectures matches build.sh, and a GPU runs code of its own generation, or PTX.
func TestKernels(t *testing.T) {
	b, err := os.ReadFile("../../../cuda/built/build.sh")
	if err != nil {
		t.Fatal(err)
	}
	for arch, suffix := range map[string]string{"amd64": "", "arm64": "_aarch64"} {
		want := "fatbin \"${module%%:*}" + suffix + ".fatbin\" \"${module##*:}\" " + strings.Trim(fmt.Sprint(machineCode[arch]), "[]") + "\n"
		if !strings.Contains(string(b), want) {
			t.Errorf("build.sh does not contain %q", want)
		}
	}
	for compute, want := range map[string]string{
		"7.5": "", "8.0": "sm_80", "8.6": "sm_80", "8.7": "sm_80", "8.9": "sm_80", "9.0": "sm_90", "10.0": "sm_100", "10.3": "sm_100",
		"11.0": "PTX", "12.0": "sm_120", "12.1": "sm_120", "13.0": "PTX", "": "", "x": "",
	} {
		if got := machineCodeFor(machineCode["amd64"], compute); got != want {
			t.Errorf("%q: %q, want %q", compute, got, want)
		}
	}
	for compute, want := range map[string]string{
		"7.2": "", "8.7": "PTX", "9.0": "sm_90", "10.0": "sm_100", "10.3": "sm_100", "11.0": "PTX", "12.0": "PTX", "12.1": "sm_121",
	} {
		if got := machineCodeFor(machineCode["arm64"], compute); got != want {
			t.Errorf("arm64, %q: %q, want %q", compute, got, want)
		}
	}
}
