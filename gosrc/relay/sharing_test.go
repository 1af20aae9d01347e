package relay

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/overwire/overwire/gosrc/internal/nodes"
	"github.com/overwire/overwire/gosrc/plan"
)

// Ranks share the host's cores unless each has its own. They also share if the host's number of cores is unknown.
func TestSharing(t *testing.T) {
	for _, c := range []struct{ all, ranks, cores, want int }{
		{64, 4, 64, 4}, {64, 4, 16, 1}, {64, 4, 17, 4}, {8, 2, 8, 2}, {8, 2, 4, 1}, {1, 2, 1, 2}, {64, 1, 64, 1},
		{0, 4, 1, 4}, {3, 4, 1, 4},
	} {
		if got := ranksSharing(c.ranks, c.cores, c.all); got != c.want {
			t.Errorf("%d of %d ranks share %d of %d cores, want %d", got, c.ranks, c.cores, c.all, c.want)
		}
	}
}

// On a host with two nodes of 32 cores and four GPUs each, readers run on the node of their rank's GPU. The ranks of
// a node together have as many readers as it has cores. A rank that may not run there counts cores as on a single node.
func TestDivided(t *testing.T) {
	root := t.TempDir()
	put := func(name, text string) {
		path := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	put("devices/system/cpu/online", "0-63")
	put("devices/system/node/online", "0-1")
	put("devices/system/node/node0/cpulist", "0-15,32-47")
	put("devices/system/node/node1/cpulist", "16-31,48-63")
	for i := range 8 {
		dir := fmt.Sprintf("bus/pci/devices/0000:%02x:00.0/", i+1)
		put(dir+"vendor", "0x10de")
		put(dir+"class", "0x030200")
		put(dir+"numa_node", fmt.Sprint(i/4))
	}
	for _, c := range []struct {
		name    string
		ranks   int
		gpu     int
		may     string // cores that the rank may run on
		cores   int
		readers int
	}{
		{"one rank", 1, 0, "0-63", 32, 16},
		{"two ranks", 2, 5, "0-63", 32, 16},
		{"four ranks, which may all be on one node", 4, 1, "0-63", 32, 8},
		{"four ranks, and the second node", 4, 7, "0-63", 32, 8},
		{"eight ranks", 8, 3, "0-63", 32, 8},
		{"eight ranks, and the second node", 8, 4, "0-63", 32, 8},
		{"more ranks than GPUs", 16, 0, "0-63", 32, 2},
		{"eight ranks, bound to their nodes", 8, 0, "0-15,32-47", 32, 8},
		{"eight ranks, with eight cores each", 8, 0, "0-7", 8, 16},
		{"a rank bound to the other node", 8, 0, "16-31,48-63", 32, 4},
		{"a rank bound to a core of the other node", 8, 0, "17", 1, 2},
		{"a rank bound to cores of both", 8, 0, "12-19", 4, 6},
	} {
		var may unix.CPUSet
		for _, core := range nodes.Cores(c.may) {
			may.Set(core)
		}
		place := nodes.Near(root, func() string { return fmt.Sprintf("0000:%02x:00.0", c.gpu+1) })
		if place == nil || place.Node != c.gpu/4 {
			t.Fatalf("%s: %+v", c.name, place)
		}
		cores, ranks := countCores(c.ranks, may.Count(), place, &may, root)
		readers := plan.Machine{SlotBytes: 1, Cores: cores, Ranks: ranks}.Workers(0)
		if cores != c.cores || readers != c.readers {
			t.Errorf("%s: %d readers on %d cores, want %d on %d", c.name, readers, cores, c.readers, c.cores)
		}
	}
	// On a host with one node, all cores are counted.
	if cores, ranks := countCores(4, 64, nil, nil, root); cores != 64 || ranks != 4 {
		t.Errorf("%d cores, %d ranks", cores, ranks)
	}
}
