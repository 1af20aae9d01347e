// Package delta has the verbs of deltas: what changed between two models, tensor by
// tensor, as a file that is small where little has changed.
//
//	Encode   two models in memory become a File
//	Read     a file, or the shards of a folder, become a File, of which every byte has been checked
//	Write    a File becomes a file or shards, which appear together
//	Apply    a chain of Files is XORed into tensors, in place, on the host and on GPUs
//	Merge    a chain becomes one File, the same that Encode makes of its ends
//	Diff     what differs between two models, without a File
//
// docs/format.md section 7 has the file's layout (file.go) and that of a chunk
// (codec/delta). Each tensor names its base and its result by digest.
package delta

import (
	"sort"

	"github.com/overwire/overwire/gosrc/codec/digest"
	"github.com/overwire/overwire/gosrc/tensor"
)

// ChunkBytes is the size of a chunk of a tensor in files that Encode makes.
const ChunkBytes = 256 << 10

// A Tensor is what a File says of one tensor. Base and New are the digests of its
// bytes before and after.
type Tensor struct {
	Name      string
	DType     tensor.DType
	Shape     []int64
	Bytes     int64
	Base, New digest.Sum
	// Chunks has what is stored of each chunk, nil of one that did not change. It has no
	// elements if nothing of the tensor changed.
	Chunks [][]byte
	// Same is the number of an earlier tensor of the file with the same bytes before and
	// after, whose Chunks these are; -1: none.
	Same int
}

// A File is a delta in memory: Tensors in the order of their names. It is immutable and
// safe for concurrent use.
type File struct {
	URI      string
	Metadata map[string]string
	Tensors  []Tensor
	ChunkLen int64 // bytes of a chunk of a tensor
	Size     int64 // bytes of the file, or of its shards

	mark mark
}

// widthOf is the size of the elements as which bytes of a type are compared.
func widthOf(d tensor.DType) int {
	if d == tensor.C64 {
		return 4
	}
	return max(1, d.Bits()/8)
}

// Stored is how many bytes of chunks a tensor has; those of Same are counted there.
func (t *Tensor) Stored() (n int64) {
	if t.Same >= 0 {
		return 0
	}
	for _, c := range t.Chunks {
		n += int64(len(c))
	}
	return n
}

// Find returns the tensor of a name.
func (f *File) Find(name string) (int, bool) {
	i := sort.Search(len(f.Tensors), func(i int) bool { return f.Tensors[i].Name >= name })
	return i, i < len(f.Tensors) && f.Tensors[i].Name == name
}

// Report sums a File up.
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
