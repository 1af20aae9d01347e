package tensor

// This file validates an Index.

import (
	"fmt"
	"math"
	"unicode/utf8"

	"github.com/overwire/overwire/gosrc/errs"
)

// Limits for the chunks of a container.
const (
	ChunkAlign   = 4096 // the chunk size is a multiple of this
	StoredAlign  = 16   // stored chunks start at multiples of this, except in plain tensors
	BlobAlign    = 64   // the stored size of a tensor is a multiple of this, unless it is plain
	MaxSegTiles  = 256
	maxTransform = 8 // highest transform of X16
	maxPlanes    = 7 // highest transform of planes
)

// A Known func reports whether a reader can decode chunks with a codec and a transform for a dtype.
type Known func(c Codec, transform uint8, d DType) bool

// Validate is the only validator of an Index. It checks for every source:
//
//   - Tensors are grouped by source and sorted by offset. Their bytes start at the data section, lie
//     inside the file, and do not overlap or (except in files with Gaps) leave gaps.
//   - Names are valid UTF-8 and unique in their source. Dtype, rank and shape are valid and give
//     exactly the stated number of bytes.
//   - The chunk grid fits the tensor and its chunks fit the grid, in order. Each chunk lies inside its
//     tensor's stored bytes and is not larger than its logical bytes.
//   - An alias refers to a tensor with the same source, dtype, size and content. That tensor is not an alias.
//   - Codec and transform are known. If known is nil, docs/format.md defines which are.
//
// The package of each format checks the bytes after the last tensor. The error is an errs.At with class
// errs.ErrFormat, or errs.ErrNotSupported for an unknown codec. Validate allocates only one table of names.
func (ix *Index) Validate(known Known) error {
	if known == nil {
		known = documented
	}
	v := validator{ix: ix, known: known, names: newNames(len(ix.Tensors))}
	if len(ix.Tensors) >= math.MaxInt32 || len(ix.Chunks) > math.MaxInt32 {
		return v.bad(0, -1, -1, "too many tensors or chunks")
	}
	for i := range ix.Tensors {
		if err := v.tensor(i); err != nil {
			return err
		}
	}
	if v.chunk != len(ix.Chunks) {
		return v.bad(-1, -1, -1, "%d chunks belong to no tensor", len(ix.Chunks)-v.chunk)
	}
	return nil
}

// documented is the Known for the codecs and transforms of docs/format.md.
func documented(c Codec, transform uint8, _ DType) bool {
	switch c {
	case CodecRaw:
		return transform == 0
	case CodecX16:
		return transform >= 1 && transform <= maxTransform
	case CodecPlanes:
		return transform >= 1 && transform <= maxPlanes
	}
	return false
}

type validator struct {
	ix    *Index
	known Known
	names names
	src   int   // the source of the previous tensor
	began bool  // whether src is set
	next  int64 // expected offset of the next tensor's bytes
	chunk int   // number of the first chunk that no tensor has used so far
}

func (v *validator) bad(i, chunk int, off int64, format string, args ...any) error {
	return v.wrap(i, chunk, off, errs.New(errs.ErrFormat, format, args...))
}

func (v *validator) wrap(i, chunk int, off int64, err error) error {
	at := &errs.At{Verb: "index", Chunk: int64(chunk), Offset: off, Err: err}
	if i >= 0 && i < len(v.ix.Tensors) {
		t := &v.ix.Tensors[i]
		at.Tensor = t.Name
		if t.Source >= 0 && int(t.Source) < len(v.ix.Sources) {
			at.Source = v.ix.Sources[t.Source].URI
		}
	}
	return at
}

func (v *validator) tensor(i int) error {
	t := &v.ix.Tensors[i]
	s := int(t.Source)
	if s < 0 || s >= len(v.ix.Sources) || v.began && s < v.src {
		return v.bad(i, -1, -1, "its source %d is out of order", s)
	}
	src := &v.ix.Sources[s]
	if !v.began || s != v.src {
		if src.Data < 0 || src.Data > src.Size {
			return v.bad(i, -1, -1, "the data section is outside the file")
		}
		v.began, v.src, v.next = true, s, src.Data
		if src.Overwire() && t.Off > src.Data {
			v.next = t.Off // the index is stored before the first tensor
		}
	}
	if !utf8.ValidString(t.Name) {
		return v.bad(i, -1, -1, "the name is not valid UTF-8")
	}
	if !v.names.put(v.ix.Tensors, i) {
		return v.bad(i, -1, t.Off, "two tensors have this name")
	}
	if len(t.Shape) > MaxRank {
		return v.bad(i, -1, t.Off, "rank %d exceeds the maximum %d", len(t.Shape), MaxRank)
	}
	size, err := Size(t.DType, t.Shape)
	if err != nil {
		return v.wrap(i, -1, t.Off, err)
	}
	if size != t.Bytes {
		return v.wrap(i, -1, t.Off, errs.OfRule("TensorInvalidInfo", errs.ErrFormat,
			"the header gives it %d bytes, but shape %v of %v takes %d", t.Bytes, t.Shape, t.DType, size))
	}
	if t.Off != v.next && !(src.Gaps && t.Off > v.next) || t.Stored < 0 {
		return v.wrap(i, -1, t.Off, errs.OfRule("InvalidOffset", errs.ErrFormat,
			"its bytes begin at %d, expected %d", t.Off, v.next))
	}
	if t.Stored > src.Size-t.Off {
		return v.bad(i, -1, t.Off, "its bytes end after the end of the file at %d", src.Size)
	}
	v.next = t.Off + t.Stored
	if t.Count == 0 && (t.First < 0 || int(t.First) > v.chunk) {
		return v.bad(i, -1, t.Off, "its first chunk is %d, expected %d", t.First, v.chunk)
	}
	if t.Alias != -1 {
		return v.alias(i)
	}
	if !src.Overwire() || t.Bytes == 0 {
		if t.Stored != t.Bytes || !t.Plain || t.Count != 0 || t.Parts != 0 || t.ChunkBytes != 0 {
			return v.bad(i, -1, t.Off, "it has no chunks, but is not plain")
		}
		return nil
	}
	return v.chunks(i)
}

