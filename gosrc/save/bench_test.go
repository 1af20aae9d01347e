package save

import (
	"github.com/overwire/overwire/gosrc/format"
	"path/filepath"
	"testing"
)

// BenchmarkWrite is the rate of tensor bytes with one core and with two, plain
// and compressed, to a file that is brought to the disk; copy is memcpy of the
// same bytes in the same run. What was written is verified first.
func BenchmarkWrite(b *testing.B) {
	r := fixedRand()
	var in []Input
	total := 0
	w := gaussian(r, 2048, 2048)
	for _, n := range []string{"a", "b", "c", "d", "e", "f", "g", "h"} {
		d := append([]byte(nil), w...)
		d[0] = n[0] // no aliases
		in = append(in, Input{n, 15, []int64{2048, 2048}, d})
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
		spec Spec
	}{
		{"plain/1", Spec{Threads: 1}}, {"plain/2", Spec{Threads: 2}},
		{"compressed/1", Spec{Compress: true, Threads: 1}}, {"compressed/2", Spec{Compress: true, Threads: 2}},
		{"compressed-parts8/2", Spec{Compress: true, Threads: 2, Parts: 8}},
	} {
		c.spec.Path = filepath.Join(b.TempDir(), "m")
		b.Run(c.name, func(b *testing.B) {
			rep := write(b, c.spec, in)
			if _, err := Verify(bg, nil, []string{c.spec.Path}, format.Access{}, false); err != nil {
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
					if _, err := Verify(bg, nil, []string{c.spec.Path}, format.Access{}, false); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
	}
}
