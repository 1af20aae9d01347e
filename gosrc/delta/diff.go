package delta

// This file compares two models in host memory.

import (
	"context"
	"sync/atomic"

	"github.com/overwire/overwire/gosrc/codec/delta"
	"github.com/overwire/overwire/gosrc/internal/spawn"
)

// A Row says how a tensor differs. Elements of 4 and 6 bits are counted as bytes, elements of C64 as two. Stored is
// the size of the tensor's delta.
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
