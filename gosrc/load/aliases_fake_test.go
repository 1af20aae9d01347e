//go:build owfake

package load

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/overwire/overwire/gosrc/device/cuda"
)

// On a GPU, aliases of any shape load the right bytes, whole and in blocks.
func TestAliasesOfPartsFake(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 3))
	end := cuda.Fake(1 << 30)
	path, bytesOf := aliased(t, r)
	m := opened(t, Spec{URIs: []string{path}})
	loadsBlocks(t, r, m, Options{Device: "cuda:0"}, bytesOf)
	m.Close()
	if left := end(); left != "" {
		t.Errorf("left behind: %s", left)
	}
}
