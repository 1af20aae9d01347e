// Package cuda is the GPU as a device, made of parts: package driver is NVIDIA's driver, memory the GPU's memory and
// pinned memory of the host, queue the work of one load, and stream the work on a caller's stream. It uses only the
// driver, by the table of package driver.
//
// A Device is one GPU's primary context, retained once per process, its flags unchanged.
//
// Everything is safe for concurrent use unless it says otherwise. Nothing works in a forked child, as the driver does
// not.
package cuda

import (
	"fmt"
	"runtime"
)

// machineCode lists, for each GOARCH, the architectures with machine code in cuda/built,
// in the order of compute capability times ten; PTX for ptx serves the rest.
var machineCode = map[string][]int{"amd64": {80, 90, 100, 120}, "arm64": {90, 100, 121}}

const ptx = 80

// KernelCodeFor names the code that a GPU of a compute capability ("8.7") runs: machine
// code of its own generation that is not newer than itself ("sm_80"), "PTX", which
// the driver compiles at first use, or "" if there is none.
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
