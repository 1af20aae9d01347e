package codec

import (
	"bytes"
	"errors"
	"testing"

	"github.com/overwire/overwire/gosrc/codec/codectest"
	"github.com/overwire/overwire/gosrc/codec/x16"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/tensor"
)

// Decode follows the chunk record, and refuses a record that is not supported or whose sizes differ from its buffers.
func TestDecode(t *testing.T) {
	src := bytes.Repeat([]byte{0x12, 0x3f, 0x80, 0x3e}, 1<<12)
	var e x16.Encoder
	packed, st, ok := e.Encode(nil, src, x16.BF16)
	if !ok {
		t.Fatal("data with two distinct values was not compressed")
	}
	n, m := uint32(len(src)), uint32(len(packed))
	for _, c := range []struct {
		name string
		src  []byte
		rec  tensor.Chunk
		want error
	}{
		{"raw", src, tensor.Chunk{Stored: n, Logical: n}, nil},
		{"X16", packed, tensor.Chunk{Stored: m, Logical: n, Codec: 1, Transform: 1, SegTiles: st}, nil},
		{"raw with a transform", src, tensor.Chunk{Stored: n, Logical: n, Transform: 1}, errs.ErrCorrupt},
		{"X16 without a transform", packed, tensor.Chunk{Stored: m, Logical: n, Codec: 1, SegTiles: st},
			errs.ErrCorrupt},
		{"X16 with an unknown transform", packed,
			tensor.Chunk{Stored: m, Logical: n, Codec: 1, Transform: 9, SegTiles: st}, errs.ErrCorrupt},
		{"no tiles per segment", packed, tensor.Chunk{Stored: m, Logical: n, Codec: 1, Transform: 1}, errs.ErrCorrupt},
		{"a reserved codec", src, tensor.Chunk{Stored: n, Logical: n, Codec: 2}, errs.ErrNotSupported},
		{"a record of a different size", src, tensor.Chunk{Stored: n, Logical: n - 1}, errs.ErrArgument},
	} {
		dst := make([]byte, len(src))
		if err := Decode(dst, c.src, c.rec); !errors.Is(err, c.want) || c.want == nil && !bytes.Equal(dst, src) {
			t.Errorf("%s: %v, want %v", c.name, err, c.want)
		}
	}
	if err := Decode(nil, nil, tensor.Chunk{}); err != nil {
		t.Error("an empty chunk:", err)
	}
}

// Raw chunks pass the codec test suite.
func TestRaw(t *testing.T) {
	c := codectest.Codec{
		Encode: func(dst, src []byte) ([]byte, uint16, bool) { return append(dst, src...), 0, true },
		Decode: func(dst, src []byte, _ uint16) error {
			return Decode(dst, src, tensor.Chunk{Stored: uint32(len(src)), Logical: uint32(len(dst))})
		},
	}
	codectest.Run(t, c, []codectest.Sample{
		{Name: "one byte", Data: []byte{7}},
		{Name: "text", Data: []byte("some bytes of a tensor")},
	}, 1)
}

// Known matches the tables of docs/format.md. Raw is allowed for every dtype, and X16 only for the pairs listed in
// 3.1. The planes transform `bytes` (3.6) is allowed for every dtype, and the others only for their types.
func TestKnown(t *testing.T) {
	want := map[tensor.DType][]uint8{
		tensor.BF16: {1}, tensor.F16: {2}, tensor.F32: {3}, tensor.C64: {3},
		tensor.F8E4M3: {4}, tensor.F8E4M3FNUZ: {4}, tensor.F8E5M2: {5}, tensor.F8E5M2FNUZ: {5},
		tensor.I8: {6, 7, 8}, tensor.U8: {6, 7, 8}, tensor.F4: {7}, tensor.F8E8M0: {8}, tensor.Bool: {8},
		tensor.I16: {6, 7, 8}, tensor.U16: {6, 7, 8}, tensor.I32: {6, 7, 8}, tensor.U32: {6, 7, 8},
		tensor.I64: {6, 7, 8}, tensor.U64: {6, 7, 8},
	}
	planes := map[tensor.DType][]uint8{
		tensor.BF16: {1, 5}, tensor.F16: {1, 5}, tensor.F32: {1, 6}, tensor.C64: {1, 6}, tensor.F64: {1, 7},
		tensor.I16: {1, 2}, tensor.U16: {1, 2}, tensor.I32: {1, 3}, tensor.U32: {1, 3}, tensor.I64: {1, 4},
		tensor.U64: {1, 4},
	}
	for d := tensor.DType(0); int(d) <= tensor.NumDTypes+1; d++ {
		if Known(tensor.CodecRaw, 0, d) != d.Valid() || Known(tensor.CodecRaw, 1, d) || Known(2, 0, d) {
			t.Errorf("%v: wrong result for raw", d)
		}
		for tr := range uint8(12) {
			if got := Known(tensor.CodecX16, tr, d); got != bytes.Contains(want[d], []byte{tr}) {
				t.Errorf("%v, transform %d: Known returned %v", d, tr, got)
			}
			listed := planes[d]
			if listed == nil {
				listed = []uint8{1}
			}
			if got := Known(tensor.CodecPlanes, tr, d); got != (d.Valid() && bytes.Contains(listed, []byte{tr})) {
				t.Errorf("%v, transform %d of planes: known %v", d, tr, got)
			}
		}
	}
}
