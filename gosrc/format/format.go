// Package format turns sources into an Index: it sees which kind of file each
// source is, reads what it says of itself, and holds all of it to the rules
// before a byte of data is read. Each kind is a room below this one.
package format

import (
	"context"
	"math"
	"slices"

	"github.com/overwire/overwire/gosrc/fault"
	"github.com/overwire/overwire/gosrc/format/overwire"
	"github.com/overwire/overwire/gosrc/format/safetensors"
	"github.com/overwire/overwire/gosrc/internal/spawn"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/tensor"
	"github.com/overwire/overwire/gosrc/tensorizer"
)

// Options of Open. The zero value is strict and takes any codec that
// docs/format.md has.
type Options struct {
	// Lenient is for plain safetensors files; see safetensors.Options.
	Lenient bool
	// Keys are the tensors that will be asked for; nil: all. OpenAll leaves
	// shards alone that have none of them by the word of an index.json.
	Keys []string
	// Known tells the codecs that can be decoded: codec.Known.
	Known tensor.Known
	// Cache, if not nil, is asked for indexes first and keeps those that are
	// read. It must always be used with the same Known.
	Cache *Cache
	// List gives the files in a folder far away, sorted; fault.ErrNotSupported
	// where the store cannot tell. nil: none can.
	List func(ctx context.Context, uri string) ([]string, error)
	// Settings are Access.Decrypt.
	Settings map[string]string
}

// Access is how files are reached, and what their formats have to be told.
type Access struct {
	source.Options
	// Decrypt has the settings of formats that are read: the key or the password of
	// an encrypted file, and what else the package tensorizer knows. A key for a
	// file that is not encrypted is fault.ErrCrypto.
	Decrypt map[string]string `json:"decrypt"`
	// Encrypt has the key or the password of a file that is written.
	Encrypt map[string]string `json:"encrypt"`
}

// Key is the same text for the same Storage and Decrypt: what was reached with one
// may not be given to a caller with another. It has the values in it.
func (a Access) Key() string {
	return a.Options.Key() + "\x01" + source.Options{Storage: a.Decrypt}.Key()
}

// A reader reads the index of one kind of file.
type reader struct {
	is func(head []byte) bool
	// index gives the index, validated, and the source to read tensors by, which
	// owns src where it is another.
	index func(ctx context.Context, src source.Source, head []byte, opt Options) (*tensor.Index, source.Source, error)
}

// readers are asked one after the other.
var readers = []reader{
	{tensorizer.Is, func(ctx context.Context, src source.Source, head []byte, opt Options) (*tensor.Index, source.Source, error) {
		return tensorizer.Index(ctx, src, head, opt.Settings, opt.Known)
	}},
	{func([]byte) bool { return true }, ours},
}

// Open reads the index of every source and joins them into one, in the order
// given: source i of the result is srcs[i]. Each costs one read, or two when
// header and index are over 256 KiB, three when both are, and none if the
// cache has it. Several are read at once. Sources that have to be decrypted are
// replaced in srcs by those that do it.
//
// The error is a fault.At: fault.ErrFormat for bytes that are no such file,
// fault.ErrCorrupt for a file that has changed or was cut short,
// fault.ErrNotSupported for one of a newer version, and whatever the source
// gives. Two sources may have tensors of one name; Index.Find tells.
func Open(ctx context.Context, srcs []source.Source, opt Options) (*tensor.Index, error) {
	parts := make([]*tensor.Index, len(srcs))
	err := spawn.Each(ctx, "open", together, len(srcs), func(i int) (err error) {
		parts[i], srcs[i], err = one(ctx, srcs[i], opt)
		return err
	})
	if err != nil {
		return nil, err
	}
	return Join(parts)
}

// one reads the index of one source, and gives the source to read it by.
func one(ctx context.Context, src source.Source, opt Options) (*tensor.Index, source.Source, error) {
	key, keep := opt.Cache.key(src, opt.Lenient)
	if keep && len(opt.Settings) == 0 {
		if ix := opt.Cache.get(key, src.URI()); ix != nil {
			return ix, src, nil
		}
	}
	head, err := safetensors.Head(ctx, src)
	if err != nil {
		return nil, src, err
	}
	i := slices.IndexFunc(readers, func(r reader) bool { return r.is(head) })
	ix, plain, err := readers[i].index(ctx, src, head, opt)
	if err == nil && keep && plain == src && len(opt.Settings) == 0 {
		opt.Cache.put(key, ix)
	}
	return ix, plain, err
}

