// Package hostmem reports how much memory is available on the host.
package hostmem

import (
	"math"
	"os"
	"strconv"
	"strings"
)

// Available returns how many bytes the process can still use, including the page cache: the available memory,
// or less in a control group.
func Available() int64 {
	n := int64(math.MaxInt64)
	if v, ok := Field("/proc/meminfo", "MemAvailable:"); ok {
		n = v << 10
	}
	return min(n, leftOfGroup("/sys/fs/cgroup/"))
}

// leftOfGroup returns how many bytes the limit of a control group leaves, for versions 1 and 2. In version 1, a
// limit of about 2^63 means none. The page cache does not count as used, because it can be dropped.
func leftOfGroup(group string) int64 {
	for _, v := range []struct{ limit, stat, used string }{
		{"memory.max", "memory.stat", "anon "},
		{"memory/memory.limit_in_bytes", "memory/memory.stat", "total_rss "},
	} {
		if limit, ok := Field(group+v.limit, ""); ok {
			usage, _ := Field(group+v.stat, v.used)
			return max(0, limit-usage)
		}
	}
	return math.MaxInt64
}

// Field returns the number after a word at the beginning of a line in a file.
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
