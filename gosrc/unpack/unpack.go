// Package unpack presents tensors that only the host can decode as plain tensors, so all loads, even to a GPU, can read
// them. These are tensors with chunks of codec 6, and tensors in column parts that have an alias with rows of a
// different size.
package unpack

import (
	"context"
	"slices"
	"sort"
	"sync"

	"github.com/overwire/overwire/gosrc/codec"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/blocks"
	"github.com/overwire/overwire/gosrc/internal/crc32c"
	"github.com/overwire/overwire/gosrc/internal/sizes"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/stored"
	"github.com/overwire/overwire/gosrc/tensor"
)

const (
	// beyond is the offset at which decoded tensors appear in their source. It is so far after the source's end that
	// no read can span stored and decoded bytes.
	beyond = 1 << 61
	// mostStored is the maximum number of stored bytes in one read.
	mostStored = 8 << 20
	// cutChunks is the size of the cache for chunks that are requested in parts.
	cutChunks = 64 << 20
)

// Model returns the index and the sources of a model as loads see them. Tensors that only the host can decode are
// plain, and their bytes are beyond the end of their source. If there are no such tensors, it returns ix and srcs.
func Model(ix *tensor.Index, srcs []source.Source) (*tensor.Index, []source.Source) {
	out := ix
	var cache *blocks.Cache[cut]
	var parts *stored.Cache
	other := otherRows(ix)
	for i := range ix.Tensors {
		t := &ix.Tensors[i]
		if !other[int32(i)] && !slices.ContainsFunc(ix.Chunks[t.First:t.First+t.Count], func(c tensor.Chunk) bool {
			return c.Codec == tensor.CodecPlanes
		}) {
			continue
		}
		if out == ix {
			out = &tensor.Index{Sources: ix.Sources, Tensors: slices.Clone(ix.Tensors), Chunks: ix.Chunks}
			srcs, cache, parts = slices.Clone(srcs), blocks.New[cut](cutChunks), stored.CacheOf(cutChunks)
		}
		s, ok := srcs[t.Source].(*unpacker)
		if !ok {
			s = &unpacker{Source: srcs[t.Source], ix: ix, cache: cache, parts: parts, end: beyond}
			srcs[t.Source] = s
		}
		s.tensors, s.at = append(s.tensors, int32(i)), append(s.at, s.end)
		u := &out.Tensors[i]
		u.Off, u.Stored, u.Plain = s.end, t.Bytes, true
		if t.Parts == 1 { // a block is a chunk; reads should end at block borders
			u.Block = int64(t.ChunkBytes)
		}
		u.First, u.Count, u.ChunkBytes, u.Parts = 0, 0, 0, 0
		s.end = sizes.RoundUp(s.end+t.Bytes, tensor.ChunkAlign)
	}
	for _, src := range srcs {
		if s, ok := src.(*unpacker); ok {
			s.openParts()
		}
	}
	return out, srcs
}

// otherRows returns the tensors in column parts that have an alias with rows of a different size, which do not match
// the columns of the parts. It returns nil if there are no such tensors.
func otherRows(ix *tensor.Index) (holders map[int32]bool) {
	for i := range ix.Tensors {
		t := &ix.Tensors[i]
		if t.Alias < 0 || ix.Tensors[t.Alias].Parts <= 1 || ix.Tensors[t.Alias].RowBits() == t.RowBits() {
			continue
		}
		if holders == nil {
			holders = map[int32]bool{}
		}
		holders[t.Alias] = true
	}
	return holders
}

// Over returns a source that reads from bytes, another source of the same file, and decodes
// like src. If src decodes nothing, it returns bytes.
func Over(src, bytes source.Source) source.Source {
	s, ok := src.(*unpacker)
	if !ok {
		return bytes
	}
	over := *s
	over.Source = bytes
	over.openParts()
	return &over
}

// An unpacker is a source with the bytes of decoded tensors beyond its end. Reading them
// compares checksums and decodes.
type unpacker struct {
	source.Source
	ix      *tensor.Index // as stored
	tensors []int32       // in the order of at
	at      []int64       // the offset of each tensor, a multiple of tensor.ChunkAlign
	end     int64
	cache   *blocks.Cache[cut]
	parts   *stored.Cache
	parted  map[int32]*stored.Tensor // readers of the tensors in column parts
}

// openParts makes the readers of the tensors in column parts.
func (s *unpacker) openParts() {
	s.parted = map[int32]*stored.Tensor{}
	for _, i := range s.tensors {
		if t := &s.ix.Tensors[i]; t.Parts > 1 {
			s.parted[i] = stored.New(s.Source, s.ix, t, s.parts)
		}
	}
}