func (v *validator) alias(i int) error {
	t := &v.ix.Tensors[i]
	if t.Alias < 0 || int(t.Alias) >= len(v.ix.Tensors) || !v.ix.Sources[t.Source].Overwire() {
		return v.bad(i, -1, -1, "it is an alias of tensor %d, which does not exist", t.Alias)
	}
	to := &v.ix.Tensors[t.Alias]
	switch {
	case to.Alias != -1 || to.Source != t.Source:
		return v.bad(i, -1, -1, "it is an alias of %q, which has no bytes itself", to.Name)
	case to.DType != t.DType || to.Bytes != t.Bytes || to.Hash != t.Hash:
		return v.bad(i, -1, -1, "it is an alias of %q, which differs in dtype, size or content", to.Name)
	case t.Bytes == 0 || t.Stored != 0 || t.Count != 0 || t.Plain || t.Parts != 0 || t.ChunkBytes != 0:
		return v.bad(i, -1, -1, "an alias must have no bytes or chunks of its own, and refer to a non-empty tensor")
	}
	return nil
}

func (v *validator) chunks(i int) error {
	t := &v.ix.Tensors[i]
	switch t.Parts {
	case 1, 2, 4, MaxColParts:
	default:
		return v.bad(i, -1, t.Off, "invalid number of column parts: %d", t.Parts)
	}
	if t.ChunkBytes == 0 || t.ChunkBytes%ChunkAlign != 0 || t.ChunkBytes > MaxChunkBytes {
		return v.bad(i, -1, t.Off, "invalid chunk size: %d bytes", t.ChunkBytes)
	}
	if !t.Splits(int(t.Parts)) || t.Plain && t.Parts != 1 {
		return v.bad(i, -1, t.Off, "rows of shape %v cannot be divided into %d parts", t.Shape, t.Parts)
	}
	if t.Plain && t.Stored != t.Bytes || !t.Plain && t.Stored%BlobAlign != 0 {
		return v.bad(i, -1, t.Off, "invalid stored size: %d bytes", t.Stored)
	}
	g := t.Grid()
	n := g.Chunks()
	if int64(t.Count) != n || int(t.First) != v.chunk || n > int64(len(v.ix.Chunks)-v.chunk) {
		return v.bad(i, -1, t.Off, "it has %[2]d chunks from number %[1]d, expected %[4]d from %[3]d",
			t.First, t.Count, v.chunk, n)
	}
	cs := v.ix.Chunks[v.chunk : v.chunk+int(n)]
	v.chunk += int(n)
	pos, end := t.Off, t.Off+t.Stored
	for k := range cs {
		c := &cs[k]
		_, lo, hi := g.Chunk(int64(k))
		var why string
		switch {
		case int64(c.Logical) != hi-lo:
			why = fmt.Sprintf("the chunk has %d logical bytes, expected %d", c.Logical, hi-lo)
		case c.Off < pos || c.Off > end || int64(c.Stored) > end-c.Off:
			why = fmt.Sprintf("the chunk is stored at %d + %d, outside [%d, %d)", c.Off, c.Stored, pos, end)
		case c.Stored == 0 || c.Stored > c.Logical || c.SegTiles > MaxSegTiles,
			c.Codec == CodecX16 && c.SegTiles == 0,
			c.Codec == CodecPlanes && (c.SegTiles != 0 || t.Parts != 1),
			c.Codec == CodecRaw && (c.Stored != c.Logical || c.SegTiles != 0 || c.Transform != 0):
			why = fmt.Sprintf("invalid chunk: %d of %d bytes, codec %v, transform %d, segments of %d tiles",
				c.Stored, c.Logical, c.Codec, c.Transform, c.SegTiles)
		case t.Plain && (c.Off != pos || c.Codec != CodecRaw):
			why = "chunks of a plain tensor must be raw and contiguous"
		case !t.Plain && c.Off%StoredAlign != 0:
			why = fmt.Sprintf("the chunk is stored at %d, which is not a multiple of %d", c.Off, StoredAlign)
		}
		if why != "" {
			return v.bad(i, k, c.Off, "%s", why)
		}
		if !v.known(c.Codec, c.Transform, t.DType) {
			return v.wrap(i, k, c.Off, errs.New(errs.ErrNotSupported,
				"unknown codec %d with transform %d for %v: upgrade overwire", c.Codec, c.Transform, t.DType))
		}
		pos = c.Off + int64(c.Stored)
	}
	return nil
}
