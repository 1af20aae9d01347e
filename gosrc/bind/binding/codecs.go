package binding

// This file defines the verbs that encode and decode buffers, and compute digests.

import (
	"context"
	"errors"
	"maps"
	"math/bits"
	"slices"

	"github.com/overwire/overwire/gosrc/codec/digest"
	"github.com/overwire/overwire/gosrc/device/cuda"
	"github.com/overwire/overwire/gosrc/device/cuda/stream"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/rawjson"
	"github.com/overwire/overwire/gosrc/job"
	"github.com/overwire/overwire/gosrc/knob"
	"github.com/overwire/overwire/gosrc/load"
	"github.com/overwire/overwire/gosrc/nvcomp"
	"github.com/overwire/overwire/gosrc/stored"
	"github.com/overwire/overwire/gosrc/tensor"
	"github.com/overwire/overwire/gosrc/verify"
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

const tensorViews = "the addresses of the contiguous tensors, then their sizes in bytes; for each other tensor its " +
	"address, element size, number of dimensions, their sizes, and their strides in bytes"

func digestVerbs() []*Verb {
	return []*Verb{
		started("digest", "Compute the 16-byte digests of tensors in host memory (device -1), or of tensors on a "+
			"GPU after the work queued on a stream. keyed: with this process's key.", digestMemory).
			ints("device", "stream", "keyed", "contiguous").tail(tensorViews).onCallersMemory(),
		started("digests", "Return the digests of files' tensors. `on` maps tensor names to the GPU that decodes "+
			"them, if it has enough memory.", digestsOf),
	}
}

type digestsRequest struct {
	filesRequest
	On map[string]int `json:"on"`
}

// digestsOf returns the digests of files' tensors. It computes those that no file stores on the GPUs of q.On, or on the
// host for other tensors and for tensors that do not fit on a GPU.
func digestsOf(ctx context.Context, j *job.Job, q digestsRequest, _ []int64) (verify.DigestReport, error) {
	rep, err := verify.Digests(ctx, j, q.URIs, q.Storage, func(name string) bool { _, ok := q.On[name]; return ok })
	if err != nil {
		return rep, err
	}
	rows := map[string]*verify.TensorDigest{} // rows without a digest; nil for a name in several files
	for i := range rep.Tensors {
		if t := &rep.Tensors[i]; t.Digest == "" {
			if _, twice := rows[t.Name]; !twice {
				rows[t.Name] = t
			} else {
				rows[t.Name] = nil
			}
		}
	}
	if err := q.onGPUs(ctx, j, rows, &rep); err != nil {
		return rep, errs.Ended(ctx, err)
	}
	maps.DeleteFunc(rows, func(_ string, t *verify.TensorDigest) bool { return t != nil && t.Digest != "" })
	if len(rows) == 0 {
		return rep, nil
	}
	rest, err := verify.Digests(ctx, j, q.URIs, q.Storage, func(name string) bool { _, ok := rows[name]; return !ok })
	for i := range rest.Tensors {
		if rep.Tensors[i].Digest == "" {
			rep.Tensors[i].Digest = rest.Tensors[i].Digest
		}
	}
	rep.Bytes += rest.Bytes
	return rep, err
}

// onGPUs computes digests on GPUs and adds them to the rows.
func (q *digestsRequest) onGPUs(ctx context.Context, j *job.Job, rows map[string]*verify.TensorDigest,
	rep *verify.DigestReport) error {
	if len(rows) == 0 {
		return nil
	}
	m, err := stored.ExpandFolders(ctx, q.URIs, q.Storage.Options, func(uris []string) (*load.Model, error) {
		return load.Open(ctx, load.Spec{URIs: uris, Storage: q.Storage, Keys: slices.Sorted(maps.Keys(rows))})
	})
	if err != nil {
		return err
	}
	defer m.Close()
	ix := m.Index()
	by := map[int][]int{}
	for i := range ix.Tensors {
		if t := &ix.Tensors[i]; rows[t.Name] != nil {
			by[q.On[t.Name]] = append(by[q.On[t.Name]], i)
			j.TotalBytes.Add(t.Bytes)
		}
	}
	for gpu, tensors := range by {
		err := load.Digests(ctx, m, gpu, tensors, func(i int, sum digest.Sum) {
			t := &ix.Tensors[i]
			rows[t.Name].Digest = sum.String()
			j.Bytes.Add(t.Bytes)
			if t.Alias < 0 {
				rep.Bytes += t.Bytes
				rep.OnGPU += t.Bytes
			}
		})
		if err != nil && !errors.Is(err, errs.ErrMemory) {
			return err
		}
	}
	return nil
}

func digestMemory(ctx context.Context, _ *job.Job, _ none, n []int64) (*Result, error) {
	all, err := viewsOf(n[3], n[4:])
	if err != nil {
		return nil, err
	}
	views, at := distinct(all)
	var key *digest.Key
	if n[2] != 0 {
		key = digest.ProcessKey()
	}
	var sums []digest.Sum
	if n[0] < 0 {
		sums, err = digest.All(ctx, views, knob.Workers(0), key)
	} else {
		var d *cuda.Device
		if d, err = cuda.Open(int(n[0])); err == nil {
			sums, err = d.Digest(stream.Order{Stream: uintptr(n[1])}, views, key)
		}
	}
	if err != nil {
		return nil, err
	}
	r := &Result{Numbers: make([]int64, 0, 2*len(at))}
	for _, k := range at { // big-endian, so that the bytes are in the order of hex digits
		r.Numbers = append(r.Numbers, int64(bits.ReverseBytes64(sums[k].High)), int64(bits.ReverseBytes64(sums[k].Low)))
	}
	return r, nil
}

// viewsOf parses numbers that describe tensors in memory, as in tensorViews. The first tensors are contiguous.
func viewsOf(contiguous int64, flat []int64) ([]digest.View, error) {
	const head = 3
	if contiguous < 0 || contiguous > int64(len(flat))/2 {
		return nil, errs.New(errs.ErrArgument,
			"got %d numbers for %d contiguous tensors: expected at least two for each tensor, and no negative count",
			len(flat), contiguous)
	}
	views := make([]digest.View, contiguous)
	bytes, one := flat[contiguous:2*contiguous], []int64{1}
	for i := range views {
		views[i] = digest.View{Address: uint64(flat[i]), Item: 1, Shape: bytes[i : i+1 : i+1], Strides: one}
	}
	flat = flat[2*contiguous:]
	for len(flat) > 0 {
		if len(flat) < head || flat[2] < 0 || flat[2] > digest.MaxRank || int64(len(flat)) < head+2*flat[2] {
			return nil, errs.New(errs.ErrArgument, "invalid numbers after the first %d tensors", len(views))
		}
		rank := flat[2]
		v := digest.View{Address: uint64(flat[0]), Item: flat[1], Shape: flat[head : head+rank],
			Strides: flat[head+rank : head+2*rank]}
		views, flat = append(views, v), flat[head+2*rank:]
	}
	return views, nil
}

// distinct removes repeated contiguous tensors from all, so that tied tensors are read once. at[i] is the index in
// views of all[i].
func distinct(all []digest.View) (views []digest.View, at []int) {
	type memory struct{ address, bytes uint64 }
	first := make(map[memory]int, len(all))
	at = make([]int, len(all))
	for i := range all {
		v := &all[i]
		at[i] = len(views)
		if v.Item == 1 && len(v.Shape) == 1 && v.Strides[0] == 1 {
			key := memory{v.Address, uint64(v.Shape[0])}
			if k, ok := first[key]; ok {
				at[i] = k
				continue
			}
			first[key] = at[i]
		}
		views = append(views, *v)
	}
	return views, at
}
