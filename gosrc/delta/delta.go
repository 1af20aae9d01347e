// Package delta makes, applies and compares deltas. A delta holds the changes between two
// models, tensor by tensor, in a file that is small if little has changed.
//
//	Encode   two models in memory become a File
//	Read     a file, or the shards of a folder, become a File, after every byte was checked
//	Write    a File becomes a file or shards, which appear together
//	Apply    a chain of Files is XORed into tensors, in place, on the host and on GPUs
//	Merge    a chain becomes one File, the same that Encode makes of its ends
//	Diff     two models are compared, without a File
//
// docs/format.md section 7 describes the file (file.go) and a chunk
// (codec/delta). Each tensor names its base and its result by digest.
package delta

import (
	"sort"

	"github.com/overwire/overwire/gosrc/codec/digest"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/tensor"
)

// ChunkBytes is the chunk size in files that Encode makes.
const ChunkBytes = 256 << 10

// A Tensor is one tensor of a File. Base and New are the digests of its
// bytes before and after.
type Tensor struct {
	Name      string
	DType     tensor.DType
	Shape     []int64
	Bytes     int64
	Base, New digest.Sum
	// Chunks holds the stored bytes of each chunk, nil for an unchanged one. It is
	// empty if the tensor is unchanged.
	Chunks [][]byte
	// Same is the number of an earlier tensor of the file with the same bytes before and
	// after, and so with the same Chunks; -1: none.
	Same int
}

// A File is a delta in memory, with Tensors sorted by name. It is immutable and safe
// for concurrent use.
type File struct {
	URI      string
	Metadata map[string]string
	Tensors  []Tensor
	ChunkLen int64 // bytes of one chunk of a tensor
	Size     int64 // bytes of the file, or of its shards

	mark mark
}

// widthOf returns the size of the elements by which bytes of a type are compared.
func widthOf(d tensor.DType) int {
	if d == tensor.C64 {
		return 4
	}
	return max(1, d.Bits()/8)
}

// Stored returns the bytes of a tensor's chunks. Those of Same are counted at the
// earlier tensor.
func (t *Tensor) Stored() (n int64) {
	if t.Same >= 0 {
		return 0
	}
	for _, c := range t.Chunks {
		n += int64(len(c))
	}
	return n
}

// Find returns the tensor with a name.
func (f *File) Find(name string) (int, bool) {
	i := sort.Search(len(f.Tensors), func(i int) bool { return f.Tensors[i].Name >= name })
	return i, i < len(f.Tensors) && f.Tensors[i].Name == name
}

// Report summarises a File.
func (f *File) Report() (r Report) {
	for i := range f.Tensors {
		t := &f.Tensors[i]
		r.Tensors++
		r.Bytes += t.Bytes
		if len(t.Chunks) > 0 {
			r.Changed++
		}
	}
	r.Stored = f.Size
	return r
}

// chunkLength returns the logical size of chunk k of a tensor.
func (f *File) chunkLength(t *Tensor, k int) int {
	return int(min(f.ChunkLen, t.Bytes-int64(k)*f.ChunkLen))
}

// name returns the URI for messages.
func (f *File) name() string {
	if f.URI == "" {
		return "the previous delta"
	}
	return errs.RedactURI(f.URI)
}
