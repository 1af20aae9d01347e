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
	// bytes returns bytes [off, off+len(buf)) in plain order: either buf, filled,
	// or memory of the body that stays valid until the job ends.
	bytes(ctx context.Context, buf []byte, off int64) ([]byte, error)
}

// memory is a body in the caller's memory.
type memory []byte

func (m memory) bytes(_ context.Context, buf []byte, off int64) ([]byte, error) {
	return m[off : off+int64(len(buf))], nil
}

// scattered is a body in several places of the caller's memory.
type scattered struct {
	all  [][]byte
	ends []int64 // of each, in the tensor
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

// deviceBody is a body in the memory of a device.
type deviceBody struct {
	*DeviceMemory
	ahead map[piece][]byte // bytes that were read before they are asked for
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

// fileBody is a body in a file.
type fileBody struct{ *stored.Tensor }

func (f fileBody) bytes(ctx context.Context, buf []byte, off int64) ([]byte, error) {
	return buf, f.Fill(ctx, buf, off)
}

// A fileSource is the file that a tensor comes from.
type fileSource struct {
	src    source.Source
	format string // tensor.Source.Format
	// known is the tensor of a container, nil in other files. transform is how it is coded there (0: not), and
	// planes says that some of its chunks have codec 6.
	known     *tensor.Tensor
	transform uint8
	planes    bool
}

// An Item is one tensor on its way into a file.
type Item struct {
	name  string
	dtype tensor.DType
	shape []int64
	bytes int64
	body  body
	from  *fileSource // nil: it is in memory

	// Set by classification.
	form   form
	ways   codec.Ways // of its chunks
	trials []trial    // its chunks, if it is small
	expect float64    // stored / logical, an estimate
	of     *Item      // alias: the item that has its bytes; never itself an alias
	parts  int64

	sums itemSums // set while it is written
}

// itemSums are the hash and the digest of a tensor's bytes.
type itemSums struct {
	hash     [16]byte
	hashed   bool // hash is known before the tensor is written
	blocks   blocksum.State
	digest   digest.State
	digested *digest.Sum // by the GPU that encodes it; nil: digest has it
}

// A trial is a chunk that was encoded to learn its size, with its codec. out: nil for a raw chunk.
type trial struct {
	out   []byte
	codec tensor.Chunk
}

// ItemsOf prepares the tensors of a model to be read, in the model's order. cache has their decoded blocks.
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

// known is the tensor of a container that the item is; nil for others.
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

// minPart is the least size of a column part: smaller parts cost more in tables and
// records than slicing saves.
const minPart = 4096

// chooseParts is the largest of asked, asked/2 … 1 that divides every row into parts of whole
// elements.
func (t *Item) chooseParts(asked int) int64 {
	as := tensor.Tensor{DType: t.dtype, Shape: t.shape, Bytes: t.bytes}
	for p := asked; p > 1; p /= 2 {
		if as.Splits(p) && t.bytes/int64(p) >= minPart {
			return int64(p)
		}
	}
	return 1
}

// joinParts stores the tensor in one part. The hash that it has from its source is then
// compared as it is written.
func (t *Item) joinParts() {
	if t.parts > 1 && t.known() != nil {
		t.sums.hashed = false
	}
	t.parts = 1
}

// rowBits is that of a tensor.
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

// gatherColumns returns bytes [off, off+len(buf)) of column part p, row after row: in
// buf, or as bytes does when there is one part.
func (t *Item) gatherColumns(ctx context.Context, buf []byte, p, off int64) ([]byte, error) {
	if t.parts <= 1 {
		return t.body.bytes(ctx, buf, off)
	}
	row := t.bytes / t.shape[0] // tensors of several parts have rows
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

// hashGlances hashes three small pieces of a tensor; for an overwire source it returns
// the stored hash of the whole.
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
	// minAlias: smaller tensors are not compared for equality, since the saved
	// record is worth less than the comparison.
	minAlias    = 1024
	glanceBytes = 512 // of one piece of a glance; less than minAlias
)

func glanceOffsets(bytes int64) []int64 { return []int64{0, bytes / 2, bytes - glanceBytes} }

// hashAll is XXH3-128 of the logical bytes, computed once for each tensor.
func (t *Item) hashAll(ctx context.Context) ([16]byte, error) {
	if t.sums.hashed {
		return t.sums.hash, nil
	}
	if t.known() != nil {
		// The bytes are checked against it when they are read: see encoder.placeTask.
		t.sums.hash, t.sums.hashed = t.known().Hash, t.parts > 1
		return t.sums.hash, nil
	}
	var h xxh3.Hasher
	err := t.walkBytes(ctx, func(p []byte) error { _, _ = h.Write(p); return nil })
	t.sums.hash, t.sums.hashed = codec.HashOf(h.Sum128()), err == nil
	return t.sums.hash, err
}

// digestAll adds all bytes of a tensor, and compares them with the hash of their source.
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
	// pieces are buffers for bytes that are compared, hashed or tried.
	pieces = sync.Pool{New: func() any { return new([1 << 20]byte) }}
	// encoders are reused, with their memory.
	encoders = sync.Pool{New: func() any { return new(codec.Encoder) }}
)

// walkBytes calls f with all bytes of a tensor, in plain order.
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

// isEqual compares the bytes of two tensors of one size.
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

// errOtherBytes is the error of a tensor if its bytes do not have the hash of its source. It names the source.
func (t *Item) errOtherBytes() error {
	return errs.Locate("read", t.from.src.URI(), t.name, -1,
		errs.New(errs.ErrCorrupt, "the tensor's bytes differ from those that were saved (XXH3-128 differs)"))
}
