package save

// This file has the verb Inspect.

import (
	"context"
	"slices"

	"github.com/overwire/overwire/gosrc/codec"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/format"
	"github.com/overwire/overwire/gosrc/tensor"
)

// An Inspection is the result of Inspect: everything that headers and indexes say.
type Inspection struct {
	Sources []InspectedFile `json:"sources"`
	// Totals are by dtype name, and "all" for all together.
	Totals map[string]*Total `json:"totals"`
}

// KeepTensors leaves out the tensors whose names are not wanted, and sums the others up.
func (in *Inspection) KeepTensors(wanted func(name string) bool) {
	for i := range in.Sources {
		f := &in.Sources[i]
		f.Tensors = slices.DeleteFunc(f.Tensors, func(t InspectedTensor) bool { return !wanted(t.Name) })
	}
	in.sumUp()
}

func (in *Inspection) sumUp() {
	in.Totals = map[string]*Total{"all": {}}
	for i := range in.Sources {
		for _, t := range in.Sources[i].Tensors {
			if in.Totals[t.DType] == nil {
				in.Totals[t.DType] = &Total{}
			}
			for _, sum := range []*Total{in.Totals["all"], in.Totals[t.DType]} {
				sum.Tensors++
				sum.Bytes += t.Bytes
				sum.Stored += t.Stored
				sum.Ratio = ratioOf(sum.Stored, sum.Bytes)
			}
		}
	}
}

// A Total sums tensors up. Aliases count in Tensors and Bytes.
type Total struct {
	Tensors int     `json:"tensors"`
	Bytes   int64   `json:"bytes"`
	Stored  int64   `json:"stored"`
	Ratio   float64 `json:"ratio"`
}

// An InspectedFile is one source.
type InspectedFile struct {
	URI      string            `json:"uri"`
	Format   string            `json:"format"` // "overwire", "safetensors", "tensors" or "gguf"
	Size     int64             `json:"size"`
	Header   int64             `json:"header"` // bytes before the data section
	Metadata map[string]string `json:"metadata"`
	Tensors  []InspectedTensor `json:"tensors"`
}

// CodingUnknown is the coding of a tensor whose type is not known: its bytes are 0 here.
const CodingUnknown = "unknown"

// An InspectedTensor is one tensor. Coding is how its bytes are stored: "plain",
// "alias", for .tensors files "encrypted" or "zeros" (not stored), for GGUF files "unknown",
// or the codec and transform of its chunks ("X16/bf16"; with "+raw" if some chunks are stored raw).
type InspectedTensor struct {
	Name    string  `json:"name"`
	DType   string  `json:"dtype"`
	Shape   []int64 `json:"shape"`
	Bytes   int64   `json:"bytes"`
	Stored  int64   `json:"stored"`
	Ratio   float64 `json:"ratio"`
	Coding  string  `json:"coding"`
	Chunks  int     `json:"chunks"`
	Parts   int     `json:"parts,omitempty"`
	AliasOf string  `json:"alias_of,omitempty"`
}

// Inspect reads headers and indexes, and no tensor bytes.
func Inspect(ctx context.Context, uris []string, storage format.Access) (*Inspection, error) {
	m, others, err := openOrList(ctx, uris, storage, false)
	if err != nil {
		return nil, errs.Ended(ctx, err)
	}
	out := &Inspection{}
	if m != nil {
		defer m.closeSources()
		m.describe(out)
	}
	out.Sources = append(out.Sources, others...)
	out.sumUp()
	return out, nil
}

// describe adds a model's files and tensors to what is inspected.
func (m *model) describe(out *Inspection) {
	for k := range m.ix.Sources {
		s := &m.ix.Sources[k]
		out.Sources = append(out.Sources, InspectedFile{URI: errs.RedactURI(s.URI), Format: s.Format, Size: s.Size,
			Header: s.Data, Metadata: m.metadata(k), Tensors: []InspectedTensor{}})
	}
	for i := range m.ix.Tensors {
		t := &m.ix.Tensors[i]
		f := &out.Sources[t.Source]
		it := InspectedTensor{Name: t.Name, DType: t.DType.String(), Shape: t.Shape, Bytes: t.Bytes,
			Stored: t.Stored, Ratio: ratioOf(t.Stored, t.Bytes), Coding: m.codingOf(t), Chunks: int(t.Count),
			Parts: int(t.Parts)}
		if it.Shape == nil {
			it.Shape = []int64{}
		}
		if t.Alias >= 0 {
			it.AliasOf = m.ix.Tensors[t.Alias].Name
		}
		f.Tensors = append(f.Tensors, it)
	}
}

// Estimate says what compressing would make of the tensors, from samples of them.
func Estimate(ctx context.Context, uris []string, storage format.Access) (sum Total, err error) {
	m, err := openSpread(ctx, uris, storage, false)
	if err != nil {
		return sum, errs.Ended(ctx, err)
	}
	defer m.closeSources()
	w := newWriter(Spec{Parts: 1, ChunkBytes: 1 << 20}, nil)
	items := m.items(w.threads)
	if err := w.classifyItems(ctx, items); err != nil {
		return sum, errs.Ended(ctx, err)
	}
	for _, t := range items {
		sum.Tensors++
		sum.Bytes += t.bytes
		if t.form != alias {
			sum.Stored += int64(float64(t.bytes) * t.expect)
		}
	}
	sum.Ratio = ratioOf(sum.Stored, sum.Bytes)
	return sum, nil
}

func (m *model) codingOf(t *tensor.Tensor) string {
	if t.Alias >= 0 {
		return "alias"
	}
	if coding := m.srcs[t.Source].Facts().Coding; coding != nil {
		return coding(t.Off)
	}
	return codec.Names(m.ix.Chunks[t.First : t.First+t.Count])
}

func ratioOf(stored, bytes int64) float64 {
	if bytes == 0 {
		return 1
	}
	return float64(stored) / float64(bytes)
}
