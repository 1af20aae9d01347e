// Package hostmem tells how much memory the host has left.
package hostmem

import (
	"math"
	"os"
	"strconv"
	"strings"
)

// Available is how many bytes the process could still use, those of the page cache
// among them: free memory, or less in a control group.
func Available() int64 {
	n := int64(math.MaxInt64)
	if v, ok := Field("/proc/meminfo", "MemAvailable:"); ok {
		n = v << 10
	}
	const group = "/sys/fs/cgroup/"
	if limit, ok := Field(group+"memory.max", ""); ok {
		used, _ := Field(group+"memory.stat", "anon ")
		n = min(n, max(0, limit-used))
	}
	return n
}

// Field returns the number after a word at the beginning of a line of a file.
func Field(path, word string) (int64, bool) {
	b, err := os.ReadFile(path)
	if err != nil {
		return 0, false
	}
	for line := range strings.Lines(string(b)) {
		if rest, ok := strings.CutPrefix(line, word); ok {
			n, err := strconv.ParseInt(strings.Fields(rest + " 0")[0], 10, 64)
			return n, err == nil
		}
	}
	return 0, false
}
