package binding

// This file defines the verbs that save, open, apply, merge and compare deltas.

import (
	"bytes"
	"context"
	"time"

	"github.com/overwire/overwire/gosrc/delta"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/format"
	"github.com/overwire/overwire/gosrc/job"
	"github.com/overwire/overwire/gosrc/knob"
	"github.com/overwire/overwire/gosrc/save"
	"github.com/overwire/overwire/gosrc/tensor"
)

type deltaTensors struct{ columns }

type deltaSave struct {
	deltaTensors
	deltaTarget
	Metadata map[string]string `json:"metadata"`
	Encoded  []uint64          `json:"encoded"` // handles that delta_encode returned for other tensors
}

// deltaPart is the result of delta_encode.
type deltaPart struct {
	Handle  uint64  `json:"handle"`
	Seconds float64 `json:"seconds"`
}

func (p deltaPart) owns() uint64 { return p.Handle }

type deltaTarget struct {
	Path    string        `json:"path"`
	Shard   int64         `json:"shard"`  // like save.Spec.Shard, in stored bytes
	Beside  string        `json:"beside"` // folder of the new model, or ""
	Storage format.Access `json:"storage"`
}

func (q deltaTarget) replacedPath() string { return q.Path }

type deltaOpen struct {
	URI     string        `json:"uri"` // also the name in errors if the delta is in memory
	Storage format.Access `json:"storage"`
}

// deltaFile describes an opened delta.
type deltaFile struct {
	deltaTensors
	Handle   uint64            `json:"handle"`
	Metadata map[string]string `json:"metadata"`
	Bases    []string          `json:"bases"` // digests
	News     []string          `json:"news"`
	Stored   []int64           `json:"stored"` // bytes; 0 if unchanged or shared with an earlier tensor
	Changed  int               `json:"changed"`
	Bytes    int64             `json:"bytes"` // bytes of the tensors
	Size     int64             `json:"size"`  // bytes of the file
}

func (f deltaFile) owns() uint64 { return f.Handle }

// deltaApply describes tensors. Their columns are the verb's numbers. DTypes and Shapes list the distinct dtypes and
// shapes, of which a model has few. Streams lists the streams of the GPUs.
type deltaApply struct {
	Files   []uint64  `json:"files"`
	Missing bool      `json:"missing"`
	DTypes  []string  `json:"dtypes"`
	Shapes  [][]int64 `json:"shapes"`
	Streams []int64   `json:"streams"` // index 0 is the host, index 1 + n is GPU n
	Part    string    `json:"part"`    // part of the work: check, change or undo; "" means all
}

type deltaMerge struct {
	deltaTarget
	Files []uint64 `json:"files"`
}

const (
	deltaPair    = 4
	deltaColumns = 5
	pairsOf      = "for each tensor its new address and its base address, 1 + the GPU of both (0 for the host), and " +
		"the GPU's stream"
)

func deltaVerbs() []*Verb {
	return []*Verb{
		started("delta_save",
			"Write a delta between two models, which must not change until the job has ended.", saveDelta).
			tail(pairsOf).onCallersMemory(),
		started("delta_encode",
			"Encode the deltas of tensors for delta_save. The tensors must not change until the job has ended.",
			func(ctx context.Context, j *job.Job, q deltaTensors, n []int64) (deltaPart, error) {
				pairs, err := q.pairs(n, j)
				if err != nil {
					return deltaPart{}, err
				}
				start := time.Now()
				f, err := delta.Encode(ctx, pairs, nil, knob.Workers(0), func(n int64) { j.Bytes.Add(n) })
				if err != nil {
					return deltaPart{}, err
				}
				return deltaPart{keep(f), time.Since(start).Seconds()}, nil
			}).tail(pairsOf).onCallersMemory(),
		started("delta_open", "Read and check a whole delta from a URI or from memory. The memory is copied.",
			func(ctx context.Context, _ *job.Job, q deltaOpen, n []int64) (deltaFile, error) {
				f, err := openDelta(ctx, q, n)
				if err != nil {
					return deltaFile{}, err
				}
				return describe(f), nil
			}).awaited().ints("address", "nbytes").onCallersMemory(),
		started("delta_apply", "Apply a chain of deltas to tensors in place.",
			func(ctx context.Context, j *job.Job, q deltaApply, n []int64) (delta.Report, error) {
				chain, err := getAll[*delta.File](q.Files)
				if err != nil {
					return delta.Report{}, err
				}
				targets, err := q.targets(chain, n)
				if err != nil {
					return delta.Report{}, err
				}
				return delta.Apply(ctx, chain, targets, q.Missing, knob.Workers(0), delta.Part(q.Part))
			}).tail("columns, each with a value per tensor: the file; the number of the tensor in it; the kind; " +
			"1 + the GPU (0 for the host); the address").onCallersMemory(),
		started("delta_merge", "Write a chain of deltas as one delta.",
			func(ctx context.Context, j *job.Job, q deltaMerge, _ []int64) (delta.Report, error) {
				chain, err := getAll[*delta.File](q.Files)
				if err != nil {
					return delta.Report{}, err
				}
				f, err := delta.Merge(ctx, chain, knob.Workers(0))
				if err != nil {
					return delta.Report{}, err
				}
				return q.write(ctx, j, f)
			}),
		started("delta_diff", "Compare two models in host memory, tensor by tensor.",
			func(ctx context.Context, j *job.Job, q deltaTensors, n []int64) ([]delta.Row, error) {
				pairs, err := q.pairs(n, j)
				if err != nil {
					return nil, err
				}
				return delta.Diff(ctx, pairs, knob.Workers(0), func(n int64) { j.Bytes.Add(n) })
			}).tail(pairsOf).onCallersMemory(),
	}
}

