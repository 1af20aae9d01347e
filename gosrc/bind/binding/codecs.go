package binding

// This file defines the verbs that encode and decode buffers.

import (
	"context"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/rawjson"
	"github.com/overwire/overwire/gosrc/job"
	"github.com/overwire/overwire/gosrc/nvcomp"
	"github.com/overwire/overwire/gosrc/tensor"
)

type codecRequest = Dumped[nvcomp.Spec]

// bufferWords is how many numbers describe a buffer.
const bufferWords = 5

const buffers = "for each buffer its address and size, whether it has an output, and the output's address and size"

func codecVerbs() []*Verb {
	return []*Verb{
		answered("codec_names", "Return the algorithms that codec supports.", func(none, []int64) ([]string, error) {
			return nvcomp.Names(), nil
		}),
		begun[codecRequest, *Result]("codec",
			"Encode, decode or measure buffers, which must not change until the job has ended. For each "+
				"buffer, the result has an address, a length, and whether checksums were compared. It also has the "+
				"memory of outputs that the caller did not pass, and errors by buffer number.",
			startCodec).tail(buffers).onCallersMemory(),
		answered("codec_now", "Run codec in one call if it is fast. Otherwise do nothing and return no numbers.",
			func(q codecRequest, n []int64) (*Result, error) {
				in, err := buffersOf(n)
				if err != nil || !nvcomp.Quick(&q.Value, in) {
					return &Result{}, err
				}
				results, err := nvcomp.Run(context.Background(), q.Value, in)
				if err != nil {
					return nil, err
				}
				return coded(results)
			}).tail(buffers),
	}
}

func buffersOf(n []int64) ([]nvcomp.Buffer, error) {
	if len(n)%bufferWords != 0 {
		return nil, errs.New(errs.ErrArgument, "expected a multiple of 5 numbers, got %d", len(n))
	}
	in := make([]nvcomp.Buffer, len(n)/bufferWords)
	for i := range in {
		b := n[bufferWords*i:]
		src, err := dataAt(uint64(b[0]), b[1])
		if err != nil {
			return nil, err
		}
		dst, err := dataAt(uint64(b[3]), b[4])
		if err != nil {
			return nil, err
		}
		in[i] = nvcomp.Buffer{Src: src, Dst: dst, Own: b[2] != 0}
	}
	return in, nil
}

func startCodec(v *Verb, q codecRequest, n []int64) (*entry, error) {
	in, err := buffersOf(n)
	if err != nil {
		return nil, err
	}
	return v.background(q, func(ctx context.Context, _ *job.Job) (any, error) {
		results, err := nvcomp.Run(ctx, q.Value, in)
		if err != nil {
			return none{}, err
		}
		return coded(results)
	}), nil
}

// failures maps buffer numbers to errors, for the text of a result.
type failures map[int]errs.Description

func (f failures) text() (string, error) {
	if len(f) == 0 {
		return "", nil
	}
	b, err := rawjson.Marshal(f)
	return string(b), err
}

// coded converts results. The first number of the Result is 1, which means that the work was done.
func coded(results []nvcomp.Result) (*Result, error) {
	r, texts := &Result{Numbers: make([]int64, 1, 1+3*len(results)), Tensors: make([]Exported, len(results))},
		failures{}
	r.Numbers[0] = 1
	for i, one := range results {
		r.Numbers = append(r.Numbers, int64(uintptr(one.Mem.Ptr)), one.Bytes, truth(one.Summed))
		if one.Err != nil {
			texts[i] = errs.Describe(one.Err)
		}
		if one.Mem.Block != nil {
			r.Tensors[i] = Exported{Mem: one.Mem, Shape: []int64{one.Mem.Bytes}, DType: tensor.U8, OK: true}
		}
	}
	r.Raw = true
	var err error
	r.Text, err = texts.text()
	return r, err
}
