package save

// This file describes the tensors that are written, and reads their bytes.

import (
	"bytes"
	"context"
	"math"
	"sort"
	"sync"
	"unicode/utf8"

	"github.com/overwire/overwire/gosrc/codec"
	"github.com/overwire/overwire/gosrc/codec/blocksum"
	"github.com/overwire/overwire/gosrc/codec/digest"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/format/overwire"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/stored"
	"github.com/overwire/overwire/gosrc/tensor"
	"github.com/zeebo/xxh3"
)

// A body reads the logical bytes of a tensor. It is safe for concurrent use.
type body interface {
	// bytes returns bytes [off, off+len(buf)) of the tensor in row-major order. It either fills and returns buf, or
	// returns memory of the body that stays valid until the job ends.
	bytes(ctx context.Context, buf []byte, off int64) ([]byte, error)
}

// memory is a body in contiguous memory of the caller.
type memory []byte

func (m memory) bytes(_ context.Context, buf []byte, off int64) ([]byte, error) {
	return m[off : off+int64(len(buf))], nil
}

// scattered is a body in several pieces of the caller's memory.
type scattered struct {
	all  [][]byte
	ends []int64 // end of each piece in the tensor
}

func newScattered(all [][]byte) *scattered {
	p := &scattered{all: all}
	end := int64(0)
	for _, one := range all {
		end += int64(len(one))
		p.ends = append(p.ends, end)
	}
	return p
}

func (p *scattered) bytes(_ context.Context, buf []byte, off int64) ([]byte, error) {
	k := sort.Search(len(p.ends), func(k int) bool { return p.ends[k] > off })
	for done := 0; done < len(buf); k++ {
		from := p.all[k][int64(len(p.all[k]))-(p.ends[k]-off-int64(done)):]
		if done == 0 && len(from) >= len(buf) {
			return from[:len(buf)], nil
		}
		done += copy(buf[done:], from)
	}
	return buf, nil
}

type deviceBody struct {
	*DeviceMemory
	ahead map[piece][]byte // samples read in advance
}

// A piece is a range of a tensor's bytes.
type piece struct{ off, n int64 }

func (a *deviceBody) bytes(ctx context.Context, buf []byte, off int64) ([]byte, error) {
	if len(buf) == 0 {
		return buf, nil
	}
	if b := a.ahead[piece{off, int64(len(buf))}]; b != nil {
		return b, nil
	}
	if err := errs.Cause(ctx); err != nil {
		return nil, err
	}
	return buf, a.Read(buf, off)
}

type form uint8

const (
	plain form = iota
	compressed
	alias
)

type fileBody struct{ *stored.Tensor }

func (f fileBody) bytes(ctx context.Context, buf []byte, off int64) ([]byte, error) {
	return buf, f.Fill(ctx, buf, off)
}

// A fileSource is the file that a tensor comes from.
type fileSource struct {
	src    source.Source
	format string // tensor.Source.Format
	// known is the tensor in a container, or nil for other files. transform is its X16 transform there; 0 means none.
	// planes means that some of its chunks have codec 6.
	known     *tensor.Tensor
	transform uint8
	planes    bool
}

// An Item is one tensor that is written to a file.
type Item struct {
	name  string
	dtype tensor.DType
	shape []int64
	bytes int64
	body  body
	from  *fileSource // nil if it is in memory

	// The following fields are set by classification.
	form   form
	ways   codec.Ways // codecs for its chunks
	trials []trial    // its encoded chunks, if it is small
	expect float64    // stored / logical, an estimate
	of     *Item      // for an alias: the item that stores the bytes, which is not an alias
	parts  int64

	sums itemSums // set while it is written
}

// itemSums holds the hash and the digest of a tensor's bytes.
type itemSums struct {
	hash     [16]byte
	hashed   bool // hash is final: it needs no computation or comparison
	blocks   blocksum.State
	digest   digest.State
	digested *digest.Sum // computed by the GPU that encodes it; if nil, use digest
}

// A trial is a chunk that was encoded to learn its size. out is nil for a raw chunk.
type trial struct {
	out   []byte
	codec tensor.Chunk
}

