package save_test

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/overwire/overwire/gosrc/format"
	"github.com/overwire/overwire/gosrc/internal/regular"
	"github.com/overwire/overwire/gosrc/save"
	"github.com/overwire/overwire/gosrc/tensor"
	"github.com/overwire/overwire/gosrc/verify"
)

// Many small and large tensors, plain or compressed, give the same file for any number of threads and when staged. The
// file passes verification.
func TestSmallTensors(t *testing.T) {
	r := newRand(t)
	var in []save.Input
	for i := range 100 {
		in = append(in, bf16(fmt.Sprintf("large.%d", i), r, 512, 256))
	}
	for i := range 600 {
		n := r.IntN(5000)
		data := make([]byte, n)
		for k := range data {
			data[k] = byte(r.IntN(5))
		}
		in = append(in, save.Input{Name: fmt.Sprintf("small.%d", i), DType: tensor.U8, Shape: []int64{int64(n)}, Data: data})
	}
	for _, spec := range []save.Spec{{}, {Compress: true},
		{Compress: true, Digests: true, Parts: 2, ChunkBytes: 4096}} {
		var first []byte
		for k, threads := range []int{1, 7, 2} {
			spec.Path, spec.Threads = filepath.Join(t.TempDir(), "x.safetensors"), threads
			if spec.Staging = nil; k == 2 {
				spec.Staging = &save.Staging{}
			}
			rep := write(t, spec, in)
			file, err := os.ReadFile(spec.Path)
			if err != nil {
				t.Fatal(err)
			}
			if first == nil {
				first = file
			}
			if !bytes.Equal(file, first) || spec.Compress && rep.Compressed < 100 {
				t.Errorf("%+v: a different file of %d bytes, %d tensors compressed", spec, len(file), rep.Compressed)
			}
			if _, err := verify.Verify(bg, nil, []string{spec.Path}, format.Access{}, false); err != nil {
				t.Errorf("%+v: %v", spec, err)
			}
		}
	}
}

// A save is brief if all its tensors, names and metadata are small.
func TestIsBrief(t *testing.T) {
	dir, err := os.MkdirTemp("/dev/shm", "overwire")
	if err != nil {
		t.Skip(err)
	}
	defer os.RemoveAll(dir)
	if !regular.IsInMemory(dir + "/x") {
		t.Skip("there is no in-memory file system")
	}
	text := strings.Repeat("a", 1<<20)
	tensor := func(name string, n int) save.Input {
		return save.Input{Name: name, DType: tensor.U8, Data: make([]byte, n)}
	}
	for k, c := range []struct {
		spec save.Spec
		in   []save.Input
		want bool
	}{
		{save.Spec{}, []save.Input{tensor("x", 1<<20-1)}, true},
		{save.Spec{}, []save.Input{tensor("x", 1<<20)}, false},
		{save.Spec{}, make([]save.Input, 1<<10), true},
		{save.Spec{}, make([]save.Input, 1<<10+1), false},
		{save.Spec{}, []save.Input{tensor(text, 1)}, false},
		{save.Spec{Metadata: map[string]string{"key": text}}, nil, false},
		{save.Spec{Metadata: map[string]string{text: "value"}}, nil, false},
		{save.Spec{Shard: 1}, nil, false},
		{save.Spec{Staging: &save.Staging{}}, nil, false},
	} {
		c.spec.Path = dir + "/x"
		if got := c.spec.IsBrief(c.in); got != c.want {
			t.Errorf("%d: %v", k, got)
		}
	}
}
