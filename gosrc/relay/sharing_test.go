package relay

import (
	"os"
	"path/filepath"
	"testing"
)

// Ranks share the host's cores unless each has its own; a list that cannot be read
// means that they share.
func TestSharing(t *testing.T) {
	file := filepath.Join(t.TempDir(), "online")
	for _, c := range []struct {
		list               string
		ranks, cores, want int
	}{
		{"0-63\n", 4, 64, 4}, {"0-63\n", 4, 16, 1}, {"0-63\n", 4, 17, 4}, {"0-3,8-11\n", 2, 8, 2}, {"0-3,8-11\n", 2, 4, 1},
		{"0\n", 2, 1, 2}, {"0-63\n", 1, 64, 1}, {"", 4, 1, 4}, {"3-1\n", 4, 1, 4}, {"0-99999999999999999999\n", 4, 1, 4}, {"0-70000\n", 4, 1, 4}, {"-1\n", 4, 1, 4}, {"0,,2\n", 4, 1, 4},
	} {
		if err := os.WriteFile(file, []byte(c.list), 0o600); err != nil {
			t.Fatal(err)
		}
		if got := sharing(c.ranks, c.cores, file); got != c.want {
			t.Errorf("%q: %d of %d ranks share %d cores, want %d", c.list, got, c.ranks, c.cores, c.want)
		}
	}
	if got := sharing(3, 1, file+".missing"); got != 3 {
		t.Error(got)
	}
}
