package sleep

// This file decides, by samples, how each tensor is stored and how much it will take.

import (
	"cmp"
	"slices"
	"unsafe"

	"github.com/overwire/overwire/gosrc/codec/blocksum"
	"github.com/overwire/overwire/gosrc/codec/x16"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/tensor"
)

// chunkBytes is that of files; tests make it smaller.
var chunkBytes int64 = 1 << 20

const (
	// minCoded: smaller tensors are stored as they are, since their tables cost as
	// much as coding gains.
	minCoded = 8 << 10
	// minGain: a tensor that its sample says to shrink less is stored as it is.
	minGain = 0.99

	sampleRuns  = 4
	sampleBytes = 16 << 10
	// sampled is how many tensors, the largest ones, are sampled to estimate the memory,
	// beside those that have several transforms to choose from.
	sampled = 96
)

type item struct {
	Tensor
	transform uint8
	alias     int     // 1 + the item that has the same memory; 0: none
	expect    float64 // stored / logical
	known     bool    // expect comes from a sample
	sums      blocksum.State
}

func (t *item) addressOf() uint64 { return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(t.Data)))) }

// classifyTensors sets items, aliases and transforms.
func (s *sleeper) classifyTensors(in []Tensor) error {
	type memory struct {
		at, n uint64
		dtype tensor.DType
	}
	first := map[memory]int{}
	s.items = make([]item, len(in))
	for i := range in {
		t := &s.items[i]
		*t = item{Tensor: in[i], expect: 1}
		n, err := tensor.Size(t.DType, t.Shape)
		if err == nil && n != int64(len(t.Data)) {
			err = errs.New(errs.ErrArgument, "shape %v as %v is %d bytes, but %d were given", t.Shape, t.DType, n,
				len(t.Data))
		}
		if err != nil {
			return errs.Locate("sleep", "", t.Name, -1, err)
		}
		s.report.Tensors++
		if n == 0 {
			continue
		}
		key := memory{t.addressOf(), uint64(n), t.DType}
		if k, ok := first[key]; ok {
			t.alias = 1 + k
			s.report.Aliases++
			continue
		}
		first[key] = i
		s.report.Bytes += n
		if tr := transformsOf(t.DType); len(tr) > 0 && n >= minCoded && t.addressOf()%16 == 0 {
			t.transform = tr[0]
		}
	}
	if err := s.estimateSizes(); err != nil {
		return err
	}
	for i := range s.items {
		if s.items[i].transform != 0 {
			s.report.Compressed++
		}
	}
	return nil
}

// transformsOf are those that may shrink a dtype.
func transformsOf(d tensor.DType) []uint8 {
	all := x16.TransformsFor(d)
	if i := slices.Index(all, 0); i >= 0 {
		all = slices.Delete(slices.Clone(all), i, i+1)
	}
	return all
}

// estimateSizes chooses transforms, and estimates what tensors take: those without a sample
// as the others of their dtype.
func (s *sleeper) estimateSizes() error {
	var sample, rest []*item
	for i := range s.items {
		t := &s.items[i]
		choice := len(transformsOf(t.DType)) > 1
		switch {
		case t.transform == 0:
		case len(t.Data) < sampleRuns*sampleBytes:
			if choice {
				t.transform = 0 // not worth it
			}
		case choice:
			sample = append(sample, t)
		default:
			rest = append(rest, t)
		}
	}
	slices.SortStableFunc(rest, func(a, b *item) int { return cmp.Compare(len(b.Data), len(a.Data)) })
	sample = append(sample, rest[:min(len(rest), sampled)]...)
	var at []uint64
	for _, t := range sample {
		for r := range int64(sampleRuns) {
			off := (int64(len(t.Data)) - sampleBytes) / (sampleRuns - 1) * r
			at = append(at, t.addressOf()+uint64(off&^255)) // whole elements of any size
		}
	}
	buf := make([]byte, 0, sampleRuns*sampleBytes)
	err := s.way.samples(at, sampleBytes, func(i int, b []byte) {
		if buf = append(buf, b...); i%sampleRuns == sampleRuns-1 {
			sample[i/sampleRuns].takeSample(buf)
			buf = buf[:0]
		}
	})
	if err != nil {
		return err
	}
	type sum struct{ stored, bytes float64 }
	sums := map[tensor.DType]sum{}
	for _, t := range sample {
		n := sums[t.DType]
		sums[t.DType] = sum{n.stored + t.expect*float64(len(t.Data)), n.bytes + float64(len(t.Data))}
	}
	for i := range s.items {
		t := &s.items[i]
		if n := sums[t.DType]; t.transform != 0 && !t.known && n.bytes > 0 {
			t.expect = n.stored / n.bytes
		}
	}
	return nil
}

// takeSample chooses the transform that shrinks a sample most.
func (t *item) takeSample(sample []byte) {
	t.transform, t.expect, t.known = 0, 1, true
	for _, tr := range transformsOf(t.DType) {
		if e := x16.Estimate(sample, tr); e < minGain && e < t.expect {
			t.transform, t.expect = tr, e
		}
	}
}
