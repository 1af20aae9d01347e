package relay

// The cores that a rank reads on, and the ranks that share them.

import (
	"cmp"
	"runtime"

	"golang.org/x/sys/unix"

	"github.com/overwire/overwire/gosrc/device/cuda"
	"github.com/overwire/overwire/gosrc/internal/nodes"
)

// coresAndRanks says on how many cores this rank reads, and with how many ranks it shares them.
// On a host of several nodes these are cores near its GPU.
func coresAndRanks(gpu *cuda.Device, spec *Spec) (cores, ranks int) {
	var may unix.CPUSet
	var place *nodes.Place
	if gpu != nil && gpu.NearNode() != nil && unix.SchedGetaffinity(0, &may) == nil {
		place = gpu.NearNode()
	}
	return countCores(cmp.Or(spec.Here, spec.Ranks), runtime.NumCPU(), place, &may, nodes.System)
}

// countCores is coresAndRanks for that number of ranks, and of cores of the process, or for those
// that it may run on where it has a place; root is where the host's tables are.
func countCores(ranks, cores int, place *nodes.Place, may *unix.CPUSet, root string) (mine, with int) {
	if near, all := place.Within(may); near.Count() > 0 {
		return near.Count(), ranksSharing(place.Ranks(ranks), near.Count(), all)
	}
	return cores, ranksSharing(ranks, cores, nodes.Online(root))
}

// ranksSharing is how many of some ranks share the cores that this process may run on: all of
// them, or, where a launcher has given each rank its own of all cores, 1.
func ranksSharing(ranks, cores, all int) int {
	if all >= ranks && cores <= all/ranks {
		return 1
	}
	return ranks
}
