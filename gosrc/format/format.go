// Package format turns sources into an Index: it detects the format of each source, then reads and validates its
// header and index. It does not read the tensors' data. Each format has its own package.
package format

import (
	"container/list"
	"context"
	"encoding/json"
	"math"
	"slices"
	"sync"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/format/overwire"
	"github.com/overwire/overwire/gosrc/format/safetensors"
	"github.com/overwire/overwire/gosrc/internal/modelfiles"
	"github.com/overwire/overwire/gosrc/internal/spawn"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/tensor"
	"github.com/overwire/overwire/gosrc/tensorizer"
)

// Options are the options of Open. The zero value is strict and accepts every codec of docs/format.md.
type Options struct {
	// Lenient applies to plain safetensors files; see safetensors.Options.
	Lenient bool
	// Keys are the tensors that the caller will use; nil means all. OpenAll does not open shards that have none of
	// these tensors according to an index.json.
	Keys []string
	// Known reports which codecs can be decoded; see codec.Known.
	Known tensor.Known
	// Cache, if not nil, caches the indexes that are read. A Cache must always be used with the same Known.
	Cache *Cache
	// List returns the sorted files of a remote folder, or errs.ErrNotSupported if the store cannot list them. nil
	// means that no store can list files.
	List func(ctx context.Context, uri string) ([]string, error)
	// Parts permits files with parts of tensors; see refuseParts.
	Parts bool
	// Unlisted makes OpenAll also return tensors that are in the files of an index.json but that it does not list.
	// Operations on files set it; operations on models do not.
	Unlisted bool
	// Settings are the values of Access.Decrypt.
	Settings map[string]string
}

// Access describes how to reach files, and holds the settings of file formats.
type Access struct {
	source.Options
	// Decrypt holds the settings for reading a format: the key or password of an encrypted file, and other settings of
	// package tensorizer. A key for a file that is not encrypted gives errs.ErrCrypto.
	Decrypt map[string]string `json:"decrypt"`
	// Encrypt holds the key or password for writing a file.
	Encrypt map[string]string `json:"encrypt"`
}

// Key returns a string that is equal for equal Storage and Decrypt. Opened files may only be shared between equal
// Keys. The string contains secrets.
func (a Access) Key() string {
	return a.Options.Key() + "\x01" + source.Options{Storage: a.Decrypt}.Key()
}

// A reader reads the index of one format.
type reader struct {
	is func(head []byte) bool
	// index returns the validated index and the source that reads the tensors' bytes. If that is not src itself, it
	// owns src.
	index func(ctx context.Context, src source.Source, head []byte, opt Options) (*tensor.Index, source.Source, error)
}

// readers are tried in this order.
var readers = []reader{
	{tensorizer.Is, func(ctx context.Context, src source.Source, head []byte, opt Options) (*tensor.Index,
		source.Source, error) {
		return tensorizer.Index(ctx, src, head, opt.Settings, opt.Known)
	}},
	{func([]byte) bool { return true }, readSafetensors},
}

