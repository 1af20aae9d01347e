package delta

// This file creates Files from two models in memory and from chains of Files.

import (
	"context"
	"slices"
	"strings"
	"sync"

	"github.com/overwire/overwire/gosrc/codec/delta"
	"github.com/overwire/overwire/gosrc/codec/digest"
	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/sizes"
	"github.com/overwire/overwire/gosrc/internal/spawn"
	"github.com/overwire/overwire/gosrc/tensor"
)

// A Pair is a dense tensor before and after a change, at two addresses in host memory (CUDA is 0) or on GPU CUDA - 1.
// The memory must not change before the call returns.
type Pair struct {
	Name      string
	DType     tensor.DType
	Shape     []int64
	New, Base uint64
	CUDA      int32
	Stream    uintptr // the GPU stream that must finish its queued work first
}

// orderPairs returns the tensors of pairs, sorted by name and without chunks, and for each tensor the number of its
// pair.
func orderPairs(pairs []Pair) ([]Tensor, []int, error) {
	at := make([]int, len(pairs))
	for i := range at {
		at[i] = i
	}
	slices.SortFunc(at, func(a, b int) int { return strings.Compare(pairs[a].Name, pairs[b].Name) })
	ts := make([]Tensor, len(pairs))
	for i, k := range at {
		p := &pairs[k]
		n, err := tensor.Size(p.DType, p.Shape)
		if err == nil && (n > 0 && (p.New == 0 || p.Base == 0) || i > 0 && ts[i-1].Name == p.Name) {
			err = errs.New(errs.ErrArgument, "it has no address, or two tensors have this name")
		}
		if err != nil {
			return nil, nil, errs.Locate("delta", "", p.Name, -1, err)
		}
		ts[i] = Tensor{Name: p.Name, DType: p.DType, Shape: p.Shape, Bytes: n, Same: -1}
	}
	return ts, at, nil
}

// Encode creates the delta from the base to the new bytes of each tensor with the given number of workers. The same
// bytes always give the same delta. progress is called with numbers of encoded tensor bytes.
func Encode(ctx context.Context, pairs []Pair, metadata map[string]string, workers int, progress func(n int64)) (*File,
	error) {
	ts, at, err := orderPairs(pairs)
	if err != nil {
		return nil, err
	}
	f := &File{Metadata: metadata, Tensors: ts, ChunkLen: ChunkBytes}
	pair := func(i int) *Pair { return &pairs[at[i]] }
	by := map[int32][]int{}
	for i := range ts {
		ts[i].Chunks = make([][]byte, sizes.CeilDiv(ts[i].Bytes, f.ChunkLen))
		by[pair(i).CUDA] = append(by[pair(i).CUDA], i)
	}
	if err := encodeHost(ctx, f, by[0], pair, workers, progress); err != nil {
		return nil, err
	}
	delete(by, 0)
	for cuda, list := range by {
		if err := encodeGPU(ctx, f, int(cuda-1), list, pair, progress); err != nil {
			return nil, err
		}
	}
	dropUnchanged(f)
	return f, nil
}

// Unite joins Files with different tensors into the File that Encode would create from all their pairs.
func Unite(files []*File, metadata map[string]string) (*File, error) {
	f, err := mergeFiles("", files)
	if err != nil {
		return nil, err
	}
	f.Metadata = metadata
	for i := range f.Tensors {
		f.Tensors[i].Same = -1
	}
	dropUnchanged(f)
	return f, nil
}

// dropUnchanged removes the chunks of unchanged tensors, and shares chunks with an earlier tensor that has the same
// ones.
func dropUnchanged(f *File) {
	type key struct {
		base, now digest.Sum
		bytes     int64
		width     int
	}
	firsts := map[key]int{}
	for i := range f.Tensors {
		t := &f.Tensors[i]
		if !slices.ContainsFunc(t.Chunks, func(c []byte) bool { return len(c) > 0 }) {
			t.Chunks = nil
			continue
		}
		k := key{t.Base, t.New, t.Bytes, widthOf(t.DType)}
		if same, ok := firsts[k]; ok {
			t.Same, t.Chunks = same, f.Tensors[same].Chunks
			continue
		}
		firsts[k] = i
	}
}

type chunkTask struct{ tensor, chunk int }

// chunkTasks returns the chunks of the tensors in list.
func chunkTasks(f *File, list []int) (all []chunkTask) {
	for _, i := range list {
		for k := range sizes.CeilDiv(f.Tensors[i].Bytes, f.ChunkLen) {
			all = append(all, chunkTask{i, int(k)})
		}
	}
	return all
}

// bothStates returns the bytes of a task's chunk after and before the change, and their offset in the tensor.
func bothStates(f *File, task chunkTask, pair *Pair) (now, base []byte, from int64) {
	from = int64(task.chunk) * f.ChunkLen
	size := int64(f.chunkLength(&f.Tensors[task.tensor], task.chunk))
	return device.Bytes(pair.New+uint64(from), size), device.Bytes(pair.Base+uint64(from), size), from
}