// cut is a chunk that was requested in part, by its number in the index.
type cut int32

// Facts returns the facts of the source, without a view, because a view has no bytes beyond the source's end.
func (s *unpacker) Facts() source.Facts {
	f := s.Source.Facts()
	file, prefetch := f.File, f.Prefetch
	f = f.ReadAtOnly()
	f.File = file // loads use its size and read mode; files with chunks are not mapped
	if prefetch != nil {
		f.Prefetch = func(off, n int64) {
			if off < beyond {
				prefetch(off, n)
			}
		}
	}
	return f
}

// ReadAt implements source.Source. It reads stored bytes, or decodes tensors if off is beyond
// the end. Bytes between decoded tensors are zero.
func (s *unpacker) ReadAt(ctx context.Context, p []byte, off int64) error {
	if off < beyond {
		return s.Source.ReadAt(ctx, p, off)
	}
	for len(p) > 0 {
		k := sort.Search(len(s.at), func(k int) bool { return s.at[k] > off }) - 1
		t := &s.ix.Tensors[s.tensors[k]]
		from := off - s.at[k]
		n := min(int64(len(p)), t.Bytes-from)
		if n > 0 {
			err := error(nil)
			if parts := s.parted[s.tensors[k]]; parts != nil {
				err = parts.Fill(ctx, p[:n], from)
			} else {
				err = s.tensor(ctx, p[:n], t, from)
			}
			if err != nil {
				return err
			}
		} else {
			n = int64(len(p))
			if k+1 < len(s.at) {
				n = min(n, s.at[k+1]-off)
			}
			clear(p[:n])
		}
		p, off = p[n:], off+n
	}
	return nil
}

var buffers = sync.Pool{New: func() any { return new([]byte) }}

// tensor fills p with the bytes of a tensor, starting at off. The tensor has one column part.
func (s *unpacker) tensor(ctx context.Context, p []byte, t *tensor.Tensor, off int64) error {
	buf := buffers.Get().(*[]byte)
	defer buffers.Put(buf)
	for len(p) > 0 {
		// Read as many chunks as mostStored allows.
		first := int32(off / int64(t.ChunkBytes))
		last := int32((off + int64(len(p)) - 1) / int64(t.ChunkBytes))
		c := s.ix.Chunks[t.First+first:]
		n := int32(1)
		for ; first+n <= last && c[n].Off+int64(c[n].Stored)-c[0].Off <= mostStored; n++ {
		}
		need := c[n-1].Off + int64(c[n-1].Stored) - c[0].Off
		if int64(cap(*buf)) < need {
			*buf = make([]byte, need)
		}
		storedBytes := (*buf)[:need]
		if err := s.Source.ReadAt(ctx, storedBytes, c[0].Off); err != nil {
			return err
		}
		for k := range n {
			at := c[k].Off - c[0].Off
			size, err := s.chunk(ctx, p, storedBytes[at:at+int64(c[k].Stored)], t, first+k, off)
			if err != nil {
				return err
			}
			p, off = p[size:], off+int64(size)
		}
	}
	return nil
}

// chunk decodes chunk k of a tensor into p, as far as p has space, and returns how many
// bytes it wrote. p begins at off in the tensor.
func (s *unpacker) chunk(ctx context.Context, p, stored []byte, t *tensor.Tensor, k int32, off int64) (int, error) {
	c := s.ix.Chunks[t.First+k]
	decode := func(dst []byte) error {
		fail := func(verb string, err error) error {
			return &errs.At{Verb: verb, Source: s.URI(), Tensor: t.Name, Chunk: int64(k), Offset: c.Off, Err: err}
		}
		if sum := crc32c.Sum(stored); sum != c.Sum {
			return fail("check", errs.NewMismatch(c.Sum, sum))
		}
		if err := codec.Decode(dst, stored, c); err != nil {
			return fail("decode", err)
		}
		return nil
	}
	from := int(off - int64(k)*int64(t.ChunkBytes))
	if from == 0 && len(p) >= int(c.Logical) {
		return int(c.Logical), decode(p[:c.Logical])
	}
	b, err := s.cache.Get(ctx, cut(t.First+k), func() ([]byte, error) {
		whole := make([]byte, c.Logical)
		return whole, decode(whole)
	})
	if err != nil {
		return 0, err
	}
	defer s.cache.Put(b)
	return copy(p, b.Data[from:]), nil
}
