//go:build cgo && owfake

package load

import (
	"testing"

	"github.com/overwire/overwire/gosrc/device/cuda"
)

// On a GPU, too: two loads of which one follows the other have one queue in turn.
func TestAfterFake(t *testing.T) {
	end := cuda.Fake(1 << 30)
	path, want := write(t, "m", []int64{3000, 70}, []int64{0}, []int64{5})
	m := opened(t, Spec{URIs: []string{path}})
	follows(t, m, want, "cuda:0")
	m.Close()
	if left := end(); left != "" {
		t.Errorf("left behind: %s", left)
	}
}
