// Package cuda implements the GPU as a device. It consists of parts: package driver calls NVIDIA's driver, memory
// manages the GPU's memory and pinned host memory, queue does the work of one load, and stream the work on a
// caller's stream. It only uses the driver, through the table of package driver.
//
// A Device is one GPU's primary context, retained once per process with its flags unchanged.
//
// Everything is safe for concurrent use unless it says otherwise. Like the driver, nothing works in a forked
// child.
package cuda

import (
	"fmt"
	"runtime"
)

// machineCode lists, for each GOARCH, the architectures with machine code in cuda/built, as compute capability
// times ten, in ascending order. PTX for ptx serves the rest.
var machineCode = map[string][]int{"amd64": {80, 90, 100, 120}, "arm64": {90, 100, 121}}

const ptx = 80

// KernelCodeFor names the code that a GPU of a compute capability ("8.7") runs. It is machine code of the GPU's
// own generation that is not newer than the GPU ("sm_80"), "PTX", which the driver compiles at first use, or ""
// if there is none.
func KernelCodeFor(compute string) string {
	return machineCodeFor(machineCode[runtime.GOARCH], compute)
}

func machineCodeFor(architectures []int, compute string) string {
	major, minor := 0, 0
	if _, err := fmt.Sscanf(compute, "%d.%d", &major, &minor); err != nil {
		return ""
	}
	best := 0
	for _, a := range architectures {
		if a/10 == major && a%10 <= minor {
			best = a
		}
	}
	switch {
	case best > 0:
		return fmt.Sprintf("sm_%d", best)
	case 10*major+minor >= ptx:
		return "PTX"
	}
	return ""
}
