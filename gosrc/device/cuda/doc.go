// Package cuda implements the GPU as a device. It has four parts: package driver calls NVIDIA's driver, memory manages
// device memory and pinned host memory, queue does the work of one load, and stream does work on a caller's stream.
// The CUDA runtime is not used.
//
// A Device is one GPU's primary context, retained once per process with its flags unchanged.
//
// All functions are safe for concurrent use unless documented otherwise. Like the driver, none of them works in a
// forked child.
package cuda

import (
	"fmt"
	"runtime"
)

// machineCode lists, for each GOARCH, the GPU architectures that cuda/built has machine code for, as compute capability
// times ten, in ascending order. Other architectures use PTX for compute capability ptx.
var machineCode = map[string][]int{"amd64": {80, 90, 100, 120}, "arm64": {90, 100, 121}}

const ptx = 80

// KernelCodeFor names the code that GPUs of a compute capability ("8.7") run. "sm_80", for example, is machine code for
// the same major and an equal or lower minor version. "PTX" means that the driver compiles the code at first use, and
// "" that overwire has no code for these GPUs.
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
