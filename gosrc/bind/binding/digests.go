package binding

// This file has the verbs of digests.

import (
	"context"

	"github.com/overwire/overwire/gosrc/codec/digest"
	"github.com/overwire/overwire/gosrc/device/cuda"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/job"
	"github.com/overwire/overwire/gosrc/knob"
	"github.com/overwire/overwire/gosrc/save"
)

const tensorViews = "of a tensor each: address, bytes of an element, dimensions; then the size of each dimension; then the stride of each, in bytes"

func digestVerbs() []Verb {
	return []Verb{
		awaited("digest", "The digests of tensors, two numbers each: of the host's memory (device -1), or of a GPU's after what is queued on a stream.", digestMemory).
			ints("device", "stream").tail(tensorViews).onCallersMemory(),
		started("digests", "The digests of the tensors of files.",
			func(ctx context.Context, j *job.Job, q filesRequest, _ []int64) (save.DigestReport, error) {
				return save.Digests(ctx, j, q.URIs, q.Storage)
			}),
	}
}

func digestMemory(ctx context.Context, _ none, n []int64) (*Result, error) {
	views, err := viewsOf(n[2:])
	if err != nil {
		return nil, err
	}
	var sums []digest.Sum
	if n[0] < 0 {
		sums, err = digest.All(ctx, views, knob.Workers(0))
	} else {
		var d *cuda.Device
		if d, err = cuda.Open(int(n[0])); err == nil {
			sums, err = d.Digest(cuda.Order{Stream: uintptr(n[1])}, views)
		}
	}
	if err != nil {
		return nil, err
	}
	r := &Result{Numbers: make([]int64, 0, 2*len(sums))}
	for _, s := range sums {
		r.Numbers = append(r.Numbers, int64(s.High), int64(s.Low))
	}
	return r, nil
}

// viewsOf reads tensors in memory.
func viewsOf(flat []int64) ([]digest.View, error) {
	const head = 3
	var views []digest.View
	for len(flat) > 0 {
		if len(flat) < head || flat[2] < 0 || flat[2] > digest.MaxRank || int64(len(flat)) < head+2*flat[2] {
			return nil, errs.New(errs.ErrArgument, "numbers that describe no tensor, after %d tensors", len(views))
		}
		rank := flat[2]
		v := digest.View{Address: uint64(flat[0]), Item: flat[1], Shape: flat[head : head+rank], Strides: flat[head+rank : head+2*rank]}
		views, flat = append(views, v), flat[head+2*rank:]
	}
	return views, nil
}
