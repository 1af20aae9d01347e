package save_test

import (
	"github.com/overwire/overwire/gosrc/format"
	"github.com/overwire/overwire/gosrc/save"
	"github.com/overwire/overwire/gosrc/verify"
	"path/filepath"
	"testing"
)

// BenchmarkWrite measures tensor bytes written and synced to disk per second, with one and two cores, plain and
// compressed. The case copy measures memcpy of the same bytes. The written file is verified first.
func BenchmarkWrite(b *testing.B) {
	r := fixedRand()
	var in []save.Input
	total := 0
	w := gaussian(r, 2048, 2048)
	for _, n := range []string{"a", "b", "c", "d", "e", "f", "g", "h"} {
		d := append([]byte(nil), w...)
		d[0] = n[0] // no aliases
		in = append(in, save.Input{Name: n, DType: 15, Shape: []int64{2048, 2048}, Data: d})
		total += len(d)
	}
	dst := make([]byte, len(w))
	b.Run("copy", func(b *testing.B) {
		b.SetBytes(int64(total))
		for b.Loop() {
			for i := range in {
				copy(dst, in[i].Data)
			}
		}
	})
	for _, c := range []struct {
		name string
		spec save.Spec
	}{
		{"plain/1", save.Spec{Threads: 1}}, {"plain/2", save.Spec{Threads: 2}},
		{"compressed/1", save.Spec{Compress: true, Threads: 1}}, {"compressed/2", save.Spec{Compress: true, Threads: 2}},
		{"compressed-parts8/2", save.Spec{Compress: true, Threads: 2, Parts: 8}},
	} {
		c.spec.Path = filepath.Join(b.TempDir(), "m")
		b.Run(c.name, func(b *testing.B) {
			rep := write(b, c.spec, in)
			if _, err := verify.Verify(bg, nil, []string{c.spec.Path}, format.Access{}, false); err != nil {
				b.Fatal(err)
			}
			b.SetBytes(int64(total))
			for b.Loop() {
				write(b, c.spec, in)
			}
			b.ReportMetric(rep.Ratio, "ratio")
		})
		if c.spec.Compress {
			b.Run("verify/"+c.name, func(b *testing.B) {
				b.SetBytes(int64(total))
				for b.Loop() {
					if _, err := verify.Verify(bg, nil, []string{c.spec.Path}, format.Access{}, false); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
	}
}