// ours reads a safetensors file or an overwire container.
func ours(ctx context.Context, src source.Source, head []byte, opt Options) (*tensor.Index, source.Source, error) {
	uri := src.URI()
	if err := tensorizer.Refuse(uri, opt.Settings, true); err != nil {
		return nil, src, err
	}
	h, err := safetensors.ReadOn(ctx, src, head, safetensors.Options{Lenient: opt.Lenient})
	if err != nil {
		return nil, src, err
	}
	marked, err := overwire.Is(&h)
	if err != nil {
		return nil, src, &fault.At{Verb: "index", Source: uri, Chunk: -1, Offset: 0, Err: err}
	}
	if marked {
		blob, err := index(ctx, src, &h)
		if err != nil {
			return nil, src, err
		}
		ix, err := overwire.Decode(blob, &h, uri, src.Size(), opt.Known)
		return ix, src, err
	}
	ix := &tensor.Index{
		Sources: []tensor.Source{{URI: uri, Size: src.Size(), Data: h.Data, Metadata: h.Metadata, Format: tensor.FormatSafetensors}},
		Tensors: h.Tensors,
	}
	if err := ix.Validate(opt.Known); err != nil {
		return nil, src, err
	}
	return ix, src, tensorizer.Refuse(uri, opt.Settings, false)
}

// index returns the bytes of a container's index, which is the first tensor,
// from what came with the header when they are there.
func index(ctx context.Context, src source.Source, h *safetensors.Header) ([]byte, error) {
	t := &h.Tensors[0]
	if t.Name != overwire.IndexName {
		return nil, &fault.At{Verb: "index", Source: src.URI(), Tensor: overwire.IndexName, Chunk: -1, Offset: -1,
			Err: fault.New(fault.ErrCorrupt, "the index is not the first tensor")}
	}
	if t.Bytes <= int64(len(h.Ahead)) {
		return h.Ahead[:t.Bytes], nil
	}
	if t.Bytes > tensor.MaxIndex {
		return nil, &fault.At{Verb: "index", Source: src.URI(), Tensor: t.Name, Chunk: -1, Offset: t.Off,
			Err: fault.New(fault.ErrFormat, "an index of %d bytes is over %d", t.Bytes, tensor.MaxIndex)}
	}
	blob := make([]byte, t.Bytes)
	had := copy(blob, h.Ahead)
	if err := src.ReadAt(ctx, blob[had:], t.Off+int64(had)); err != nil {
		return nil, err
	}
	return blob, nil
}

// Join makes one Index of several, each valid, and takes them over: source
// numbers, chunk numbers and aliases are moved along. One comes back as it is.
func Join(parts []*tensor.Index) (*tensor.Index, error) {
	if len(parts) == 1 {
		return parts[0], nil
	}
	var sources, tensors, chunks int
	for _, p := range parts {
		sources, tensors, chunks = sources+len(p.Sources), tensors+len(p.Tensors), chunks+len(p.Chunks)
	}
	if max(sources, tensors, chunks) >= math.MaxInt32 {
		return nil, fault.New(fault.ErrNotSupported, "%d files with %d tensors and %d chunks", sources, tensors, chunks)
	}
	out := &tensor.Index{
		Sources: make([]tensor.Source, 0, sources),
		Tensors: make([]tensor.Tensor, 0, tensors),
		Chunks:  make([]tensor.Chunk, 0, chunks),
	}
	for _, p := range parts {
		source, first, base := int32(len(out.Sources)), int32(len(out.Chunks)), int32(len(out.Tensors))
		for _, t := range p.Tensors {
			t.Source += source
			t.First += first
			if t.Alias >= 0 {
				t.Alias += base
			}
			out.Tensors = append(out.Tensors, t)
		}
		out.Sources = append(out.Sources, p.Sources...)
		out.Chunks = append(out.Chunks, p.Chunks...)
	}
	return out, nil
}
