package cli

// This file examines and reports GPUs for doctor.

import (
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/overwire/overwire/gosrc/device/cuda"
	"github.com/overwire/overwire/gosrc/device/cuda/driver"
	"github.com/overwire/overwire/gosrc/device/cuda/queue"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/nodes"
)

// GPU is doctor's report on CUDA.
type GPU struct {
	// Reason explains why no GPU can be used; "" if one can.
	Reason  string      `json:"reason,omitempty"`
	Driver  string      `json:"driver,omitempty"` // the kernel module's version: "580.159.03"
	CUDA    string      `json:"cuda,omitempty"`   // the CUDA version that the driver supports: "13.0"
	Devices []GPUDevice `json:"devices"`
}

// A GPUDevice describes one GPU, and how overwire would use it.
type GPUDevice struct {
	driver.DeviceInfo
	// Kernels is the kernel code for this GPU: "sm_90", or "PTX", which the driver compiles at first use. If it is "",
	// no code fits, and Unusable explains why.
	Kernels  string `json:"kernels,omitempty"`
	Unusable string `json:"unusable,omitempty"`
	// Unplaced explains why slots or readers cannot be placed on the GPU's NUMA node. It is "" if they can be placed
	// there, or if the host has only one node.
	Unplaced string `json:"unplaced,omitempty"`
	// Wire is the measured rate of pinned copies to the GPU in GB/s; 0 means not measured.
	Wire float64 `json:"wire,omitempty"`
}

// tables is the root of the files that describe the host's NUMA nodes. Tests replace it.
var tables = nodes.System

// wireTime is roughly how long copies to one device are measured.
const wireTime = 200 * time.Millisecond

// diagnoseGPU queries the driver. With measure it also times copies to each GPU, which creates a context there.
func diagnoseGPU(measure bool) GPU {
	version, _ := os.ReadFile("/sys/module/nvidia/version") // may be unreadable
	g := GPU{Driver: strings.TrimSpace(string(version)), Devices: []GPUDevice{}}
	info, err := driver.Info()
	if err != nil {
		g.Reason = reasonText(err)
		return g
	}
	for _, d := range info {
		g.CUDA = d.Driver
		one := GPUDevice{DeviceInfo: d, Kernels: cuda.KernelCodeFor(d.Compute),
			Unplaced: nodes.Near(tables, func() string {
				return d.PCI
			}).Refused()}
		if one.Kernels == "" {
			one.Unusable = fmt.Sprintf("compute capability %s; overwire needs 8.0 or later", d.Compute)
		} else if measure {
			if one.Wire, err = wire(d.Index); err != nil {
				one.Unusable = reasonText(err)
			}
		}
		g.Devices = append(g.Devices, one)
	}
	return g
}

// reasonText returns an error's text without its class. The report says that it is about a GPU.
func reasonText(err error) string {
	return strings.TrimPrefix(errs.Message(err), errs.ErrDevice.Error()+": ")
}

// wire measures the rate of pinned copies in GB/s. Each copy is one slot.
func wire(index int) (float64, error) {
	d, err := cuda.Open(index)
	if err != nil {
		return 0, err
	}
	defer func() { _ = d.Trim() }() // the rate is known; a lost device shows up later
	l, err := d.Queue(queue.DefaultSlots, queue.DefaultSlotBytes)
	if err != nil {
		return 0, err
	}
	defer l.Close()
	count := queue.DefaultSlots
	for {
		took, err := l.MeasureLink(queue.DefaultSlotBytes, count)
		if err != nil {
			return 0, err
		}
		if took >= wireTime/2 {
			return float64(count) * queue.DefaultSlotBytes / took.Seconds() / 1e9, nil
		}
		count *= 4
	}
}

func adviseGPU(d *Diagnosis, add func(format string, args ...any)) {
	if d.GPU.Reason != "" && d.GPU.Driver != "" {
		add("NVIDIA driver %s is installed, but this process cannot use it: if this is a container, start it with "+
			"GPUs (--gpus all, or the NVIDIA runtime)", d.GPU.Driver)
	}
	for _, g := range d.GPU.Devices {
		if g.Unplaced != "" {
			add("cuda:%d is on NUMA node %d, but its slots cannot be placed there and may be on another node: "+
				"%s", g.Index, g.Node,
				g.Unplaced)
		}
		if g.LinkWidth > 0 && g.LinkWidth < 16 && !g.Coherent {
			add("cuda:%d has only %s of 16: this link limits loads", g.Index,
				countText(g.LinkWidth, "PCIe lane"))
		}
	}
}

func (g *GPU) text(several bool, line func(name, format string, args ...any)) {
	driver := "driver " + g.Driver
	if g.Driver == "" {
		driver = "driver of unknown version"
	}
	if g.Reason != "" {
		line("gpu", "none: %s", g.Reason)
		return
	}
	line("gpu", "%s, for CUDA %s", driver, g.CUDA)
	for _, d := range g.Devices {
		link := "unknown link"
		if d.LinkWidth > 0 && d.LinkGen > 0 {
			link = fmt.Sprintf("PCIe %d x%d", d.LinkGen, d.LinkWidth)
		}
		if d.Coherent { // it also has a PCIe link, but transfers use NVLink-C2C
			link = "coherent link"
		}
		at := d.PCI
		if several && d.Node >= 0 {
			at = fmt.Sprintf("%s on NUMA node %d", at, d.Node)
		}
		usable := "kernels " + d.Kernels
		switch {
		case d.Unusable != "":
			usable = "UNUSABLE: " + d.Unusable
		case d.Wire > 0:
			usable += fmt.Sprintf(", copies measured at %.1f GB/s", d.Wire)
		}
		line(fmt.Sprintf("cuda:%d", d.Index), "%s, %s, compute %s, %s, %s at %s, %s", d.Name,
			bytesText(d.Memory), d.Compute, countText(d.Processors, "processor"), link, at, usable)
	}
}
