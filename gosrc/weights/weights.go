// Package weights makes realistic model weights from a seed, for demos, benchmarks and tests that should not
// download gigabytes.
//
// The same kind, size and seed give the same bytes on every machine and for any number of threads. Codecs depend mainly
// on the distribution of exponents. Values are normally distributed around zero, with a different scale for each row.
// This gives 2.55 to 2.65 bits of exponent entropy, as in real checkpoints.
package weights

import (
	"context"
	"fmt"
	"math"
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

type part struct {
	name  string
	dtype tensor.DType
	shape []int64
	role  role
	sigma float32 // matrix: median of its rows' scales
	same  int     // 1 + the number of an earlier part with the same bytes; 0 means none
}

type role uint8

const (
	matrix role = iota // rows of normal values
	norm               // a vector of values around 0.5
	scale              // scales of a quantised matrix
)

func (p part) elementCount() int64 {
	n := int64(1)
	for _, d := range p.shape {
		n *= d
	}
	return n
}

// rowLength returns the length of a row. The elements of a row share a scale.
func (p part) rowLength() int64 {
	if len(p.shape) < 2 {
		return max(1, p.elementCount())
	}
	return max(1, p.shape[len(p.shape)-1])
}

// A builder collects parts in the dtype of a kind.
type builder struct {
	k     Kind
	parts []part
	bytes int64
}

func (b *builder) addPart(p part) {
	b.parts = append(b.parts, p)
	b.bytes += p.elementCount() * int64(p.dtype.Bits()) / 8
}

// addMatrix adds a weight and, for quantised kinds, its scales. In real checkpoints, sigma
// varies by a factor of two to four with depth and kind of projection.
func (b *builder) addMatrix(name string, sigma float32, rows, cols int64) {
	p := part{name: name, dtype: b.k.dtype, shape: []int64{rows, cols}, sigma: sigma}
	if b.k.Name == "int4" {
		p.shape[1] = (cols + 1) / 2 // two values per byte
	}
	b.addPart(p)
	switch b.k.dtype {
	case tensor.F8E4M3, tensor.F8E5M2:
		b.addPart(part{name: name + "_scale", dtype: tensor.F32, shape: []int64{}, role: scale, sigma: sigma})
	case tensor.I8, tensor.U8:
		b.addPart(part{name: name + "_scale", dtype: tensor.F32, shape: []int64{rows}, role: scale, sigma: sigma})
	}
}

func (b *builder) norm(name string, n int64) {
	d := b.k.dtype
	if d.Bits() < 16 {
		d = tensor.BF16 // norms are not quantised
	}
	b.addPart(part{name: name, dtype: d, shape: []int64{n}, role: norm})
}

// llama lists tensors like those of Llama 3 8B that take about size bytes. To fit, it first reduces the number of
// layers and then the hidden size. The vocabulary fills the remaining bytes.
func llama(k Kind, size int64) []part {
	const layers, hidden, vocab = 32, 4096, 128256
	list := func(layers, hidden, vocab int64) *builder {
		b := &builder{k: k}
		b.addMatrix("model.embed_tokens.weight", 0.012, vocab, hidden)
		for i := range layers {
			at := fmt.Sprintf("model.layers.%d.", i)
			deep := 1 + 0.5*float32(i)/float32(layers)
			b.norm(at+"input_layernorm.weight", hidden)
			b.addMatrix(at+"mlp.down_proj.weight", 0.017*deep, hidden, hidden*7/2)
			b.addMatrix(at+"mlp.gate_proj.weight", 0.021*deep, hidden*7/2, hidden)
			b.addMatrix(at+"mlp.up_proj.weight", 0.018*deep, hidden*7/2, hidden)
			b.norm(at+"post_attention_layernorm.weight", hidden)
			b.addMatrix(at+"self_attn.k_proj.weight", 0.033*deep, hidden/4, hidden)
			b.addMatrix(at+"self_attn.o_proj.weight", 0.014*deep, hidden, hidden)
			b.addMatrix(at+"self_attn.q_proj.weight", 0.027*deep, hidden, hidden)
			b.addMatrix(at+"self_attn.v_proj.weight", 0.011*deep, hidden/4, hidden)
		}
		b.norm("model.norm.weight", hidden)
		b.addMatrix("lm_head.weight", 0.015, vocab, hidden)
		return b
	}
	l, h, v := int64(layers), int64(hidden), int64(vocab)
	// The vocabulary takes about an eighth of the model's bytes.
	for l > 2 && list(l, h, 64).bytes > size*7/8 {
		l--
	}
	for h > 64 && list(l, h, 64).bytes > size*7/8 {
		h -= 64
	}
	return rest(func(v int64) *builder { return list(l, h, v) }, size, v).parts
}

// tied is llama with lm_head tied to the embedding.
func tied(k Kind, size int64) []part {
	parts := llama(k, size)
	last := &parts[len(parts)-1]
	last.same, last.sigma = 1, parts[0].sigma
	return parts
}

// moe lists the 18,867 tensors of Qwen3-30B-A3B. A smaller size reduces rows and columns, but not the number of
// tensors.
func moe(k Kind, size int64) []part {
	const layers, experts, hidden, inner, vocab = 48, 128, 2048, 768, 151936
	list := func(shrink float64, vocab int64) *builder {
		dim := func(n float64) int64 { return max(8, int64(math.Round(n*shrink/8))*8) }
		h, in, head := dim(hidden), dim(inner), dim(128)
		b := &builder{k: k}
		b.addMatrix("model.embed_tokens.weight", 0.02, vocab, h)
		for i := range layers {
			at := fmt.Sprintf("model.layers.%d.", i)
			b.norm(at+"input_layernorm.weight", h)
			for e := range experts {
				of := fmt.Sprintf("%smlp.experts.%d.", at, e)
				b.addMatrix(of+"down_proj.weight", 0.019, h, in)
				b.addMatrix(of+"gate_proj.weight", 0.022, in, h)
				b.addMatrix(of+"up_proj.weight", 0.02, in, h)
			}
			b.addMatrix(at+"mlp.gate.weight", 0.03, experts, h)
			b.norm(at+"post_attention_layernorm.weight", h)
			b.norm(at+"self_attn.k_norm.weight", head)
			b.addMatrix(at+"self_attn.k_proj.weight", 0.03, 4*head, h)
			b.addMatrix(at+"self_attn.o_proj.weight", 0.02, h, 32*head)
			b.norm(at+"self_attn.q_norm.weight", head)
			b.addMatrix(at+"self_attn.q_proj.weight", 0.03, 32*head, h)
			b.addMatrix(at+"self_attn.v_proj.weight", 0.02, 4*head, h)
		}
		b.norm("model.norm.weight", h)
		b.addMatrix("lm_head.weight", 0.02, vocab, h)
		return b
	}
	// Find the widest hidden size that fits. Widths are multiples of 8.
	lo, hi := 1, hidden/8
	for lo < hi {
		mid := (lo + hi + 1) / 2
		if list(float64(mid*8)/hidden, 64).bytes > size*15/16 {
			hi = mid - 1
		} else {
			lo = mid
		}
	}
	shrink := float64(lo*8) / hidden
	return rest(func(v int64) *builder { return list(shrink, v) }, size, vocab).parts
}

// rest chooses the vocabulary size, at most `most`, with which all tensors take about size bytes.
func rest(list func(vocab int64) *builder, size, most int64) *builder {
	low := list(64)
	perRow := (list(128).bytes - low.bytes) / 64
	return list(min(most, 64+max(0, size-low.bytes)/max(1, perRow)))
}
