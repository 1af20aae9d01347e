// Package weights makes realistic model weights from a seed, for demos, benchmarks and tests that should not
// download gigabytes.
//
// The same kind, size and seed give the same bytes on every machine and for any number of threads. Codecs depend mainly
// on the distribution of exponents. Values are normally distributed around zero, with a different scale for each row.
// This gives 2.55 to 2.65 bits of exponent entropy, as in real checkpoints.
package weights

import (
	"context"
	"runtime"
	"slices"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/spawn"
	"github.com/overwire/overwire/gosrc/tensor"
)

// A Tensor is a generated tensor.
type Tensor struct {
	Name  string
	DType tensor.DType
	Shape []int64
	Data  []byte
}

// Options are the options of Make. The zero value gives the first kind in its default size.
type Options struct {
	Kind    string // a Kind's name; "" is the first
	Size    int64  // approximate size of all tensors in bytes; 0 means the kind's default
	Seed    uint64
	Threads int // 0 means one for each CPU
}

// A Kind is a kind of model.
type Kind struct {
	Name string
	Doc  string
	Size int64 // default size in bytes
	// layout lists tensors that take about size bytes. It is nil for hostile.
	layout func(k Kind, size int64) []part
	dtype  tensor.DType
	change func(*float32) // changes each value; may be nil
}

// Kinds returns every kind.
func Kinds() []Kind { return slices.Clone(kinds) }

var kinds = []Kind{
	{Name: "llama-bf16", Doc: "Llama-3-8B names and proportions, BF16", Size: 1 << 30, layout: llama,
		dtype: tensor.BF16},
	{Name: "moe-bf16", Doc: "Qwen3-30B-A3B names: 18,867 tensors, most of them small, BF16", Size: 256 << 20,
		layout: moe, dtype: tensor.BF16},
	{Name: "fp16", Doc: "the Llama shape in F16", Size: 256 << 20, layout: llama, dtype: tensor.F16},
	{Name: "fp32", Doc: "the Llama shape in F32", Size: 256 << 20, layout: llama, dtype: tensor.F32},
	{Name: "fp32-bf16", Doc: "F32 with BF16 values: the low half of every element is zero", Size: 256 << 20,
		layout: llama, dtype: tensor.F32, change: throughBF16},
	{Name: "fp8-e4m3", Doc: "F8_E4M3 with one F32 scale per tensor", Size: 256 << 20, layout: llama,
		dtype: tensor.F8E4M3},
	{Name: "fp8-e5m2", Doc: "F8_E5M2 with one F32 scale per tensor", Size: 256 << 20, layout: llama,
		dtype: tensor.F8E5M2},
	{Name: "int8", Doc: "I8 with one F32 scale per row", Size: 256 << 20, layout: llama, dtype: tensor.I8},
	{Name: "int4", Doc: "4-bit integers, two per U8, with one F32 scale per row", Size: 256 << 20, layout: llama,
		dtype: tensor.U8},
	{Name: "tied", Doc: "llama-bf16 with lm_head tied to the embedding", Size: 256 << 20, layout: tied,
		dtype: tensor.BF16},
	{Name: "pruned", Doc: "llama-bf16 with the smaller half of its weights set to zero", Size: 256 << 20, layout: llama,
		dtype: tensor.BF16},
	{Name: "uniform", Doc: "uniformly random bits, BF16: incompressible", Size: 256 << 20, layout: llama,
		dtype: tensor.BF16},
	{Name: "hostile", Doc: "every dtype, NaN payloads, odd, empty and 0-dim shapes; fixed size"},
}

// Find returns the kind with a name.
func Find(name string) (Kind, error) {
	if name == "" {
		return kinds[0], nil
	}
	i := slices.IndexFunc(kinds, func(k Kind) bool { return k.Name == name })
	if i < 0 {
		return Kind{}, errs.New(errs.ErrArgument, "unknown kind of weights %q", name)
	}
	return kinds[i], nil
}

// MaxSize is the maximum size for Make.
const MaxSize = 1 << 40

// Make generates the tensors, in file order. Tied tensors share their Data.
func Make(o Options) ([]Tensor, error) {
	k, err := Find(o.Kind)
	if err != nil {
		return nil, err
	}
	if k.layout == nil {
		return hostileTensors(o.Seed), nil
	}
	size := o.Size
	if size == 0 {
		size = k.Size
	}
	if size < 0 || size > MaxSize {
		return nil, errs.New(errs.ErrArgument, "invalid size of weights, %d bytes: expected 0 to %d", size,
			int64(MaxSize))
	}
	parts := k.layout(k, size)
	out := make([]Tensor, len(parts))
	var jobs []block
	for i, p := range parts {
		out[i] = Tensor{Name: p.name, DType: p.dtype, Shape: p.shape}
		if p.same > 0 {
			continue
		}
		n := p.elementCount()
		out[i].Data = make([]byte, n*int64(p.dtype.Bits())/8)
		for first := int64(0); first < n; first += blockElements {
			jobs = append(jobs, block{i, first, min(blockElements, n-first)})
		}
	}
	fillAll(k, o, parts, out, jobs)
	for i, p := range parts {
		if p.same > 0 {
			out[i].Data = out[p.same-1].Data
		}
	}
	return out, nil
}

// A block is a range of elements of one tensor. Each block has a separate seed, so the bytes do not depend on the
// number of threads.
type block struct {
	part     int
	first, n int64
}

const blockElements = 16384

func fillAll(k Kind, o Options, parts []part, out []Tensor, jobs []block) {
	threads := o.Threads
	if threads <= 0 {
		threads = runtime.GOMAXPROCS(0)
	}
	const batch = 16 // blocks per task
	batches := slices.Collect(slices.Chunk(jobs, batch))
	_ = spawn.Each(context.Background(), "weights", threads, len(batches), func(i int) error { // no error is possible
		var scratch [blockElements]float32
		for _, b := range batches[i] {
			fillBlock(k, parts[b.part], o.Seed, b, out[b.part].Data, scratch[:b.n])
		}
		return nil
	})
}
