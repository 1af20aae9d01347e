package save

// This file opens the models that Convert, Verify and Inspect read.

import (
	"context"
	"maps"

	"github.com/overwire/overwire/gosrc/codec"
	"github.com/overwire/overwire/gosrc/format"
	"github.com/overwire/overwire/gosrc/format/overwire"
	"github.com/overwire/overwire/gosrc/save/original"
	"github.com/overwire/overwire/gosrc/save/stored"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/source/open"
	"github.com/overwire/overwire/gosrc/tensor"
)

// A model is what Convert, Verify and Inspect read.
type model struct {
	ix   *tensor.Index
	srcs []source.Source
	sets []format.Files // of each name that was opened
}

// openModel opens a model; with unlisted, also those tensors in the files of an index.json
// that it does not list.
func openModel(ctx context.Context, uris []string, storage format.Access, unlisted bool) (*model, error) {
	stores := open.With(storage.Options)
	ix, srcs, sets, err := format.OpenAll(ctx, uris, stores.Open, format.Options{
		Known: codec.Known, List: stores.List, Settings: storage.Decrypt, Unlisted: unlisted,
	})
	if err != nil {
		return nil, err
	}
	return &model{ix, srcs, sets}, nil
}

// openSpread is openModel of what users name; see Opened.
func openSpread(ctx context.Context, uris []string, storage format.Access, unlisted bool) (*model, error) {
	return Opened(ctx, uris, storage.Options, func(uris []string) (*model, error) {
		return openModel(ctx, uris, storage, unlisted)
	})
}

// refuseWritten refuses a model whose files were written to since they were opened.
func (m *model) refuseWritten() error {
	for _, s := range m.srcs {
		if err := source.Unwritten(s); err != nil {
			return err
		}
	}
	return nil
}

func (m *model) closeSources() {
	for _, s := range m.srcs {
		_ = s.Close()
	}
}

// metadata is the metadata of source k, nil if it has none, without an entry of another
// program that has our key.
func (m *model) metadata(k int) map[string]string {
	out := maps.Clone(m.ix.Sources[k].Metadata)
	delete(out, overwire.MetadataKey)
	return out
}

// original is the plain file that source k is or keeps, if the new file, made from
// it alone, should keep it or become it; else nil.
func (m *model) original(ctx context.Context, spec Spec, k int) (*original.File, error) {
	s := &m.ix.Sources[k]
	if len(spec.Metadata) > 0 || s.Unlisted > 0 || !formatOf(spec.Path).coded || !spec.Compress && !s.Overwire() {
		return nil, nil
	}
	return original.Of(ctx, m.srcs[k], s, !spec.NoSHA256)
}

type fromFile struct{ *stored.Tensor }

func (f fromFile) bytes(ctx context.Context, buf []byte, off int64) ([]byte, error) {
	return buf, f.Fill(ctx, buf, off)
}

// items prepares the tensors of a model to be read, in the model's order.
func (m *model) items(threads int) []*item { return m.cachedItems(stored.NewCache(threads)) }

func (m *model) cachedItems(c *stored.Cache) []*item {
	bodies := make([]fromFile, len(m.ix.Tensors))
	at := func(i int) fromFile {
		if bodies[i].Tensor == nil {
			t := &m.ix.Tensors[i]
			bodies[i].Tensor = stored.New(m.srcs[t.Source], m.ix, t, c)
		}
		return bodies[i]
	}
	origins := make([]origin, len(m.srcs))
	for k := range origins {
		origins[k] = origin{m.srcs[k], m.ix.Sources[k].Format}
	}
	items := make([]*item, len(bodies))
	for i := range items {
		t := &m.ix.Tensors[i]
		holder := m.holderOf(i)
		it := &item{name: t.Name, dtype: t.DType, shape: t.Shape, bytes: t.Bytes, body: at(holder), parts: 1,
			origin: &origins[t.Source]}
		if m.ix.Sources[t.Source].Overwire() {
			it.known = t
			h := &m.ix.Tensors[holder]
			for _, ch := range m.ix.Chunks[h.First : h.First+h.Count] {
				switch {
				case ch.Codec == tensor.CodecPlanes:
					it.knownPlanes = true
				case ch.Codec == tensor.CodecX16 && it.knownTransform == 0:
					it.knownTransform = ch.Transform
				}
			}
		}
		items[i] = it
	}
	return items
}
