package weights

import (
	"bytes"
	"encoding/binary"
	"hash/fnv"
	"math"
	"testing"
	"time"

	"github.com/overwire/overwire/gosrc/tensor"
)

func generate(t testing.TB, o Options) []Tensor {
	t.Helper()
	all, err := Make(o)
	if err != nil {
		t.Fatal(err)
	}
	return all
}

func total(all []Tensor) (n int64) {
	for _, t := range all {
		n += int64(len(t.Data))
	}
	return n
}

// entropy returns the order-0 entropy in bits of the bit field [lo, lo+n) of 16-bit elements.
func entropy(data []byte, lo, n uint) float64 {
	counts := make([]float64, 1<<n)
	for i := 0; i+1 < len(data); i += 2 {
		counts[binary.LittleEndian.Uint16(data[i:])>>lo&(1<<n-1)]++
	}
	h, sum := 0.0, float64(len(data)/2)
	for _, c := range counts {
		if c > 0 {
			h -= c / sum * math.Log2(c/sum)
		}
	}
	return h
}

// Generated bf16 matrices have the exponent entropy of real checkpoints, and incompressible mantissas and signs.
func TestEntropyIsRealistic(t *testing.T) {
	for _, kind := range []string{"llama-bf16", "moe-bf16", "tied"} {
		matrices := 0
		for _, w := range generate(t, Options{Kind: kind, Size: 20 << 20, Seed: 1}) {
			if len(w.Shape) != 2 || len(w.Data) < 1<<20 || w.Shape[0] < 256 {
				continue
			}
			matrices++
			if h := entropy(w.Data, 7, 8); h < 2.55 || h > 2.65 {
				t.Errorf("%s %s: exponent entropy %.3f", kind, w.Name, h)
			}
			if h := entropy(w.Data, 0, 7); h < 6.96 { // a little less than 7: small mantissas are more common
				t.Errorf("%s %s: mantissa entropy %.4f", kind, w.Name, h)
			}
			if h := entropy(w.Data, 15, 1); h < 0.9999 {
				t.Errorf("%s %s: sign entropy %.5f", kind, w.Name, h)
			}
		}
		if matrices == 0 {
			t.Errorf("%s: no matrix was tested", kind)
		}
	}
}

// The same seed gives the same bytes for any number of threads. A different seed gives different bytes.
func TestDeterministic(t *testing.T) {
	for _, k := range Kinds() {
		sum := func(seed uint64, threads int) uint64 {
			h := fnv.New64a()
			for _, w := range generate(t, Options{Kind: k.Name, Size: 1 << 20, Seed: seed, Threads: threads}) {
				h.Write([]byte(w.Name))
				h.Write(w.Data)
			}
			return h.Sum64()
		}
		one := sum(7, 1)
		if two := sum(7, 5); one != two {
			t.Errorf("%s: threads change the bytes", k.Name)
		}
		if other := sum(8, 2); other == one {
			t.Errorf("%s: the seed changes nothing", k.Name)
		}
	}
}

// Every tensor has exactly the size of its dtype and shape, and no name occurs twice.
func TestWhole(t *testing.T) {
	for _, k := range Kinds() {
		seen := map[string]bool{}
		for _, w := range generate(t, Options{Kind: k.Name, Size: 2 << 20}) {
			n := int64(w.DType.Bits())
			for _, d := range w.Shape {
				n *= d
			}
			if n%8 != 0 || n/8 != int64(len(w.Data)) {
				t.Errorf("%s %s %v %v: %d bytes", k.Name, w.Name, w.DType, w.Shape, len(w.Data))
			}
			if len(w.Shape) > tensor.MaxRank || seen[w.Name] {
				t.Errorf("%s %s: rank %d, seen %v", k.Name, w.Name, len(w.Shape), seen[w.Name])
			}
			seen[w.Name] = true
		}
	}
}

