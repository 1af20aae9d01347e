// Package driver is NVIDIA's driver: the table of its functions, which is filled at first
// use, so that the engine builds, imports and runs where there is none; what is asked of it
// for a device, several calls at once, in C (context.h); and what it says about GPUs.
// Package cuda, which knows chunks and queues, calls that C itself.
//
// Everything is safe for concurrent use. Nothing works in a forked child, as the driver
// does not.
package driver

// A DeviceInfo describes one GPU.
type DeviceInfo struct {
	Index      int    `json:"index"`
	Name       string `json:"name"`
	Memory     int64  `json:"memory"`  // bytes
	Compute    string `json:"compute"` // capability: "9.0"
	Processors int    `json:"processors"`
	PCI        string `json:"pci"`        // "0000:01:00.0"
	Node       int    `json:"node"`       // the NUMA node that it is near; -1: not known
	LinkWidth  int    `json:"link_width"` // lanes; 0: not readable
	LinkGen    int    `json:"link_gen"`   // PCI Express generation; 0: not readable
	// Coherent: the GPU reads the host's memory by the host's own page tables, as over
	// the link of Grace.
	Coherent bool   `json:"coherent"`
	Driver   string `json:"driver"` // CUDA version of the driver: "13.0"
}
