package verify

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/overwire/overwire/gosrc/codec/digest"
	"github.com/overwire/overwire/gosrc/format"
	"github.com/overwire/overwire/gosrc/save"
	"github.com/overwire/overwire/gosrc/save/savetest"
)

// Stored digests match the tensors' bytes for any parts and chunks. If a container stores none, the same digests are
// computed.
func TestKeptDigests(t *testing.T) {
	in := some(newRand(t))
	for _, parts := range []int{1, 4} {
		for _, keeps := range []bool{true, false} {
			p := filepath.Join(t.TempDir(), "m")
			write(t, save.Spec{Path: p, Compress: true, Parts: parts, ChunkBytes: 4096, Digests: keeps}, in)
			rep, err := Digests(bg, nil, []string{p}, format.Access{}, nil)
			if err != nil {
				t.Fatal(err)
			}
			if keeps != (rep.Kept == len(in)) || keeps != (rep.Bytes == 0) || len(rep.Tensors) != len(in) {
				t.Errorf("%d parts, stored %v: %d stored, %d bytes", parts, keeps, rep.Kept, rep.Bytes)
			}
			want := read(t, p)
			for _, x := range rep.Tensors {
				if x.Digest != digest.Of(want[x.Name].Data).String() {
					t.Errorf("%d parts, stored %v: %s: %s", parts, keeps, x.Name, x.Digest)
				}
			}
			if _, err := Verify(bg, nil, []string{p}, format.Access{}, false); err != nil {
				t.Error(err)
			}
		}
	}
}

// The golden files of formats 1.3 and 1.4 load with their stored digests, and the writer still writes the file of 1.4.
// It was written with: go test ./gosrc/verify -run TestGoldenDigests -args write-goldens
func TestGoldenDigests(t *testing.T) {
	in := savetest.GoldenTensors()
	golden := filepath.Join(goldens, "digests-1.4", "container.safetensors")
	spec := save.Spec{Path: filepath.Join(t.TempDir(), "x.safetensors"), Compress: true, Digests: true}
	if slices.Contains(os.Args, "write-goldens") {
		spec.Path = golden
		_ = os.MkdirAll(filepath.Dir(golden), 0o755)
	}
	write(t, spec, in)
	if sha256Of(t, spec.Path) != sha256Of(t, golden) {
		t.Error("the writer has changed: add a new version folder for the new format")
	}
	for _, path := range []string{golden, filepath.Join(goldens, "digests-1.3", "container.safetensors")} {
		same(t, in, read(t, path))
		rep, err := Digests(bg, nil, []string{path}, format.Access{}, nil)
		if err != nil || rep.Kept != len(in) {
			t.Fatal(rep.Kept, err)
		}
		if _, err := Verify(bg, nil, []string{path}, format.Access{}, false); err != nil {
			t.Error(err)
		}
	}
}
