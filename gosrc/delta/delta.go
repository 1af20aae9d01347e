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
	"fmt"
	"slices"
	"sort"
	"sync/atomic"

	"github.com/overwire/overwire/gosrc/codec/delta"
	"github.com/overwire/overwire/gosrc/codec/digest"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/format/safetensors"
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

const shardKey = "overwire.delta"

// A mark contains the number of a shard and the number of shards. of is 0 for a delta without shards. table is the
// digest of the file's table. Each shard is a separate file with the metadata entry
//
//	overwire.delta: "2 of 5 of 00112233445566778899aabbccddeeff"
//
// The last word is the digest of the digests of all shards' tables, in order. It is the same in all shards of a delta
// and differs between deltas.
type mark struct {
	number, of int
	set        digest.Sum
	table      digest.Sum
}

func (m *mark) String() string { return fmt.Sprintf("%d of %d of %v", m.number, m.of, m.set) }

// readMark reads the mark from the metadata and removes its entry.
func readMark(f *File) error {
	text, ok := f.Metadata[shardKey]
	if !ok {
		return nil
	}
	delete(f.Metadata, shardKey)
	m := &f.mark
	var hex string
	if _, err := fmt.Sscanf(text, "%d of %d of %32s", &m.number, &m.of, &hex); err != nil {
		return formatError("invalid metadata entry %q: %q", shardKey, text)
	}
	if _, err := fmt.Sscanf(hex, "%16x%16x", &m.set.High, &m.set.Low); err != nil || m.String() != text ||
		m.number < 1 || m.number > m.of {
		return formatError("invalid metadata entry %q: %q", shardKey, text)
	}
	return nil
}

// setOf returns the digest of a set of shards, given the digests of their tables.
func setOf(tables []digest.Sum) digest.Sum {
	var b []byte
	for _, t := range tables {
		b = le.AppendUint64(le.AppendUint64(b, t.High), t.Low)
	}
	return digest.Of(b)
}

// splitFile divides a File into shards, sorted by name, with at most `most` bytes of chunks each; 0 means one shard.
// All chunks of a tensor, and all tensors that share them, are in the same shard. It also returns the table of each
// shard.
func splitFile(f *File, most int64) (shards []*File, tables [][]byte, err error) {
	in := make([]int, len(f.Tensors))
	n, size := 0, int64(0)
	for i := range f.Tensors {
		t := &f.Tensors[i]
		if t.Same >= 0 {
			in[i] = in[t.Same]
			continue
		}
		storedBytes := t.Stored()
		if most > 0 && size > 0 && storedBytes > most-size {
			n, size = n+1, 0
		}
		in[i] = n
		size += storedBytes
	}
	shards = make([]*File, n+1)
	for k := range shards {
		shards[k] = &File{URI: f.URI, Metadata: f.Metadata, ChunkLen: f.ChunkLen}
	}
	place := make([]int, len(f.Tensors))
	for i, t := range f.Tensors {
		s := shards[in[i]]
		place[i] = len(s.Tensors)
		if t.Same >= 0 {
			t.Same = place[t.Same]
		}
		s.Tensors = append(s.Tensors, t)
	}
	var sums []digest.Sum
	for _, s := range shards {
		table, err := encodeTable(s)
		if err != nil {
			return nil, nil, err
		}
		tables, sums = append(tables, table), append(sums, digest.Of(table))
	}
	for k, s := range shards {
		if n > 0 {
			s.mark = mark{number: k + 1, of: n + 1, set: setOf(sums)}
		}
	}
	return shards, tables, nil
}

// joinFiles joins the files of one delta into one File. index is their index.json, or nil.
func joinFiles(uri string, files []*File, index *safetensors.Shards) (*File, error) {
	if index != nil {
		for _, w := range index.Weights {
			if _, ok := files[w.File].Find(w.Name); !ok {
				return nil, errs.Locate("delta", files[w.File].URI, w.Name, -1,
					formatError("the index.json lists this tensor, but it is not in this file"))
			}
		}
	}
	if len(files) == 1 && files[0].mark.of == 0 {
		return files[0], nil
	}
	files = slices.Clone(files)
	slices.SortFunc(files, func(a, b *File) int { return a.mark.number - b.mark.number })
	first := files[0].mark
	var sums []digest.Sum
	for k, f := range files {
		var err error
		switch m := f.mark; {
		case m.of == 0:
			err = errs.New(errs.ErrArgument,
				"this delta has only one file, but %d files were given: pass one file, or a list of deltas as a chain",
				len(files))
		case m.set != first.set || m.of != first.of || f.ChunkLen != files[0].ChunkLen:
			err = formatError("this is shard %d of a different delta than %s", m.number, files[0].name())
		case k > 0 && files[k-1].mark.number == m.number:
			err = formatError("this is shard %d, but so is %s", m.number, files[k-1].name())
		}
		if err != nil {
			return nil, errs.Locate("delta", f.URI, "", -1, err)
		}
		sums = append(sums, f.mark.table)
	}
	if len(files) != first.of {
		return nil, errs.Locate("delta", uri, "", -1,
			errs.New(errs.ErrNotFound, "only %d of the delta's %d shards were given: pass their folder or index.json",
				len(files), first.of))
	}
	if setOf(sums) != first.set {
		return nil, errs.Locate("delta", uri, "", -1,
			errs.New(errs.ErrCorrupt, "the shards' tables were not written together: use the shards of one save"))
	}
	return mergeFiles(uri, files)
}

func mergeFiles(uri string, files []*File) (*File, error) {
	type place struct{ file, tensor int }
	out := &File{URI: uri, Metadata: files[0].Metadata, ChunkLen: files[0].ChunkLen}
	var all []place
	at := make([][]int, len(files)) // for each file, the numbers of its tensors in out
	for k, f := range files {
		out.Size += f.Size
		at[k] = make([]int, len(f.Tensors))
		for i := range f.Tensors {
			all = append(all, place{k, i})
		}
	}
	name := func(p place) string { return files[p.file].Tensors[p.tensor].Name }
	sort.Slice(all, func(i, k int) bool { return name(all[i]) < name(all[k]) })
	for i, p := range all {
		if i > 0 && name(all[i-1]) == name(p) {
			return nil, errs.Locate("delta", files[p.file].URI, name(p), -1,
				formatError("another shard also has this tensor"))
		}
		t := files[p.file].Tensors[p.tensor]
		at[p.file][p.tensor] = i
		if t.Same >= 0 {
			t.Same = at[p.file][t.Same] // already set, because names are sorted
		}
		out.Tensors = append(out.Tensors, t)
	}
	return out, nil
}