// ItemsOf returns items for the tensors of a model, in the model's order. cache holds their decoded blocks.
func ItemsOf(m *stored.Model, cache *stored.Cache) []*Item {
	readers := m.Readers(cache)
	items := make([]*Item, len(readers))
	for i := range items {
		t := &m.Index.Tensors[i]
		s := &m.Index.Sources[t.Source]
		from := &fileSource{src: m.Sources[t.Source], format: s.Format}
		if s.Overwire() {
			from.known = t
			h := &m.Index.Tensors[m.Holder(i)]
			for _, ch := range m.Index.Chunks[h.First : h.First+h.Count] {
				switch {
				case ch.Codec == tensor.CodecPlanes:
					from.planes = true
				case ch.Codec == tensor.CodecX16 && from.transform == 0:
					from.transform = ch.Transform
				}
			}
		}
		items[i] = &Item{name: t.Name, dtype: t.DType, shape: t.Shape, bytes: t.Bytes, body: fileBody{readers[i]},
			from: from, parts: 1}
	}
	return items
}

// known returns the container's tensor that the item is read from, or nil if it is not from a container.
func (t *Item) known() *tensor.Tensor {
	if t.from == nil {
		return nil
	}
	return t.from.known
}

// IsFromContainer reports whether the item is read from a container of docs/format.md.
func (t *Item) IsFromContainer() bool { return t.known() != nil }

// checkItems refuses tensors that no file can hold, before anything is written.
func checkItems(path string, items []*Item) error {
	seen := make(map[string]struct{}, len(items))
	if int64(len(items)) > math.MaxInt32-1 {
		return badArgument(path, "", "there are too many tensors: %d", len(items))
	}
	for _, t := range items {
		bad := func(format string, args ...any) error { return badArgument(path, t.name, format, args...) }
		switch {
		case t.name == "__metadata__" || t.name == overwire.IndexName:
			return bad("the name is reserved")
		case !utf8.ValidString(t.name):
			return bad("the name is not valid UTF-8")
		case !t.dtype.Valid():
			return bad("unknown dtype code %d", t.dtype)
		case len(t.shape) > tensor.MaxRank:
			return bad("rank %d exceeds the maximum %d", len(t.shape), tensor.MaxRank)
		}
		if _, dup := seen[t.name]; dup {
			return bad("two tensors have this name")
		}
		seen[t.name] = struct{}{}
		size, err := tensor.Size(t.dtype, t.shape)
		if err != nil {
			return bad("%v", err)
		}
		if size != t.bytes {
			return bad("shape %v of %v takes %d bytes, but got %d", t.shape, t.dtype, size, t.bytes)
		}
	}
	return nil
}

func checkMetadata(path string, m map[string]string) error {
	for k, v := range m {
		switch {
		case k == overwire.MetadataKey:
			return badArgument(path, "", "metadata key %q is reserved", k)
		case !utf8.ValidString(k) || !utf8.ValidString(v):
			return badArgument(path, "", "metadata %q is not valid UTF-8", k)
		}
	}
	return nil
}

// minPart is the minimum size of a column part. Smaller parts cost more in tables and records than slicing saves.
const minPart = 4096

// chooseParts returns the largest of asked, asked/2, ..., 1 that divides every row into parts of whole elements.
func (t *Item) chooseParts(asked int) int64 {
	as := tensor.Tensor{DType: t.dtype, Shape: t.shape, Bytes: t.bytes}
	for p := asked; p > 1; p /= 2 {
		if as.Splits(p) && t.bytes/int64(p) >= minPart {
			return int64(p)
		}
	}
	return 1
}

// joinParts stores the tensor in one part. Its bytes are then compared with the source's hash as they are written.
func (t *Item) joinParts() {
	if t.parts > 1 && t.known() != nil {
		t.sums.hashed = false
	}
	t.parts = 1
}

func (t *Item) rowBits() int64 {
	as := tensor.Tensor{DType: t.dtype, Shape: t.shape, Bytes: t.bytes}
	return as.RowBits()
}

// fillBytes copies bytes [off, off+len(dst)) to dst.
func (t *Item) fillBytes(ctx context.Context, dst []byte, off int64) error {
	got, err := t.body.bytes(ctx, dst, off)
	if err == nil && &got[0] != &dst[0] {
		copy(dst, got)
	}
	return err
}

// gatherColumns returns bytes [off, off+len(buf)) of column part p, row after row. It fills
// buf if there are several parts; otherwise it may return other memory, as body.bytes does.
func (t *Item) gatherColumns(ctx context.Context, buf []byte, p, off int64) ([]byte, error) {
	if t.parts <= 1 {
		return t.body.bytes(ctx, buf, off)
	}
	row := t.bytes / t.shape[0] // tensors in several parts have rows
	width := row / t.parts
	for done := int64(0); done < int64(len(buf)); {
		r, c := (off+done)/width, (off+done)%width
		n := min(width-c, int64(len(buf))-done)
		if err := t.fillBytes(ctx, buf[done:done+n], r*row+p*width+c); err != nil {
			return nil, err
		}
		done += n
	}
	return buf, nil
}

