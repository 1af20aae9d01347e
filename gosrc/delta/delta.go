// Package delta creates, applies and compares deltas. A delta contains the changes between two models, tensor by
// tensor, in a file that is small if few bytes have changed.
//
//	Encode   creates a File from two models in memory
//	Read     reads a File from a file or from shards, and checks every byte
//	Write    writes a File as one file or as shards, which appear together
//	Apply    XORs a chain of Files into tensors, in place, on the host and on GPUs
//	Merge    merges a chain into the File that Encode would create from its ends
//	Diff     compares two models without creating a File
//
// docs/format.md section 7 describes the file (file.go) and a chunk (codec/delta). For each tensor, the file has the
// digests of its base and its result.
package delta

import (
	"context"
	"sort"
	"sync/atomic"

	"github.com/overwire/overwire/gosrc/codec/delta"
	"github.com/overwire/overwire/gosrc/codec/digest"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/spawn"
	"github.com/overwire/overwire/gosrc/tensor"
)

// ChunkBytes is the chunk size of the Files that Encode creates.
const ChunkBytes = 256 << 10

// A Tensor is one tensor of a File. Base and New are the digests of its bytes before and after the change.
type Tensor struct {
	Name      string
	DType     tensor.DType
	Shape     []int64
	Bytes     int64
	Base, New digest.Sum
	// Chunks holds the stored bytes of each chunk; unchanged chunks are nil. It is empty if the tensor is unchanged.
	Chunks [][]byte
	// Same is the number of an earlier tensor with the same bytes before and after the change, and so the same
	// Chunks. It is -1 if there is none.
	Same int
}

// A File is a delta in memory. Its Tensors are sorted by name. It is immutable and safe for concurrent use.
type File struct {
	URI      string
	Metadata map[string]string
	Tensors  []Tensor
	ChunkLen int64 // tensor bytes per chunk
	Size     int64 // bytes of the file, or of all its shards

	mark mark
}

// widthOf returns the element size with which tensors of a type are compared.
func widthOf(d tensor.DType) int {
	if d == tensor.C64 {
		return 4
	}
	return max(1, d.Bits()/8)
}

// Stored returns the size of a tensor's chunks. Chunks shared through Same count only for the earlier tensor.
func (t *Tensor) Stored() (n int64) {
	if t.Same >= 0 {
		return 0
	}
	for _, c := range t.Chunks {
		n += int64(len(c))
	}
	return n
}

// Find returns the number of the tensor with the given name, and whether it exists.
func (f *File) Find(name string) (int, bool) {
	i := sort.Search(len(f.Tensors), func(i int) bool { return f.Tensors[i].Name >= name })
	return i, i < len(f.Tensors) && f.Tensors[i].Name == name
}

// Report summarizes a File.
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

// name returns a name for the file in messages.
func (f *File) name() string {
	if f.URI == "" {
		return "the previous delta"
	}
	return errs.RedactURI(f.URI)
}

// A Row describes how a tensor differs. Elements of 4 and 6 bits are counted as bytes, and an element of C64 counts as
// two. Stored is the size of the tensor's delta.
type Row struct {
	Name     string  `json:"name"`
	DType    string  `json:"dtype"`
	Shape    []int64 `json:"shape"`
	Bytes    int64   `json:"bytes"`
	Elements int64   `json:"elements"`
	Changed  int64   `json:"changed"`
	Stored   int64   `json:"stored"`
}

// Diff compares pairs in host memory with the given number of workers. The rows are sorted by name.
func Diff(ctx context.Context, pairs []Pair, workers int, progress func(n int64)) ([]Row, error) {
	ts, at, err := orderPairs(pairs)
	if err != nil {
		return nil, err
	}
	f := &File{Tensors: ts, ChunkLen: ChunkBytes}
	rows := make([]Row, len(ts))
	changes, storedBytes := make([]atomic.Int64, len(ts)), make([]atomic.Int64, len(ts))
	list := make([]int, len(ts))
	for i := range ts {
		t := &ts[i]
		list[i] = i
		rows[i] = Row{Name: t.Name, DType: t.DType.String(), Shape: t.Shape, Bytes: t.Bytes,
			Elements: t.Bytes / int64(widthOf(t.DType))}
	}
	tasks := chunkTasks(f, list)
	err = spawn.Each(ctx, "delta diff", workers, len(tasks), func(n int) error {
		task := tasks[n]
		now, base, _ := bothStates(f, task, &pairs[at[task.tensor]])
		w, size := widthOf(ts[task.tensor].DType), int64(len(now))
		c, err := delta.Changed(now, base, w)
		if err != nil || c == 0 {
			progress(size)
			return err
		}
		b, err := delta.Encode(nil, now, base, w)
		changes[task.tensor].Add(c)
		storedBytes[task.tensor].Add(int64(len(b)))
		progress(size)
		return err
	})
	for i := range rows {
		rows[i].Changed, rows[i].Stored = changes[i].Load(), storedBytes[i].Load()
	}
	return rows, err
}
