package save

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"testing"
)

// Tensors whose bytes lie in several places, cut anywhere, become the very file that they
// become in one place, plain, compressed, in column parts and staged.
func TestPieces(t *testing.T) {
	r := newRand(t)
	in := some(r)
	places, pieces := make([]Input, len(in)), map[int][][]byte{}
	for i, one := range in {
		places[i] = Input{Name: one.Name, DType: one.DType, Shape: one.Shape}
		pieces[i] = [][]byte{{}}
		for rest := one.Data; len(rest) > 0; {
			n := 1 + r.IntN(len(rest))
			pieces[i] = append(pieces[i], bytes.Clone(rest[:n]), nil)
			rest = rest[n:]
		}
	}
	for name, spec := range map[string]Spec{
		"plain.safetensors": {}, "small.safetensors": {Compress: true, Digests: true}, "parts.safetensors": {Compress: true, Parts: 4},
		"staged.safetensors": {Compress: true, ChunkBytes: 8192, Staged: func() {}},
	} {
		dir := t.TempDir()
		var files [2][]byte
		for k, inputs := range [][]Input{in, places} {
			spec.Path = filepath.Join(dir, fmt.Sprint(k)+name)
			if k == 1 {
				spec.Pieces = pieces
			}
			write(t, spec, inputs)
			files[k], _ = os.ReadFile(spec.Path)
		}
		if len(files[0]) == 0 || !bytes.Equal(files[0], files[1]) {
			t.Errorf("%s: %d and %d bytes, or others", name, len(files[0]), len(files[1]))
		}
	}
}
