//go:build owfake

package relay_test

import (
	"testing"

	"github.com/overwire/overwire/gosrc/load/loadtest"
	"github.com/overwire/overwire/gosrc/save"
)

// Eight ranks get the bytes of whole tensors, of rows and columns, and of only columns, on GPUs and on the host, from
// compressed and plain files with tied, empty and odd tensors.
func TestEightRanksExchange(t *testing.T) {
	for _, compress := range []bool{true, false} {
		path, _, _ := loadtest.WriteModel(t, save.Spec{Compress: compress, ChunkBytes: 64 << 10}, "tied", 1<<20)
		g := newRanked(t, 8, path)
		for _, where := range []string{"cuda:0", "cpu"} {
			for _, cut := range []string{"", "some", "columns"} {
				c := trial{Where: where, Cut: cut}
				g.fine(c, g.try(c))
			}
		}
	}
}