// encodeHost encodes the tensors in list, which are in host memory.
func encodeHost(ctx context.Context, f *File, list []int, pair func(i int) *Pair, workers int,
	progress func(n int64)) error {
	type sums struct{ now, base digest.State }
	var mu sync.Mutex
	states, tasks := make([]sums, len(f.Tensors)), chunkTasks(f, list)
	err := spawn.Each(ctx, "delta encode", workers, len(tasks), func(n int) (err error) {
		task := tasks[n]
		t := &f.Tensors[task.tensor]
		now, base, from := bothStates(f, task, pair(task.tensor))
		if t.Chunks[task.chunk], err = delta.Encode(nil, now, base, widthOf(t.DType)); err != nil {
			return err
		}
		var a, b digest.State
		a.Add(from, now)
		if b = a; t.Chunks[task.chunk] != nil {
			b = digest.State{}
			b.Add(from, base)
		}
		mu.Lock()
		states[task.tensor].now.Merge(a)
		states[task.tensor].base.Merge(b)
		mu.Unlock()
		progress(int64(len(now)))
		return nil
	})
	if err != nil {
		return err
	}
	for _, i := range list {
		t := &f.Tensors[i]
		t.New, t.Base = states[i].now.Sum(t.Bytes), states[i].base.Sum(t.Bytes)
	}
	return nil
}

// A link is a tensor in one File of a chain.
type link struct {
	file   *File
	tensor *Tensor
}

// findLinks finds a tensor in the files of a chain and checks that each link starts where the previous one ends. It
// returns nil if no file has the tensor.
func findLinks(chain []*File, name string) ([]link, error) {
	var all []link
	for _, f := range chain {
		i, ok := f.Find(name)
		if !ok {
			continue
		}
		t := &f.Tensors[i]
		if len(all) > 0 {
			last := all[len(all)-1]
			if o := last.tensor; o.DType != t.DType || !slices.Equal(o.Shape, t.Shape) || o.New != t.Base {
				return nil, errs.Locate("delta", f.URI, name, -1, errs.New(errs.ErrBase,
					"it does not follow %s, which gives %v %v with digest %v: this delta needs %v %v with digest %v",
					last.file.name(), o.DType, o.Shape, o.New, t.DType, t.Shape, t.Base))
			}
		}
		all = append(all, link{f, t})
	}
	return all, nil
}

// Merge merges a chain into the delta that Encode would create from the chain's first base and last result. Its
// metadata comes from the last file.
func Merge(ctx context.Context, chain []*File, workers int) (*File, error) {
	if len(chain) == 0 {
		return nil, errs.New(errs.ErrArgument, "no deltas to merge: expected at least one")
	}
	var names []string
	for _, f := range chain {
		for i := range f.Tensors {
			names = append(names, f.Tensors[i].Name)
		}
	}
	slices.Sort(names)
	names = slices.Compact(names)
	out := &File{Metadata: chain[len(chain)-1].Metadata, ChunkLen: ChunkBytes, Tensors: make([]Tensor, len(names))}
	all, list := make([][]link, len(names)), make([]int, len(names))
	for i, name := range names {
		var err error
		if all[i], err = findLinks(chain, name); err != nil {
			return nil, err
		}
		list[i] = i
		first, last := all[i][0], all[i][len(all[i])-1]
		t := &out.Tensors[i]
		*t = *first.tensor
		t.New, t.Same, t.Chunks = last.tensor.New, -1, make([][]byte, sizes.CeilDiv(t.Bytes, out.ChunkLen))
	}
	tasks := chunkTasks(out, list)
	err := spawn.Each(ctx, "delta merge", workers, len(tasks), func(n int) (err error) {
		task := tasks[n]
		t := &out.Tensors[task.tensor]
		t.Chunks[task.chunk], err = mergeLinks(all[task.tensor], int64(task.chunk)*out.ChunkLen,
			out.chunkLength(t, task.chunk))
		return err
	})
	if err != nil {
		return nil, err
	}
	dropUnchanged(out)
	return out, nil
}

// mergeLinks returns the encoded delta of all links for bytes [at, at+n) of a tensor.
func mergeLinks(all []link, at int64, n int) ([]byte, error) {
	var x []byte
	for _, l := range all {
		if len(l.tensor.Chunks) == 0 {
			continue
		}
		if l.file.ChunkLen == ChunkBytes && len(all) == 1 {
			return l.tensor.Chunks[at/ChunkBytes], nil
		}
		if x == nil {
			x = make([]byte, n)
		}
		if err := applyLink(l, x, at); err != nil {
			return nil, err
		}
	}
	if x == nil {
		return nil, nil
	}
	return delta.Encode(nil, x, make([]byte, n), widthOf(all[0].tensor.DType))
}

// applyLink applies the delta of tensor bytes [at, at+len(x)) to x. The file's chunks may have other boundaries.
func applyLink(l link, x []byte, at int64) error {
	f, t := l.file, l.tensor
	for end := at + int64(len(x)); at < end; {
		k := int(at / f.ChunkLen)
		from, size := int64(k)*f.ChunkLen, int64(f.chunkLength(t, k))
		upto := min(end, from+size)
		part := x[:upto-at]
		if c := t.Chunks[k]; len(c) > 0 && from == at && size == upto-at {
			if err := delta.Apply(part, c, widthOf(t.DType)); err != nil {
				return err
			}
		} else if len(c) > 0 {
			whole := make([]byte, size)
			if err := delta.Apply(whole, c, widthOf(t.DType)); err != nil {
				return err
			}
			for i, v := range whole[at-from : upto-from] {
				part[i] ^= v
			}
		}
		x, at = x[upto-at:], upto
	}
	return nil
}
