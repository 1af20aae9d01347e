package face

import (
	"encoding/binary"

	"github.com/overwire/overwire/gosrc/tensor"
)

// PackTable puts the tensors of a model into one buffer, which C turns into
// Python tuples in one go. All integers are little-endian:
//
//	u64 tensors, u64 dtype names
//	each dtype name, by code:  u64 length, bytes
//	each tensor:               u64 name length, u64 dtype code, u64 rank,
//	                           i64 dims[rank], i64 bytes, stored, source, alias, name bytes
//
// where the reader is table.c in the room bind/core.
func PackTable(ix *tensor.Index) []byte {
	n := 16 + 16*(tensor.NumDTypes+1)
	for i := range ix.Tensors {
		n += 7*8 + 8*len(ix.Tensors[i].Shape) + len(ix.Tensors[i].Name)
	}
	b := make([]byte, 0, n)
	put := func(v int64) { b = binary.LittleEndian.AppendUint64(b, uint64(v)) }
	put(int64(len(ix.Tensors)))
	put(int64(tensor.NumDTypes + 1))
	for d := range tensor.NumDTypes + 1 {
		name := tensor.DType(d).String()
		put(int64(len(name)))
		b = append(b, name...)
	}
	for i := range ix.Tensors {
		t := &ix.Tensors[i]
		put(int64(len(t.Name)))
		put(int64(t.DType))
		put(int64(len(t.Shape)))
		for _, d := range t.Shape {
			put(d)
		}
		put(t.Bytes)
		put(t.Stored)
		put(int64(t.Source))
		put(int64(t.Alias))
		b = append(b, t.Name...)
	}
	return b
}
