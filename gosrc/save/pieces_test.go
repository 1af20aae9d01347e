package save_test

import (
	"bytes"
	"fmt"
	"github.com/overwire/overwire/gosrc/save"
	"os"
	"path/filepath"
	"testing"
)

// Tensors in several pieces of memory, cut anywhere, give the same file as contiguous tensors: plain, compressed, in
// column parts and staged.
func TestPieces(t *testing.T) {
	r := newRand(t)
	in := some(r)
	places := make([]save.Input, len(in))
	for i, one := range in {
		places[i] = save.Input{Name: one.Name, DType: one.DType, Shape: one.Shape}
		pieces := [][]byte{{}}
		for rest := one.Data; len(rest) > 0; {
			n := 1 + r.IntN(len(rest))
			pieces = append(pieces, bytes.Clone(rest[:n]), nil)
			rest = rest[n:]
		}
		places[i].Pieces = pieces
	}
	for name, spec := range map[string]save.Spec{
		"plain.safetensors": {}, "small.safetensors": {Compress: true, Digests: true}, "parts.safetensors": {Compress: true, Parts: 4},
		"staged.safetensors": {Compress: true, ChunkBytes: 8192, Staging: &save.Staging{}},
	} {
		dir := t.TempDir()
		var files [2][]byte
		for k, inputs := range [][]save.Input{in, places} {
			spec.Path = filepath.Join(dir, fmt.Sprint(k)+name)
			write(t, spec, inputs)
			files[k], _ = os.ReadFile(spec.Path)
		}
		if len(files[0]) == 0 || !bytes.Equal(files[0], files[1]) {
			t.Errorf("%s: files of %d and %d bytes differ", name, len(files[0]), len(files[1]))
		}
	}
}
