package stored

// This file opens models: the index of their files, and the sources of their tensors.

import (
	"context"
	"maps"

	"github.com/overwire/overwire/gosrc/codec"
	"github.com/overwire/overwire/gosrc/format"
	"github.com/overwire/overwire/gosrc/format/overwire"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/source/open"
	"github.com/overwire/overwire/gosrc/tensor"
)

// A Model is an opened model. Its tensors can be read in any order. The caller closes it.
type Model struct {
	Index   *tensor.Index
	Sources []source.Source // indexed as in the index
	Sets    []format.Files  // for each name that was opened
}

// Open opens a model. With unlisted it includes the tensors in an index.json's files that the
// index.json does not list.
func Open(ctx context.Context, uris []string, access format.Access, unlisted bool) (*Model, error) {
	stores := open.With(access.Options)
	ix, srcs, sets, err := format.OpenAll(ctx, uris, stores.Open, format.Options{
		Known: codec.Known, List: stores.List, Settings: access.Decrypt, Unlisted: unlisted,
	})
	if err != nil {
		return nil, err
	}
	return &Model{ix, srcs, sets}, nil
}

// OpenNamed is Open after ExpandFolders.
func OpenNamed(ctx context.Context, uris []string, access format.Access, unlisted bool) (*Model, error) {
	return ExpandFolders(ctx, uris, access.Options, func(uris []string) (*Model, error) {
		return Open(ctx, uris, access, unlisted)
	})
}

// Close closes the sources.
func (m *Model) Close() {
	for _, s := range m.Sources {
		_ = s.Close()
	}
}

// RefuseWritten returns an error if one of the model's files was changed after it was
// opened.
func (m *Model) RefuseWritten() error {
	for _, s := range m.Sources {
		if err := source.Unwritten(s); err != nil {
			return err
		}
	}
	return nil
}

// Metadata returns the metadata of source k, nil if it has none, without the key that containers use
// and that other programs may also use.
func (m *Model) Metadata(k int) map[string]string {
	out := maps.Clone(m.Index.Sources[k].Metadata)
	delete(out, overwire.MetadataKey)
	return out
}

// Holder returns the number of the tensor with the bytes of tensor i: i itself, unless that is
// an alias.
func (m *Model) Holder(i int) int {
	if a := m.Index.Tensors[i].Alias; a >= 0 {
		return int(a)
	}
	return i
}

// Readers makes every tensor readable, by number. An alias has the reader of its holder.
func (m *Model) Readers(c *Cache) []*Tensor {
	readers := make([]*Tensor, len(m.Index.Tensors))
	for i := range readers {
		k := m.Holder(i)
		if readers[k] == nil {
			t := &m.Index.Tensors[k]
			readers[k] = New(m.Sources[t.Source], m.Index, t, c)
		}
		readers[i] = readers[k]
	}
	return readers
}

// A Total sums up tensors. Aliases count in Tensors and Bytes. The zero value is an
// empty sum.
type Total struct {
	Tensors int     `json:"tensors"`
	Bytes   int64   `json:"bytes"`
	Stored  int64   `json:"stored"`
	Ratio   float64 `json:"ratio"`
}

// Add adds one tensor.
func (t *Total) Add(bytes, stored int64) {
	t.Tensors++
	t.Bytes += bytes
	t.Stored += stored
	t.Ratio = Ratio(t.Stored, t.Bytes)
}

// Ratio is stored / bytes, and 1 if there are no bytes.
func Ratio(stored, bytes int64) float64 {
	if bytes == 0 {
		return 1
	}
	return float64(stored) / float64(bytes)
}
