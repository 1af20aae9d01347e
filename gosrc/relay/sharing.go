package relay

// This file counts the processes of a host that share its cores.

import (
	"os"
	"strconv"
	"strings"
)

// cpuOnline lists the cores of the host that run.
const cpuOnline = "/sys/devices/system/cpu/online"

// sharing is how many of the ranks of a host share the cores that this process may
// run on: all of them, or, where a launcher has given each rank its own, 1. online is a
// file that lists the cores of the host.
func sharing(ranks, cores int, online string) int {
	text, err := os.ReadFile(online)
	if err != nil {
		return ranks
	}
	if all := coresOf(string(text)); all >= ranks && cores <= all/ranks {
		return 1
	}
	return ranks
}

// maxCores is more than any host has.
const maxCores = 1 << 16

// coresOf counts the cores of a list of the kernel's, as "0-3,8"; 0: it is none.
func coresOf(list string) (n int) {
	for part := range strings.SplitSeq(strings.TrimSpace(list), ",") {
		low, high, two := strings.Cut(part, "-")
		a, err := strconv.Atoi(low)
		b := a
		if two && err == nil {
			b, err = strconv.Atoi(high)
		}
		if err != nil || a < 0 || b < a || b >= maxCores {
			return 0
		}
		n += b - a + 1
	}
	return n
}
