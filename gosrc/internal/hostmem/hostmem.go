// Package hostmem reports how much memory is available on the host.
package hostmem

import (
	"math"
	"os"
	"path/filepath"
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
	return min(n, leftOfGroups("/sys/fs/cgroup/", "/proc/self/cgroup"))
}

// leftOfGroups returns how many bytes the limits of the process's control group and of the groups above it leave.
// membership is a file like /proc/self/cgroup. In a container, its paths may not exist below mount; the
// container's own group is mount itself.
func leftOfGroups(mount, membership string) int64 {
	left := int64(math.MaxInt64)
	text, _ := os.ReadFile(membership)
	for _, v := range []struct{ is, below, limit, stat, used string }{
		{"0::", "", "memory.max", "memory.stat", "anon "},
		{":memory:", "memory/", "memory.limit_in_bytes", "memory.stat", "total_rss "},
	} {
		group := "/"
		for line := range strings.Lines(string(text)) {
			if _, path, ok := strings.Cut(strings.TrimSpace(line), v.is); ok {
				group = path
			}
		}
		for ; ; group = filepath.Dir(group) {
			at := filepath.Join(mount, v.below, group) + "/"
			// In version 1, a limit of about 2^63 means none.
			if limit, ok := Field(at+v.limit, ""); ok && limit < 1<<62 {
				left = min(left, max(0, limit-usedBy(at+v.stat, v.used)))
			}
			if group == "/" || group == "." {
				break
			}
		}
	}
	return left
}

// usedBy returns how many bytes of a control group the kernel cannot drop. The page cache does not count, except for
// shared memory, which cannot be read from a file again. used is the name of the group's private memory.
func usedBy(stat, used string) int64 {
	bytes, _ := Field(stat, used)
	shmem, isHierarchical := Field(stat, "total_shmem ")
	if !isHierarchical {
		shmem, _ = Field(stat, "shmem ")
	}
	return bytes + shmem
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
