package hostmem

import (
	"math"
	"os"
	"path/filepath"
	"testing"
)

// In both versions, the result is the control group's limit minus its usage, or unlimited if there is no limit.
func TestLeft(t *testing.T) {
	for name, c := range map[string]struct {
		files map[string]string
		want  int64
	}{
		"none":            {nil, math.MaxInt64},
		"2":               {map[string]string{"memory.max": "1000\n", "memory.stat": "anon 300\nfile 500\n"}, 700},
		"2 without limit": {map[string]string{"memory.max": "max\n", "memory.stat": "anon 300\n"}, math.MaxInt64},
		"1":               {map[string]string{"memory/memory.limit_in_bytes": "1000\n", "memory/memory.stat": "cache 500\nrss 1\ntotal_rss 300\n"}, 700},
		"1 over it":       {map[string]string{"memory/memory.limit_in_bytes": "1000\n", "memory/memory.stat": "total_rss 1300\n"}, 0},
		"1 without limit": {map[string]string{"memory/memory.limit_in_bytes": "9223372036854771712\n"}, 9223372036854771712},
	} {
		group := t.TempDir() + "/"
		for file, text := range c.files {
			if err := os.MkdirAll(filepath.Dir(group+file), 0o700); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(group+file, []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		if got := leftOfGroup(group); got != c.want {
			t.Errorf("%s: %d, want %d", name, got, c.want)
		}
	}
}
