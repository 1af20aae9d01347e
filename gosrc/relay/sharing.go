package relay

// This file determines how many cores a rank reads on, and how many ranks share them.

import (
	"cmp"
	"runtime"

	"golang.org/x/sys/unix"

	"github.com/overwire/overwire/gosrc/device/cuda"
	"github.com/overwire/overwire/gosrc/internal/nodes"
)

// coresAndRanks returns how many cores this rank reads on, and how many ranks share them. On a host with several
// NUMA nodes these are the cores of its GPU's node.
func coresAndRanks(gpu *cuda.Device, spec *Spec) (cores, ranks int) {
	var may unix.CPUSet
	var place *nodes.Place
	if gpu != nil && gpu.NearNode() != nil && unix.SchedGetaffinity(0, &may) == nil {
		place = gpu.NearNode()
	}
	return countCores(cmp.Or(spec.Here, spec.Ranks), runtime.NumCPU(), place, &may, nodes.System)
}

// countCores implements coresAndRanks for a number of ranks. It counts the cores of the place that may
// allows, or all cores of the process if there are none. root is the directory of the host's sysfs.
func countCores(ranks, cores int, place *nodes.Place, may *unix.CPUSet, root string) (mine, with int) {
	if near, all := place.Within(may); near.Count() > 0 {
		return near.Count(), ranksSharing(place.Ranks(ranks), near.Count(), all)
	}
	return cores, ranksSharing(ranks, cores, nodes.Online(root))
}

// ranksSharing returns how many ranks share the cores that this process may run on: all ranks, or 1 if a launcher has
// given each rank its own part of the host's cores.
func ranksSharing(ranks, cores, all int) int {
	if all >= ranks && cores <= all/ranks {
		return 1
	}
	return ranks
}
