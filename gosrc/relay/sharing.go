package relay

// This file decides how many cores a rank reads on, and counts the ranks that share them.

import (
	"cmp"
	"runtime"

	"golang.org/x/sys/unix"

	"github.com/overwire/overwire/gosrc/device/cuda"
	"github.com/overwire/overwire/gosrc/internal/nodes"
)

// coresAndRanks returns how many cores this rank reads on, and how many ranks share them. On a host of several
// NUMA nodes these are cores near its GPU.
func coresAndRanks(gpu *cuda.Device, spec *Spec) (cores, ranks int) {
	var may unix.CPUSet
	var place *nodes.Place
	if gpu != nil && gpu.NearNode() != nil && unix.SchedGetaffinity(0, &may) == nil {
		place = gpu.NearNode()
	}
	return countCores(cmp.Or(spec.Here, spec.Ranks), runtime.NumCPU(), place, &may, nodes.System)
}

// countCores is coresAndRanks for a given number of ranks. It counts the process's cores, or, if the rank has a
// place, those of may. root is the folder of the host's tables.
func countCores(ranks, cores int, place *nodes.Place, may *unix.CPUSet, root string) (mine, with int) {
	if near, all := place.Within(may); near.Count() > 0 {
		return near.Count(), ranksSharing(place.Ranks(ranks), near.Count(), all)
	}
	return cores, ranksSharing(ranks, cores, nodes.Online(root))
}

// ranksSharing is how many ranks share the cores that this process may run on. It is all of them, or 1 if a
// launcher has given each rank a part of the host's cores.
func ranksSharing(ranks, cores, all int) int {
	if all >= ranks && cores <= all/ranks {
		return 1
	}
	return ranks
}
