package nodes

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"runtime"
	"strings"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// tree creates a folder with kernel tables.
func tree(t *testing.T, files map[string]string) string {
	t.Helper()
	root := t.TempDir()
	for name, text := range files {
		path := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return root
}

// gpu adds a GPU to files.
func gpu(files map[string]string, pci, node string) {
	dir := "bus/pci/devices/" + pci + "/"
	files[dir+"vendor"], files[dir+"class"], files[dir+"numa_node"] = "0x10de\n", "0x030200\n", node
}

// two returns the tables of a host with two nodes that have these cores and four GPUs each.
func two(first, second string) map[string]string {
	const at = "devices/system/node/"
	files := map[string]string{at + "online": "0-1\n", at + "node0/cpulist": first + "\n",
		at + "node1/cpulist": second + "\n"}
	for i := range 8 {
		gpu(files, fmt.Sprintf("0000:%02x:00.0", i+1), fmt.Sprint(i/4, "\n"))
	}
	// Devices that are not NVIDIA GPUs do not count.
	files["bus/pci/devices/0000:09:00.0/vendor"], files["bus/pci/devices/0000:09:00.0/class"] = "0x8086\n", "0x030000\n"
	files["bus/pci/devices/0000:0a:00.0/vendor"], files["bus/pci/devices/0000:0a:00.0/class"] = "0x10de\n", "0x068000\n"
	return files
}

func near(root, pci string) *Place { return Near(root, func() string { return pci }) }

// Near reads a host's tables. Invalid tables give no Place and no error.
func TestNear(t *testing.T) {
	const at = "devices/system/node/"
	numa := "bus/pci/devices/0000:05:00.0/numa_node"
	for _, c := range []struct {
		name string
		edit func(map[string]string)
		want int // node of GPU 4; -1 means unknown
	}{
		{"two nodes", func(map[string]string) {}, 1},
		{"no tables", func(f map[string]string) { clear(f) }, -1},
		{"one node", func(f map[string]string) { f[at+"online"] = "0\n" }, -1},
		{"no list of nodes", func(f map[string]string) { delete(f, at+"online") }, -1},
		{"an empty list of nodes", func(f map[string]string) { f[at+"online"] = "\n" }, -1},
		{"an invalid list of nodes", func(f map[string]string) { f[at+"online"] = "0-x\n" }, -1},
		{"a node without a table", func(f map[string]string) { delete(f, at+"node0/cpulist") }, -1},
		{"an invalid core list", func(f map[string]string) { f[at+"node0/cpulist"] = "0-99999999999999999999" }, -1},
		{"the GPU's node has no cores", func(f map[string]string) { f[at+"node1/cpulist"] = "\n" }, -1},
		{"the other node has no cores", func(f map[string]string) { f[at+"node0/cpulist"] = "" }, -1},
		{"three nodes, one with only memory", func(f map[string]string) {
			f[at+"online"], f[at+"node2/cpulist"] = "0-2", ""
		}, 1},
		{"no node for the GPU", func(f map[string]string) { delete(f, numa) }, -1},
		{"node -1", func(f map[string]string) { f[numa] = "-1\n" }, -1},
		{"a node that does not exist", func(f map[string]string) { f[numa] = "7\n" }, -1},
		{"a node that is not a number", func(f map[string]string) { f[numa] = "one" }, -1},
		{"a node number above the maximum", func(f map[string]string) {
			f[at+"online"], f[at+"node5000/cpulist"], f[numa] = "0,5000", "64", "5000"
		}, -1},
	} {
		files := two("0-31", "32-63")
		c.edit(files)
		asked := 0
		p := Near(tree(t, files), func() string { asked++; return "0000:05:00.0" })
		if got := -1; (p == nil) != (c.want < 0) || p != nil && p.Node != c.want {
			t.Errorf("%s: %+v, want node %d", c.name, p, got)
		}
		if (c.name == "one node" || c.name == "no tables") && asked > 0 {
			t.Errorf("%s: pci was called", c.name)
		}
	}
	if p := near(tree(t, two("0-31", "32-63")), "../../../../etc"); p != nil {
		t.Errorf("%+v", p)
	}
	if all := Read(tree(t, two("0-1,4", "2-3"))); !reflect.DeepEqual(all,
		[]Node{{0, []int{0, 1, 4}}, {1, []int{2, 3}}}) {
		t.Errorf("%+v", all)
	}
}

// The kernel's lists are parsed. Invalid lists give no cores.
func TestCores(t *testing.T) {
	for text, want := range map[string]int{"0-63\n": 64, "0": 1, "0-3,8-11": 8, "": 0, "3-1": 0,
		"0-99999999999999999999": 0, "0-70000": 0, "-1": 0, "0,,2": 0, "0-": 0,
		strings.Repeat("0-65535,", 1<<10) + "0": 0} {
		if got := len(Cores(text)); got != want {
			t.Errorf("%.20q: %d cores, want %d", text, got, want)
		}
	}
	root := tree(t, map[string]string{"devices/system/cpu/online": "0-3,8\n"})
	if n := Online(root); n != 5 {
		t.Error(n)
	}
	if n := Online(root + "/none"); n != 0 {
		t.Error(n)
	}
}

// The number of ranks on a node is at most its number of GPUs. If the host has more ranks than GPUs, all count.
func TestRanks(t *testing.T) {
	p := near(tree(t, two("0-31", "32-63")), "0000:05:00.0")
	for ranks, want := range map[int]int{1: 1, 2: 2, 4: 4, 8: 4, 9: 9} {
		if got := p.Ranks(ranks); got != want {
			t.Errorf("of %d ranks, %d are on node 1, want %d", ranks, got, want)
		}
	}
	if got := (*Place)(nil).Ranks(8); got != 8 {
		t.Error(got)
	}
}

// affinity returns the cores on which this thread may run.
func affinity(t *testing.T) (set unix.CPUSet) {
	t.Helper()
	if err := unix.SchedGetaffinity(0, &set); err != nil {
		t.Fatal(err)
	}
	return set
}

// first returns a core of the set.
func first(set unix.CPUSet) int {
	for c := range 1024 {
		if set.IsSet(c) {
			return c
		}
	}
	return 0
}

// A thread is restricted to the cores of the node that the process may use, and its cores are restored
// afterwards. If the process may use none of them, neither the thread nor its memory is placed.
func TestRun(t *testing.T) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	had := affinity(t)
	core := first(had)
	p := near(tree(t, two(fmt.Sprintf("%d,1000-1020", core), "1021-1023")), "0000:01:00.0")
	if mine, all := p.Within(&had); mine.Count() != 1 || all != 22 {
		t.Errorf("%d of %d cores", mine.Count(), all)
	}
	bad := errors.New("bad")
	err := p.Run(func() error {
		var want unix.CPUSet
		want.Set(core)
		if got := affinity(t); got != want {
			t.Errorf("the thread runs on %v", got)
		}
		return bad
	})
	if got := affinity(t); !errors.Is(err, bad) || got != had {
		t.Errorf("%v; afterwards the thread runs on %v", err, got)
	}
	for name, p := range map[string]*Place{"none": nil,
		"cores of others": near(tree(t, two("0", "1021-1023")), "0000:05:00.0")} {
		if mine, _ := p.Within(&had); mine.Count() != 0 {
			t.Errorf("%s: %d cores", name, mine.Count())
		}
		if err := p.Run(func() error {
			if got := affinity(t); got != had {
				t.Errorf("%s: the thread runs on %v", name, got)
			}
			return bad
		}); !errors.Is(err, bad) {
			t.Error(err)
		}
		if err := p.Bind(make([]byte, 1)); err != nil { // does nothing; binding would fail: not a page
			t.Errorf("%s: %v", name, err)
		}
		if why := p.Refused(); (why != "") != (p != nil) {
			t.Errorf("%s: %q", name, why)
		}
	}
}

