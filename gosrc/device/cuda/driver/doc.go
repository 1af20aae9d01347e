// Package driver calls NVIDIA's driver. The table of its functions is filled at first use, so the engine builds,
// imports and runs on machines without a driver. The package also bundles several driver calls for a device in C
// (context.h), and describes GPUs. Package cuda, which knows chunks and queues, calls that C code itself.
//
// Everything is safe for concurrent use. Like the driver, nothing works in a forked child.
package driver

// A DeviceInfo describes one GPU.
type DeviceInfo struct {
	Index      int    `json:"index"`
	Name       string `json:"name"`
	Memory     int64  `json:"memory"`  // bytes
	Compute    string `json:"compute"` // capability: "9.0"
	Processors int    `json:"processors"`
	PCI        string `json:"pci"`        // "0000:01:00.0"
	Node       int    `json:"node"`       // nearest NUMA node; -1 if not known
	LinkWidth  int    `json:"link_width"` // lanes; 0 if not readable
	LinkGen    int    `json:"link_gen"`   // PCI Express generation; 0 if not readable
	// Coherent says that the GPU reads host memory through the host's own page tables, as over the link of Grace.
	Coherent bool   `json:"coherent"`
	Driver   string `json:"driver"` // CUDA version of the driver: "13.0"
}
