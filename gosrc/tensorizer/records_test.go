package tensorizer

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"testing"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/source"
	disk "github.com/overwire/overwire/gosrc/source/file"
	"github.com/overwire/overwire/gosrc/tensor"
)

// A changed bit in a local file's index never gives a tensor a different name, dtype, shape, offset or size than its
// record. In any source, a tensor with data never reads as zeros because the index was changed.
func TestIndexIsComparedWithRecords(t *testing.T) {
	whole := file(t, []Item{
		{Name: "x.a", Type: Parameter, Text: "<f4", Dims: []int64{2, 3}, Bytes: 24},
		{Name: "x.b", Type: Buffer, Text: "<V2\x00torch.bfloat16", Dims: []int64{3}, Bytes: 6},
		{Name: "x.m", Type: Parameter, Text: "<f4", Dims: []int64{4, 5}},
	}, [][]byte{a(0), make([]byte, 6), nil}, 200, 0)
	path := filepath.Join(t.TempDir(), "x.tensors")
	index := func(b []byte, isLocal bool) ([]tensor.Tensor, error) {
		var src source.Source = bytesSource(b)
		if isLocal {
			if err := os.WriteFile(path, b, 0o600); err != nil {
				t.Fatal(err)
			}
			f, err := disk.Open(path)
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			src = f
		}
		ix, _, err := Index(t.Context(), src, b, nil, nil)
		if err != nil {
			return nil, err
		}
		return ix.Tensors, nil
	}
	want, err := index(whole, true)
	if err != nil || len(want) != 3 {
		t.Fatal(want, err)
	}
	changed := func(at int, to []byte) []byte {
		b := bytes.Clone(whole)
		copy(b[at:], to)
		return b
	}
	end := headSize + bytes.Index(whole[headSize:], []byte("x.m")) + 60 // in the padding of the index
	for at := headSize; at < end; at++ {
		for bit := range 8 {
			got, err := index(changed(at, []byte{whole[at] ^ 1<<bit}), true)
			if err == nil && !reflect.DeepEqual(got, want) || err != nil && !errs.Classed(err) {
				t.Fatalf("bit %d of byte %d: %+v, %v", bit, at, got, err)
			}
		}
	}
	size := headSize + bytes.Index(whole[headSize:], le.AppendUint64(nil, 24)) // size of x.a's data
	for _, isLocal := range []bool{true, false} {
		if got, err := index(changed(size, make([]byte, 8)), isLocal); !errors.Is(err, errs.ErrFormat) {
			t.Errorf("data that the changed index hides, local %v: %+v, %v", isLocal, got, err)
		}
	}
}