// Memory is on the node to which it was bound before its first use. A container may refuse this, which Refused
// reports.
func TestBind(t *testing.T) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	p := near(tree(t, two(fmt.Sprint(first(affinity(t))), "1023")), "0000:01:00.0")
	page, err := unix.Mmap(-1, 0, 1<<20, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Munmap(page) }()
	err = p.Bind(page)
	if why := p.Refused(); (why == "") != (err == nil) {
		t.Errorf("Refused returned %q, Bind %v", why, err)
	}
	if errors.Is(err, unix.EPERM) || errors.Is(err, unix.ENOSYS) {
		t.Skipf("this container refuses mbind: %v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	var policy int32
	var mask [maxNodes / 64]uint64
	const ofAddress = 2 // MPOL_F_ADDR
	if _, _, no := unix.Syscall6(unix.SYS_GET_MEMPOLICY, uintptr(unsafe.Pointer(&policy)),
		uintptr(unsafe.Pointer(&mask)), maxNodes+1, uintptr(unsafe.Pointer(&page[4096])), ofAddress, 0); no != 0 {
		t.Skipf("this container does not report memory policies: %v", no)
	}
	if policy != preferred || mask[0] != 1 {
		t.Errorf("policy %d, nodes %x", policy, mask[0])
	}
	absent := *p
	absent.Node = 1000
	if err := absent.Bind(page); err == nil || absent.Refused() == "" {
		t.Error("memory was bound to a node that does not exist")
	}
}
