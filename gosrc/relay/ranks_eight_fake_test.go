//go:build owfake

package relay_test

import (
	"testing"

	"github.com/overwire/overwire/gosrc/load/loadtest"
	"github.com/overwire/overwire/gosrc/save"
)

// Eight ranks load whole tensors, rows and columns, or only columns, to GPUs and to the host. The files are compressed
// or plain, with tied, empty and unusual tensors.
func TestEightRanksExchange(t *testing.T) {
	for i, compress := range []bool{true, false} {
		path, _, _ := loadtest.WriteModel(t, save.Spec{Compress: compress, ChunkBytes: 64 << 10}, "tied", 1<<20)
		g := newRanked(t, 8, path)
		for j, where := range []string{"cuda:0", "cpu"} {
			for k, cut := range []string{"", "some", "columns"} {
				if testing.Short() && (i+j+k)%2 != 0 { // still each pair of two of the three
					continue
				}
				c := trial{Where: where, Cut: cut}
				g.fine(c, g.try(c))
			}
		}
	}
}
