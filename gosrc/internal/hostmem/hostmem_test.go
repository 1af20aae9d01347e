package hostmem

import (
	"math"
	"os"
	"path/filepath"
	"testing"
)

// For control groups of versions 1 and 2, the result is the limit of the process's group, or of a group above it, minus
// the memory that the kernel cannot drop. Without a limit, it is unlimited. If the group's path does not exist, as in a
// container, the mount itself is the group.
func TestLeft(t *testing.T) {
	const none = math.MaxInt64
	for name, c := range map[string]struct {
		membership string
		files      map[string]string
		want       int64
	}{
		"none":            {"", map[string]string{}, none},
		"2":               {"0::/\n", map[string]string{"memory.max": "1000\n", "memory.stat": "anon 300\nfile 500\n"}, 700},
		"2 with shmem":    {"0::/\n", map[string]string{"memory.max": "1000\n", "memory.stat": "anon 300\nfile 500\nshmem 200\n"}, 500},
		"2 without limit": {"0::/\n", map[string]string{"memory.max": "max\n", "memory.stat": "anon 300\n"}, none},
		"2, a unit": {"0::/a/b\n", map[string]string{"a/b/memory.max": "1000\n", "a/b/memory.stat": "anon 300\n",
			"a/memory.max": "max\n", "memory.stat": "anon 1\n"}, 700},
		"2, the group above": {"0::/a/b\n", map[string]string{"a/b/memory.max": "max\n", "a/memory.max": "1000\n",
			"a/memory.stat": "anon 400\n"}, 600},
		"2, another path in the container": {"0::/host/path\n", map[string]string{"memory.max": "1000\n"}, 1000},
		"1": {"9:pids:/\n4:memory:/\n", map[string]string{"memory/memory.limit_in_bytes": "1000\n",
			"memory/memory.stat": "cache 500\nrss 1\nshmem 9\ntotal_rss 300\ntotal_shmem 100\n"}, 600},
		"1, a group": {"4:memory:/a\n", map[string]string{"memory/a/memory.limit_in_bytes": "1000\n",
			"memory/a/memory.stat": "total_rss 300\n", "memory/memory.limit_in_bytes": "9223372036854771712\n"}, 700},
		"1 over it":       {"", map[string]string{"memory/memory.limit_in_bytes": "1000\n", "memory/memory.stat": "total_rss 1300\n"}, 0},
		"1 without limit": {"", map[string]string{"memory/memory.limit_in_bytes": "9223372036854771712\n"}, none},
	} {
		group := t.TempDir() + "/"
		c.files["membership"] = c.membership
		for file, text := range c.files {
			if err := os.MkdirAll(filepath.Dir(group+file), 0o700); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(group+file, []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		if got := leftOfGroups(group, group+"membership"); got != c.want {
			t.Errorf("%s: %d, want %d", name, got, c.want)
		}
	}
}
