// Package driver calls NVIDIA's driver. The table of its functions is filled at first use, so the engine can be built,
// imported and used on machines without a driver. The package also combines driver calls for a device in C
// (context.h), and describes GPUs. Package cuda, which handles chunks and queues, calls that C code directly.
//
// All functions are safe for concurrent use. Like the driver, none of them works in a forked child.
package driver

// A DeviceInfo describes one GPU.
type DeviceInfo struct {
	Index      int    `json:"index"`
	Name       string `json:"name"`
	Memory     int64  `json:"memory"`  // bytes
	Compute    string `json:"compute"` // compute capability such as "9.0"
	Processors int    `json:"processors"`
	PCI        string `json:"pci"`        // "0000:01:00.0"
	Node       int    `json:"node"`       // nearest NUMA node; -1 if unknown
	LinkWidth  int    `json:"link_width"` // lanes; 0 if unknown
	LinkGen    int    `json:"link_gen"`   // PCI Express generation; 0 if unknown
	// Coherent means that the GPU reads host memory through the host's page tables, as on Grace Hopper.
	Coherent bool   `json:"coherent"`
	Driver   string `json:"driver"` // CUDA version of the driver, such as "13.0"
}
