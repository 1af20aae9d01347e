// Package save writes tensors to files. A save classifies the tensors, lays out the files, encodes on all cores,
// writes, and publishes (package publish). Package convert uses it to write the tensors of other files.
//
// Every file is written under a temporary name in its final folder, synced to the disk, and then renamed. If a save is
// stopped by an error, a full disk, a cancel or a kill, readers find either the old file or the new one. The bytes of a
// file depend only on its tensors, its metadata, the Spec and the plain file that a conversion compresses. They do not
// depend on the number of threads. Only encrypted files also depend on random numbers.
//
// The caller's tensors are read in place; those on a GPU are read chunk by chunk. A save allocates only a window of
// chunks (two or three per thread), 16 MiB for trial encodings of small tensors, and, for tensors that a GPU encodes, a
// pinned ring of less than 0.5 GB, which the next save reuses. A staged save holds all stored bytes in host memory.
package save

import (
	"context"
	"time"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/format"
	"github.com/overwire/overwire/gosrc/job"
	"github.com/overwire/overwire/gosrc/knob"
	"github.com/overwire/overwire/gosrc/save/publish"
	"github.com/overwire/overwire/gosrc/stored"
)

// Write saves tensors. It checks every argument before it touches the target's
// folder. The job's counters show its progress; j may be nil.
func Write(ctx context.Context, j *job.Job, spec Spec, in []Input) (Report, error) {
	start := time.Now()
	target, err := Resolve(spec.Path, &spec)
	if err != nil {
		return Report{}, err
	}
	items := itemsIn(in)
	w := NewWriter(target, &spec, j)
	defer w.gpus.close()
	files, err := w.prepare(ctx, items)
	if err != nil {
		return Report{}, errs.Place("save", target.Path, "", -1, errs.Ended(ctx, err))
	}
	defer func() { w.stage.Free() }()
	w.Plan()
	rep, err := w.Write(ctx, files)
	rep.OnGPU = w.onGPU.Load()
	rep.Seconds = time.Since(start).Seconds()
	rep.HideUsers()
	return rep, errs.Place("save", target.Path, "", -1, errs.Ended(ctx, err))
}

func itemsIn(in []Input) []*Item {
	items := make([]*Item, len(in))
	for i := range in {
		t := &in[i]
		items[i] = &Item{name: t.Name, dtype: t.DType, shape: t.Shape, bytes: int64(len(t.Data)), body: memory(t.Data)}
		switch {
		case t.Device != nil:
			items[i].bytes, items[i].body = t.Device.Bytes, &deviceBody{DeviceMemory: t.Device}
		case len(t.Pieces) > 0:
			body := newScattered(t.Pieces)
			items[i].bytes, items[i].body = body.ends[len(body.ends)-1], body
		}
	}
	return items
}

// A Front is the header of a plain file, without its length prefix, and the order of the
// tensors in the file as indexes of the inputs.
type Front struct {
	Header string `json:"header"`
	Order  []int  `json:"order"`
}

// FrontOf returns the header and the tensor order of a plain file. path is for messages; nothing is written.
func FrontOf(path string, metadata map[string]string, in []Input) (Front, error) {
	items := make([]*Item, len(in))
	number := make(map[*Item]int, len(in))
	for i := range in {
		t := &in[i]
		items[i] = &Item{name: t.Name, dtype: t.DType, shape: t.Shape, bytes: int64(len(t.Data))}
		number[items[i]] = i
	}
	if err := checkMetadata(path, metadata); err != nil {
		return Front{}, err
	}
	if err := checkItems(path, items); err != nil {
		return Front{}, err
	}
	order, header, err := layPlain(items, metadata)
	if err != nil {
		return Front{}, err
	}
	front := Front{Header: string(header[8:]), Order: make([]int, len(order))}
	for i, t := range order {
		front.Order[i] = number[t]
	}
	return front, nil
}

// WriteWhole writes a file from bytes in memory. A shard index with the same stem may be next to it.
func WriteWhole(ctx context.Context, path string, b []byte) error {
	spec := Spec{Path: path, Beside: true}
	target, err := Resolve(path, &spec)
	if err != nil {
		return err
	}
	_, err = NewWriter(target, &spec, nil).Write(ctx, []File{{File: publish.File{Path: target.Path,
		Content: publish.WholeFile(b)}}})
	return err
}

// Estimate predicts the compressed size of tensors from samples.
func Estimate(ctx context.Context, uris []string, access format.Access) (sum stored.Total, err error) {
	m, err := stored.OpenNamed(ctx, uris, access, false)
	if err != nil {
		return sum, errs.Ended(ctx, err)
	}
	defer m.Close()
	c := classifier{spec: &Spec{}, threads: knob.Workers(0)}
	if err := c.spec.check(""); err != nil {
		return sum, err
	}
	items := ItemsOf(m, stored.NewCache(c.threads))
	if err := c.classify(ctx, items); err != nil {
		return sum, errs.Ended(ctx, err)
	}
	for _, t := range items {
		bytes := int64(0)
		if t.form != alias {
			bytes = int64(float64(t.bytes) * t.expect)
		}
		sum.Add(t.bytes, bytes)
	}
	return sum, nil
}