// saveDelta encodes the tensors and writes them together with those that have already been encoded.
func saveDelta(ctx context.Context, j *job.Job, q deltaSave, n []int64) (delta.Report, error) {
	pairs, err := q.pairs(n, j)
	if err != nil {
		return delta.Report{}, err
	}
	stages := delta.Begin()
	f, err := delta.Encode(ctx, pairs, q.Metadata, knob.Workers(0), func(n int64) { j.Bytes.Add(n) })
	if err != nil {
		return delta.Report{}, err
	}
	if len(q.Encoded) > 0 {
		parts, err := getAll[*delta.File](q.Encoded)
		if err != nil {
			return delta.Report{}, err
		}
		if f, err = delta.Unite(append(parts, f), q.Metadata); err != nil {
			return delta.Report{}, err
		}
	}
	stages.End("encode")
	r, err := q.write(ctx, j, f)
	stages.End("write")
	r.Stages = stages.List()
	return r, err
}

func (q *deltaTarget) write(ctx context.Context, j *job.Job, f *delta.File) (delta.Report, error) {
	r, err := delta.Write(ctx, j, f, q.Beside, save.Spec{Path: q.Path, Shard: q.Shard, Storage: q.Storage})
	return r, errs.Place("save", q.Path, "", -1, errs.Ended(ctx, err))
}

// targets reads the columns of the tensors that a chain is applied to.
func (q *deltaApply) targets(chain []*delta.File, n []int64) ([]delta.Target, error) {
	kinds := columns{Names: make([]string, len(q.DTypes)), DTypes: q.DTypes, Shapes: q.Shapes}
	types, err := kinds.types(0, 0)
	if err != nil {
		return nil, err
	}
	count := len(n) / deltaColumns
	if len(n)%deltaColumns != 0 {
		return nil, errs.New(errs.ErrArgument, "expected a multiple of 5 numbers, got %d", len(n))
	}
	column := func(k int) []int64 { return n[k*count : (k+1)*count] }
	files, tensors, kind, gpu, at := column(0), column(1), column(2), column(3), column(4)
	targets := make([]delta.Target, count)
	inside := func(v int64, n int) bool { return v >= 0 && v < int64(n) }
	for i := range targets {
		if !inside(files[i], len(chain)) || !inside(tensors[i], len(chain[files[i]].Tensors)) ||
			!inside(kind[i], len(types)) || !inside(gpu[i], len(q.Streams)) {
			return nil, errs.New(errs.ErrArgument, "invalid numbers for tensor %d, in %d numbers", i, len(n))
		}
		targets[i] = delta.Target{Name: chain[files[i]].Tensors[tensors[i]].Name, DType: types[kind[i]],
			Shape: q.Shapes[kind[i]], At: uint64(at[i]), CUDA: int32(gpu[i]), Stream: uintptr(q.Streams[gpu[i]])}
	}
	return targets, nil
}

func (q *deltaTensors) pairs(n []int64, j *job.Job) ([]delta.Pair, error) {
	types, err := q.types(len(n), deltaPair)
	if err != nil {
		return nil, err
	}
	pairs := make([]delta.Pair, len(q.Names))
	for i := range pairs {
		p := n[deltaPair*i:]
		pairs[i] = delta.Pair{Name: q.Names[i], DType: types[i], Shape: q.Shapes[i], New: uint64(p[0]),
			Base: uint64(p[1]), CUDA: int32(p[2]), Stream: uintptr(p[3])}
		if bytes, err := tensor.Size(types[i], q.Shapes[i]); err == nil {
			j.TotalBytes.Add(bytes)
		}
	}
	return pairs, nil
}

func openDelta(ctx context.Context, q deltaOpen, n []int64) (*delta.File, error) {
	if n[0] == 0 {
		return delta.Read(ctx, q.URI, q.Storage.Options)
	}
	b, err := dataAt(uint64(n[0]), n[1])
	if err != nil {
		return nil, err
	}
	return delta.Parse(ctx, q.URI, bytes.Clone(b))
}

func describe(f *delta.File) deltaFile {
	r := f.Report()
	d := deltaFile{Handle: keep(f), Metadata: f.Metadata, Changed: r.Changed, Bytes: r.Bytes, Size: f.Size}
	for i := range f.Tensors {
		t := &f.Tensors[i]
		d.Names, d.DTypes, d.Shapes = append(d.Names, t.Name), append(d.DTypes, t.DType.String()),
			append(d.Shapes, t.Shape)
		d.Bases, d.News, d.Stored = append(d.Bases, t.Base.String()), append(d.News, t.New.String()),
			append(d.Stored, t.Stored())
	}
	return d
}