// hashGlances hashes three small pieces of a tensor. If the tensor is from a container, it
// returns the stored hash of the whole tensor instead.
func (t *Item) hashGlances(ctx context.Context) ([16]byte, error) {
	if t.known() != nil {
		return t.known().Hash, nil
	}
	var h xxh3.Hasher
	var buf [glanceBytes]byte
	for _, off := range glanceOffsets(t.bytes) {
		got, err := t.body.bytes(ctx, buf[:min(int64(len(buf)), t.bytes-off)], off)
		if err != nil {
			return [16]byte{}, err
		}
		_, _ = h.Write(got)
	}
	return codec.HashOf(h.Sum128()), nil
}

const (
	// minAlias is the minimum size of tensors that are compared for equality. For smaller
	// tensors the comparison costs more than an alias saves.
	minAlias    = 1024
	glanceBytes = 512 // bytes of one piece; less than minAlias
)

func glanceOffsets(bytes int64) []int64 { return []int64{0, bytes / 2, bytes - glanceBytes} }

// hashAll returns XXH3-128 of the logical bytes, computed once for each tensor.
func (t *Item) hashAll(ctx context.Context) ([16]byte, error) {
	if t.sums.hashed {
		return t.sums.hash, nil
	}
	if t.known() != nil {
		// encoder.placeTask compares the bytes with this hash when they are read.
		t.sums.hash, t.sums.hashed = t.known().Hash, t.parts > 1
		return t.sums.hash, nil
	}
	var h xxh3.Hasher
	err := t.walkBytes(ctx, func(p []byte) error { _, _ = h.Write(p); return nil })
	t.sums.hash, t.sums.hashed = codec.HashOf(h.Sum128()), err == nil
	return t.sums.hash, err
}

// digestAll adds all bytes of a tensor to sum, and compares them with the source's hash.
func (t *Item) digestAll(ctx context.Context, sum *digest.State) error {
	var h xxh3.Hasher
	at := int64(0)
	err := t.walkBytes(ctx, func(p []byte) error {
		sum.Add(at, p)
		at += int64(len(p))
		if t.known() != nil {
			_, _ = h.Write(p)
		}
		return nil
	})
	if err == nil && t.known() != nil && t.bytes > 0 && codec.HashOf(h.Sum128()) != t.known().Hash {
		return t.errOtherBytes()
	}
	return err
}

var (
	// pieces holds buffers for bytes that are compared, hashed or encoded as a trial.
	pieces = sync.Pool{New: func() any { return new([1 << 20]byte) }}
	// encoders holds unused encoders and their memory.
	encoders = sync.Pool{New: func() any { return new(codec.Encoder) }}
)

// walkBytes calls f with all bytes of a tensor, in row-major order.
func (t *Item) walkBytes(ctx context.Context, f func(p []byte) error) error {
	buf := pieces.Get().(*[1 << 20]byte)
	defer pieces.Put(buf)
	for off := int64(0); off < t.bytes; off += int64(len(buf)) {
		if ctx.Err() != nil {
			return errs.Cause(ctx)
		}
		p, err := t.body.bytes(ctx, buf[:min(int64(len(buf)), t.bytes-off)], off)
		if err != nil {
			return err
		}
		if err := f(p); err != nil {
			return err
		}
	}
	return nil
}

// isEqual reports whether two tensors of equal size have the same bytes.
func isEqual(ctx context.Context, a, b *Item) (bool, error) {
	if x, ok := a.body.(fileBody); ok && b.body == body(x) {
		return true, nil
	}
	same := true
	var off int64
	buf := pieces.Get().(*[1 << 20]byte)
	defer pieces.Put(buf)
	err := a.walkBytes(ctx, func(p []byte) error {
		if !same {
			return nil
		}
		q, err := b.body.bytes(ctx, buf[:len(p)], off)
		off += int64(len(p))
		same = err == nil && bytes.Equal(p, q)
		return err
	})
	return same && err == nil, err
}

// errOtherBytes returns the error for a tensor with bytes that do not match the source's hash. It names the source.
func (t *Item) errOtherBytes() error {
	return errs.Locate("read", t.from.src.URI(), t.name, -1,
		errs.New(errs.ErrCorrupt, "the tensor's bytes differ from those that were saved (XXH3-128 mismatch)"))
}