// Open reads the index of every source and joins them into one, in the given order: source i of the result is
// srcs[i]. Each source costs one read, two if header and index together exceed 256 KiB, three if each of them does,
// and none if it is cached. Several sources are read concurrently. Open replaces encrypted sources in srcs by sources
// that decrypt them.
//
// The error is an errs.At: errs.ErrFormat for a different format, errs.ErrCorrupt for a file that is truncated or has
// changed, errs.ErrNotSupported for a newer version, or the error of a source. Two sources may have tensors with the
// same name.
func Open(ctx context.Context, srcs []source.Source, opt Options) (*tensor.Index, error) {
	parts := make([]*tensor.Index, len(srcs))
	err := spawn.Each(ctx, "open", together, len(srcs), func(i int) (err error) {
		parts[i], srcs[i], err = readIndex(ctx, srcs[i], opt)
		if err == nil && !opt.Parts {
			err = refuseParts(parts[i])
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	return Join(parts)
}

// sharding is the metadata entry in which torch's HuggingFaceStorageWriter stores where the parts in a file begin in
// the whole tensors, for example {"w": {"saved_offsets": [0, 4]}}.
const sharding = "DCP_SHARDING_INFO"

// refuseParts refuses a file that torch's HuggingFaceStorageWriter wrote for one of several ranks: its tensors have
// the names of whole tensors. A file of whole tensors also has the metadata, but its offsets are all zero.
func refuseParts(ix *tensor.Index) error {
	file := &ix.Sources[0]
	text, ok := file.Metadata[sharding]
	if !ok {
		return nil
	}
	var info map[string]struct {
		Offsets []int64 `json:"saved_offsets"`
	}
	isPart := modelfiles.IsPart(source.Name(file.URI)) || json.Unmarshal([]byte(text), &info) != nil
	for _, one := range info {
		isPart = isPart || slices.ContainsFunc(one.Offsets, func(n int64) bool { return n != 0 })
	}
	if !isPart {
		return nil
	}
	return placeError(file.URI, errs.New(errs.ErrNotSupported, "its tensors may be parts, written by one rank of "+
		"torch's HuggingFaceStorageWriter: pass the folder; `overwire convert FOLDER -o OUT` (overwire.convert) and "+
		"overwire.load_file join the parts of a local folder"))
}

// readIndex reads the index of one source, and returns the source that reads its data.
func readIndex(ctx context.Context, src source.Source, opt Options) (*tensor.Index, source.Source, error) {
	if file, ok := src.(*tensorizer.Opened); ok {
		return file.ReadIndex(ctx, opt.Settings, opt.Known)
	}
	key, keep := opt.Cache.key(src, opt.Lenient)
	if keep && len(opt.Settings) == 0 {
		if ix := opt.Cache.getIndex(key, src.URI()); ix != nil {
			return ix, src, nil
		}
	}
	head, err := source.Head(ctx, src)
	if err != nil {
		return nil, src, errs.Place("index", src.URI(), "", 0, err)
	}
	i := slices.IndexFunc(readers, func(r reader) bool { return r.is(head) })
	ix, plain, err := readers[i].index(ctx, src, head, opt)
	if err == nil && keep && plain == src && len(opt.Settings) == 0 {
		opt.Cache.put(key, ix)
	}
	return ix, plain, err
}

// readSafetensors reads a safetensors file or an overwire container.
func readSafetensors(ctx context.Context, src source.Source, head []byte, opt Options) (*tensor.Index, source.Source,
	error) {
	uri := src.URI()
	if err := tensorizer.RefuseSettings(uri, opt.Settings, true); err != nil {
		return nil, src, err
	}
	h, err := safetensors.ReadOn(ctx, src, head, safetensors.Options{Lenient: opt.Lenient})
	if err != nil {
		return nil, src, err
	}
	isOurs, err := overwire.Is(&h)
	if err != nil {
		return nil, src, errs.Place("index", uri, "", 0, err)
	}
	if isOurs {
		blob, err := readContainerIndex(ctx, src, &h)
		if err != nil {
			return nil, src, err
		}
		ix, err := overwire.Decode(blob, &h, uri, src.Size(), opt.Known)
		return ix, src, err
	}
	ix := &tensor.Index{
		Sources: []tensor.Source{{URI: uri, Size: src.Size(), Data: h.Data, Metadata: h.Metadata,
			Format: tensor.FormatSafetensors}},
		Tensors: h.Tensors,
	}
	if err := ix.Validate(opt.Known); err != nil {
		return nil, src, err
	}
	return ix, src, tensorizer.RefuseSettings(uri, opt.Settings, false)
}

// readContainerIndex returns the bytes of a container's index, which is its first tensor. It reads only the bytes
// that were not already read with the header.
func readContainerIndex(ctx context.Context, src source.Source, h *safetensors.Header) ([]byte, error) {
	t := &h.Tensors[0]
	if t.Name != overwire.IndexName {
		return nil, errs.Locate("index", src.URI(), overwire.IndexName, -1,
			errs.New(errs.ErrCorrupt, "the index is not the first tensor"))
	}
	if t.Bytes <= int64(len(h.Ahead)) {
		return h.Ahead[:t.Bytes], nil
	}
	if t.Bytes > tensor.MaxIndex {
		return nil, errs.Place("index", src.URI(), t.Name, t.Off,
			errs.New(errs.ErrFormat, "the index has %d bytes, but at most %d are allowed", t.Bytes, tensor.MaxIndex))
	}
	blob := make([]byte, t.Bytes)
	count := copy(blob, h.Ahead)
	if err := src.ReadAt(ctx, blob[count:], t.Off+int64(count)); err != nil {
		return nil, err
	}
	return blob, nil
}

// Join joins valid indexes into one and reuses their memory. It renumbers sources, chunks and aliases. A single index
// is returned unchanged.
func Join(parts []*tensor.Index) (*tensor.Index, error) {
	if len(parts) == 1 {
		return parts[0], nil
	}
	var sources, tensors, chunks int
	for _, p := range parts {
		sources, tensors, chunks = sources+len(p.Sources), tensors+len(p.Tensors), chunks+len(p.Chunks)
	}
	if max(sources, tensors, chunks) >= math.MaxInt32 {
		return nil, errs.New(errs.ErrNotSupported, "the model is too large: %d files with %d tensors and %d chunks",
			sources, tensors, chunks)
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

// first is the number of bytes that determine a file's format, and its outline if the header fits in them.
const first = 512

// outlineOf returns the outline that model files are opened with.
func outlineOf(opt Options) source.Outline {
	return source.Outline{Size: sizeOf, Longer: opt.Lenient}
}

// sizeOf is Outline.Size. It returns -1 for a .tensors file, which does not store its size.
func sizeOf(uri string, head []byte) (size, need int64, err error) {
	switch {
	case len(head) < first:
		return 0, first, nil
	case tensorizer.Is(head):
		return -1, 0, nil
	}
	n, err := safetensors.Length("", head, math.MaxInt64)
	if err != nil {
		return 0, 0, errs.Place("index", uri, "", 0, err)
	}
	if 8+n > int64(len(head)) {
		return 0, 8 + n, nil
	}
	h, err := safetensors.Parse(uri, head[:8+n], math.MaxInt64, safetensors.Options{Lenient: true})
	if err != nil {
		return 0, 0, err
	}
	end := h.Data
	for i := range h.Tensors {
		end = max(end, h.Tensors[i].Off+h.Tensors[i].Bytes)
	}
	return end, 0, nil
}

// cacheBytes limits the memory of a Cache. This is enough for about 400,000 tensors.
const cacheBytes = 64 << 20

// A Cache keeps the indexes of recently opened files, so that opening one again reads and parses nothing. To return
// only indexes that match the file's current state, it skips sources without an Identity and files that changed a
// moment ago. The zero value is ready to use. A Cache is safe for concurrent use.
type Cache struct {
	mu    sync.Mutex
	by    map[cacheKey]*list.Element // elements are *cached
	order list.List                  // most recently used first
	bytes int64
}

type cacheKey struct {
	id      source.Identity
	lenient bool
}

type cached struct {
	key   cacheKey
	index *tensor.Index
	bytes int64
}

// key returns the key of a source's index. ok is false if the index must not be cached.
func (c *Cache) key(src source.Source, lenient bool) (k cacheKey, ok bool) {
	if c == nil {
		return k, false
	}
	f := src.Facts()
	return cacheKey{f.Identity, lenient}, f.File != nil && f.Settled
}

// getIndex returns the index of a cached file with URI set to uri, or nil.
func (c *Cache) getIndex(k cacheKey, uri string) *tensor.Index {
	c.mu.Lock()
	defer c.mu.Unlock()
	e := c.by[k]
	if e == nil {
		return nil
	}
	c.order.MoveToFront(e)
	was := e.Value.(*cached).index
	s := was.Sources[0]
	s.URI = uri
	return &tensor.Index{Sources: []tensor.Source{s}, Tensors: was.Tensors, Chunks: was.Chunks}
}

// put stores the index of one source, and evicts the least recently used ones if the cache is full.
func (c *Cache) put(k cacheKey, ix *tensor.Index) {
	e := &cached{k, ix, footprintOf(ix)}
	c.mu.Lock()
	defer c.mu.Unlock()
	if e.bytes > cacheBytes || c.by[k] != nil {
		return
	}
	if c.by == nil {
		c.by = map[cacheKey]*list.Element{}
	}
	c.by[k] = c.order.PushFront(e)
	c.bytes += e.bytes
	for c.bytes > cacheBytes {
		last := c.order.Remove(c.order.Back()).(*cached)
		delete(c.by, last.key)
		c.bytes -= last.bytes
	}
}

// footprintOf estimates the memory of an index.
func footprintOf(ix *tensor.Index) int64 {
	n := 1024 + 128*int64(len(ix.Tensors)) + 32*int64(len(ix.Chunks))
	for i := range ix.Tensors {
		n += int64(len(ix.Tensors[i].Name)) + 8*int64(len(ix.Tensors[i].Shape))
	}
	for _, s := range ix.Sources {
		n += int64(len(s.Mark))
		for k, v := range s.Metadata {
			n += int64(len(k)+len(v)) + 64
		}
	}
	return n
}
