//go:build owfake

package load

import (
	"testing"

	"github.com/overwire/overwire/gosrc/device/cuda"
	"github.com/overwire/overwire/gosrc/job"
	"github.com/overwire/overwire/gosrc/save"
	"github.com/overwire/overwire/gosrc/tensor"
)

// A load to a GPU uses exactly the estimated memory: slots on the device and in pinned memory, and tensors in their
// final dtype if they are cast during the load.
func TestEstimateFake(t *testing.T) {
	end := cuda.Fake(1 << 30)
	path := t.TempDir() + "/m.safetensors"
	var in []save.Input
	for _, d := range []tensor.DType{tensor.BF16, tensor.F32, tensor.U8, tensor.F64} {
		in = append(in, save.Input{Name: d.String(), DType: d, Shape: []int64{300, 100},
			Data: make([]byte, 300*100*d.Bits()/8)})
	}
	if _, err := save.Write(t.Context(), job.New("save"), save.Spec{Path: path, Compress: true}, in); err != nil {
		t.Fatal(err)
	}
	m := opened(t, Spec{URIs: []string{path}})
	o, err := EstimateMemory(m, nil, Prospect{Device: "cuda:0", DType: "F32", Item: 4})
	if err != nil {
		t.Fatal(err)
	}
	l, rep := ended(t, m, Options{Device: "cuda:0", Cast: "F32"})
	landed := int64(0)
	for i, x := range m.Index().Tensors {
		mem, _, d, ok := l.Take(i)
		if !ok {
			t.Fatalf("%q has not landed", x.Name)
		}
		landed += mem.Bytes
		// The caller casts F64 tensors, so they land with twice the size that they have after the cast.
		if stays := 300 * 100 * int64(d.Bits()/8) / map[bool]int64{true: 2,
			false: 1}[d == tensor.F64]; o.Bytes[i] != stays {
			t.Errorf("%q: %d bytes, estimated %d", x.Name, stays, o.Bytes[i])
		}
		mem.Release()
	}
	l.Close()
	if o.Peak != landed+300*100*4 {
		t.Errorf("a peak of %d, %d landed", o.Peak, landed)
	}
	if ring := rep.Stages.RingBytes; o.Pinned != o.Staging || o.Staging != ring {
		t.Errorf("a ring of %d bytes, estimated %d and %d", ring, o.Staging, o.Pinned)
	}
	m.Close()
	if left := end(); left != "" {
		t.Errorf("left behind: %s", left)
	}
}
