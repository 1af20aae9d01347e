// Package nodes finds the NUMA node of a device, and places threads and memory on it.
//
// It reads the kernel's tables below /sys; tests use another folder. A host with only one node with cores, or
// with unreadable tables, has no Place: a nil *Place is valid, and its methods ignore nodes. Nodes never affect
// results. If a container does not permit placement, loads do not fail, and doctor reports it.
//
// A Place is immutable and safe for concurrent use.
package nodes

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// System is the folder of the kernel's tables.
const System = "/sys"

const (
	maxCores = 1 << 16 // more than any host has
	maxNodes = 1 << 10 // more than the kernel supports

	preferred = 1 // MPOL_PREFERRED
)

// A Node is a NUMA node with cores. Nodes with only memory, such as those of coherent GPUs, run no threads and
// are not used.
type Node struct {
	Number int   `json:"node"`
	Cores  []int `json:"cores"` // online cores
}

// Read returns the nodes with cores, by number, or nil if the tables are invalid.
func Read(root string) (all []Node) {
	for _, n := range readList(root + "/devices/system/node/online") {
		text, err := os.ReadFile(fmt.Sprintf("%s/devices/system/node/node%d/cpulist", root, n))
		if err != nil || n >= maxNodes {
			return nil
		}
		switch cores := Cores(string(text)); {
		case cores != nil:
			all = append(all, Node{n, cores})
		case strings.TrimSpace(string(text)) != "":
			return nil
		}
	}
	return all
}

// Online returns how many cores of the host are online, or 0 if that is unknown.
func Online(root string) int { return len(readList(root + "/devices/system/cpu/online")) }

func readList(file string) []int {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil
	}
	return Cores(string(text))
}

// Cores parses a list in the kernel's format, such as "0-3,8". It returns nil if the list is invalid or empty.
func Cores(text string) (all []int) {
	for part := range strings.SplitSeq(strings.TrimSpace(text), ",") {
		low, high, two := strings.Cut(part, "-")
		a, err := strconv.Atoi(low)
		b := a
		if two && err == nil {
			b, err = strconv.Atoi(high)
		}
		if err != nil || a < 0 || b < a || b >= maxCores || len(all) > maxCores {
			return nil
		}
		for ; a <= b; a++ {
			all = append(all, a)
		}
	}
	return all
}

// Of returns the number of a PCI device's node, or -1 if it is unknown.
func Of(root, pci string) int {
	text, err := os.ReadFile(filepath.Join(root, "bus/pci/devices", filepath.Base(pci), "numa_node"))
	n, bad := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil || bad != nil || n < 0 {
		return -1
	}
	return n
}

// A Place is the node of a device on a host with several nodes.
type Place struct {
	Node  int
	cores []int
	here  int // GPUs on the node
	gpus  int // GPUs of the host
}

// Near returns the Place of a PCI device. It is nil if the host has one node, or if the device's node is unknown. pci
// is only called on hosts with several nodes.
func Near(root string, pci func() string) *Place {
	all := Read(root)
	if len(all) < 2 {
		return nil
	}
	at := Of(root, pci())
	for _, n := range all {
		if n.Number == at {
			p := &Place{Node: at, cores: n.Cores}
			p.countGPUs(root)
			return p
		}
	}
	return nil
}

// countGPUs counts NVIDIA GPUs.
func (p *Place) countGPUs(root string) {
	dirs, _ := filepath.Glob(root + "/bus/pci/devices/*")
	for _, dir := range dirs {
		vendor, _ := os.ReadFile(dir + "/vendor")
		class, _ := os.ReadFile(dir + "/class")
		if strings.TrimSpace(string(vendor)) != "0x10de" || !strings.HasPrefix(string(class), "0x03") {
			continue
		}
		p.gpus++
		if Of(root, filepath.Base(dir)) == p.Node {
			p.here++
		}
	}
}

// Ranks returns how many of a host's ranks may be on this node. The tables do not contain ranks, so it assumes
// one GPU per rank. If there are more ranks than GPUs, it returns ranks.
func (p *Place) Ranks(ranks int) int {
	if p == nil || ranks > p.gpus {
		return ranks
	}
	return max(1, min(ranks, p.here))
}

// Within returns which of the cores in had are on the device's node, and how many cores the node has.
func (p *Place) Within(had *unix.CPUSet) (near unix.CPUSet, all int) {
	if p == nil {
		return near, 0
	}
	for _, c := range p.cores {
		if had.IsSet(c) {
			near.Set(c)
		}
	}
	return near, len(p.cores)
}

// coreSets returns the cores on which this thread may run, and which of them are on the device's node. ok reports
// whether any are.
func (p *Place) coreSets() (had, near unix.CPUSet, ok bool) {
	if p == nil || unix.SchedGetaffinity(0, &had) != nil {
		return had, near, false
	}
	near, _ = p.Within(&had)
	return had, near, near.Count() > 0
}

// Run runs fn on a thread that is restricted to the permitted cores of the device's node, and then restores the
// thread's cores.
func (p *Place) Run(fn func() error) error {
	if p == nil {
		return fn()
	}
	runtime.LockOSThread()
	before, near, ok := p.coreSets()
	if ok = ok && near != before && unix.SchedSetaffinity(0, &near) == nil; !ok {
		runtime.UnlockOSThread()
		return fn()
	}
	defer func() {
		if unix.SchedSetaffinity(0, &before) == nil {
			runtime.UnlockOSThread()
		} // otherwise the thread ends with its goroutine
	}()
	return fn()
}

// Bind requests that b, which begins on an untouched page, is placed in memory of the device's node if there is space.
// It does nothing if this thread may not run on that node, because its writes would then have to cross nodes.
func (p *Place) Bind(b []byte) error {
	if _, _, ok := p.coreSets(); !ok || len(b) == 0 {
		return nil
	}
	const word = 64
	var mask [maxNodes / word]uint64
	mask[p.Node/word] = 1 << (p.Node % word)
	_, _, no := unix.Syscall6(unix.SYS_MBIND, uintptr(unsafe.Pointer(&b[0])), uintptr(len(b)), preferred,
		uintptr(unsafe.Pointer(&mask)), maxNodes+1, 0)
	if no != 0 {
		return no
	}
	return nil
}

// Refused returns why memory or threads cannot be placed on the node, or "" if they can or if there is no Place.
func (p *Place) Refused() string {
	if p == nil {
		return ""
	}
	if _, _, ok := p.coreSets(); !ok {
		return fmt.Sprintf("this process may not run on the cores of node %d", p.Node)
	}
	page, err := unix.Mmap(-1, 0, os.Getpagesize(), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		return err.Error()
	}
	defer func() { _ = unix.Munmap(page) }()
	if err := p.Bind(page); err != nil {
		return fmt.Sprintf("memory cannot be bound to node %d: mbind: %v", p.Node, err)
	}
	return ""
}
