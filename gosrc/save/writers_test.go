package save_test

import (
	"github.com/overwire/overwire/gosrc/save"
	"os"
	"path/filepath"
	"testing"
)

// Files that are written concurrently or staged are the same as files that are written one by one.
func TestWritersAtOnce(t *testing.T) {
	r := newRand(t)
	var in []save.Input
	for i := range 40 {
		in = append(in, bf16(string(rune('a'+i)), r, 10+i, 64))
	}
	var want save.Report
	for i, spec := range []save.Spec{{Threads: 1}, {Threads: 32}, {Threads: 32, Staging: &save.Staging{}}} {
		spec.Path, spec.Compress, spec.Shard, spec.ChunkBytes = t.TempDir()+"/m.safetensors", true, 12_000, 4096
		got := write(t, spec, in)
		if i == 0 {
			want = got
			continue
		}
		if len(got.Files) < 12 || len(got.Files) != len(want.Files) || got.BytesOut != want.BytesOut {
			t.Fatalf("%+v, one by one %+v", got, want)
		}
		for k, path := range got.Files {
			a, errA := os.ReadFile(want.Files[k])
			b, errB := os.ReadFile(path)
			if errA != nil || errB != nil || string(a) != string(b) ||
				filepath.Base(path) != filepath.Base(want.Files[k]) {
				t.Fatalf("file %d: %s differs from %s (%v, %v)", k, path, want.Files[k], errA, errB)
			}
		}
	}
}
