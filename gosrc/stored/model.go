package stored

// This file opens models: it reads the index of their files and opens the sources of their tensors.

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

// A Model is an opened model. Its tensors can be read in any order. The caller must close it.
type Model struct {
	Index   *tensor.Index
	Sources []source.Source // in the order of Index.Sources
	Sets    []format.Files  // one for each opened URI
}

// Open opens a model. If unlisted is set, the model includes tensors that are in the files of an
// index.json but not listed by it.
func Open(ctx context.Context, uris []string, access format.Access, unlisted bool) (*Model, error) {
	stores := open.With(access.Options)
	ix, srcs, sets, err := format.OpenAll(ctx, uris, stores.OpenLike, format.Options{
		Known: codec.Known, List: stores.List, Settings: access.Decrypt, Unlisted: unlisted,
	})
	if err != nil {
		return nil, err
	}
	return &Model{ix, srcs, sets}, nil
}

// OpenNamed is like Open, but calls ExpandFolders first.
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

// RefuseWritten returns an error if one of the model's files was changed after it was opened.
func (m *Model) RefuseWritten() error {
	for _, s := range m.Sources {
		if err := source.Unwritten(s); err != nil {
			return err
		}
	}
	return nil
}

// Metadata returns the metadata of source k without the key that containers use. It returns nil if
// the source has no metadata.
func (m *Model) Metadata(k int) map[string]string {
	out := maps.Clone(m.Index.Sources[k].Metadata)
	delete(out, overwire.MetadataKey)
	return out
}

// Holder returns the number of the tensor that stores the bytes of tensor i. It is i, unless that is an alias.
func (m *Model) Holder(i int) int {
	if a := m.Index.Tensors[i].Alias; a >= 0 {
		return int(a)
	}
	return i
}

// Readers returns a reader for every tensor. An alias has the reader of its holder.
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

// A Total sums up tensors. Aliases count in Tensors and Bytes. The zero value is an empty sum.
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

// Ratio returns stored / bytes, or 1 if there are no bytes.
func Ratio(stored, bytes int64) float64 {
	if bytes == 0 {
		return 1
	}
	return float64(stored) / float64(bytes)
}