// The total size is close to the requested size, and moe-bf16 always has 18,867 tensors.
func TestSizes(t *testing.T) {
	for _, c := range []struct {
		kind string
		size int64
	}{{"llama-bf16", 1 << 20}, {"llama-bf16", 30e6}, {"moe-bf16", 8 << 20}, {"moe-bf16", 40 << 20}, {"fp32", 10e6}, {"int4", 10e6}} {
		all := generate(t, Options{Kind: c.kind, Size: c.size})
		if got := total(all); math.Abs(float64(got-c.size)) > 0.02*float64(c.size) {
			t.Errorf("%s: asked for %d bytes, got %d", c.kind, c.size, got)
		}
		if c.kind == "moe-bf16" && len(all) != 18867 {
			t.Errorf("%d tensors", len(all))
		}
	}
	// Compare the full-size model with its published size without generating it.
	k, _ := Find("llama-bf16")
	var n int64
	for _, p := range llama(k, 100e9) {
		n += 2 * p.elementCount()
	}
	if n != 16_060_522_496 {
		t.Errorf("Llama 3 8B has %d bytes", n)
	}
}

// The bytes of each variant have the properties that its description names.
func TestVariants(t *testing.T) {
	first := func(kind string) Tensor { return generate(t, Options{Kind: kind, Size: 4 << 20})[0] }
	for _, w := range []Tensor{first("fp32-bf16")} {
		for i := 0; i < len(w.Data); i += 4 {
			if w.Data[i] != 0 || w.Data[i+1] != 0 {
				t.Fatalf("element %d is not a bf16 value", i/4)
			}
		}
	}
	zeros := 0
	for i, w := 0, first("pruned"); i < len(w.Data); i += 2 {
		if w.Data[i] == 0 && w.Data[i+1]&0x7f == 0 {
			zeros++
		}
	}
	if n := len(first("pruned").Data) / 2; zeros < n*2/5 || zeros > n*3/5 {
		t.Errorf("%d of %d pruned", zeros, n)
	}
	all := generate(t, Options{Kind: "tied", Size: 4 << 20})
	if !bytes.Equal(all[0].Data, all[len(all)-1].Data) {
		t.Error("lm_head is not the embedding")
	}
	if h := entropy(first("uniform").Data, 7, 8); h < 7.99 {
		t.Errorf("uniform exponents have %.3f bits", h)
	}
}

// toF16 and toFloat8 round to the nearest value, ties to even, for every code and the midpoints between codes.
func TestRounding(t *testing.T) {
	value := func(code uint32, ebits, mbits int) float64 {
		bias := 1<<(ebits-1) - 1
		e, m := int(code>>mbits), float64(code&(1<<mbits-1))
		if e == 0 {
			return math.Ldexp(m, 1-bias-mbits)
		}
		return math.Ldexp(m+float64(int(1)<<mbits), e-bias-mbits)
	}
	for _, c := range []struct {
		ebits, mbits int
		last         uint32 // largest finite code
		to           func(float32) uint32
	}{
		{5, 10, 0x7bff, func(v float32) uint32 { return uint32(toF16(v)) }},
		{4, 3, 0x7e, func(v float32) uint32 { return uint32(toFloat8(v, 4, 3)) }},
		{5, 2, 0x7b, func(v float32) uint32 { return uint32(toFloat8(v, 5, 2)) }},
	} {
		for code := range c.last {
			v := value(code, c.ebits, c.mbits)
			if got := c.to(float32(v)); got != code {
				t.Fatalf("E%dM%d: %g is code %#x, got %#x", c.ebits, c.mbits, v, code, got)
			}
			mid := float32((v + value(code+1, c.ebits, c.mbits)) / 2)
			if got := c.to(mid); got != code+code&1 {
				t.Fatalf("E%dM%d: halfway %g is code %#x, got %#x", c.ebits, c.mbits, mid, code+code&1, got)
			}
			if got := c.to(math.Nextafter32(mid, 1e9)); got != code+1 {
				t.Fatalf("E%dM%d: above %g got %#x", c.ebits, c.mbits, mid, got)
			}
		}
	}
}

// Unknown kinds and invalid sizes are refused.
func TestRefused(t *testing.T) {
	for _, o := range []Options{{Kind: "gpt"}, {Size: -1}, {Size: MaxSize + 1}} {
		if _, err := Make(o); err == nil {
			t.Errorf("%+v was made", o)
		}
	}
}

func BenchmarkMake(b *testing.B) {
	for _, kind := range []string{"llama-bf16", "moe-bf16", "fp32", "fp16", "fp8-e4m3", "int8", "int4"} {
		b.Run(kind, func(b *testing.B) {
			start := time.Now()
			var n int64
			for b.Loop() {
				n += total(generate(b, Options{Kind: kind, Size: 64 << 20}))
			}
			b.ReportMetric(float64(n)/time.Since(start).Seconds()/1e9, "GB/s")
		})
	}
}
