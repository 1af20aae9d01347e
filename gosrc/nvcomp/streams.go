package nvcomp

// This file presents the tensors of compressed files as native streams of their stored chunks.

import (
	"context"
	"sort"

	"github.com/overwire/overwire/gosrc/codec"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/blocks"
	"github.com/overwire/overwire/gosrc/internal/sizes"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/tensor"
)

const (
	// beyond is the offset at which streams appear in their source. It is so far after the source's end that no read
	// can span stored bytes and streams.
	beyond = 1 << 61
	// mostStored is the maximum number of stored bytes in one read from a source with round trips.
	mostStored = 8 << 20
	// cutChunks is the size of the cache for chunks that are requested in parts.
	cutChunks = 64 << 20
)

// ViewStreams returns an index of a model's compressed tensors, in which each is a plain tensor of dtype U8: a Native
// stream of X16 with the tensor's stored chunks, unchanged. The returned sources read these streams from srcs and
// compare the chunks' checksums. contents has the content bytes of each stream's chunks.
//
// Streams cannot have chunks of codec 6, or column parts. Such tensors, empty tensors, and those of plain files are
// left out.
func ViewStreams(ix *tensor.Index, srcs []source.Source) (out *tensor.Index, streams []source.Source,
	contents []int64) {
	cache := blocks.New[int32](cutChunks)
	by := make([]*streamSource, len(srcs))
	for i, src := range srcs {
		by[i] = &streamSource{Source: src, ix: ix, cache: cache}
		streams = append(streams, by[i])
	}
	out = &tensor.Index{Sources: ix.Sources}
	views := map[int32]tensor.Tensor{} // by the tensor that has the bytes
	for i := range ix.Tensors {
		holder := int32(i)
		if a := ix.Tensors[i].Alias; a >= 0 {
			holder = a
		}
		t := &ix.Tensors[holder]
		if !canStream(ix, t) {
			continue
		}
		view, ok := views[holder]
		if !ok {
			off, n, cuts := by[t.Source].addStream(t)
			view = tensor.Tensor{Shape: []int64{n}, Bytes: n, Stored: n, Off: off, Source: t.Source, Alias: -1,
				DType: tensor.U8, Plain: true, Cuts: cuts}
			views[holder] = view
		}
		view.Name = ix.Tensors[i].Name
		out.Tensors = append(out.Tensors, view)
		contents = append(contents, int64(t.ChunkBytes))
	}
	return out, streams, contents
}

func canStream(ix *tensor.Index, t *tensor.Tensor) bool {
	for _, c := range ix.Chunks[t.First : t.First+t.Count] {
		if c.Codec != tensor.CodecRaw && c.Codec != tensor.CodecX16 {
			return false
		}
	}
	return t.Count > 0 && t.Parts == 1
}

// A streamSource is a source with streams beyond its end.
type streamSource struct {
	source.Source
	ix      *tensor.Index
	streams []storedStream // in the order of their offsets
	cache   *blocks.Cache[int32]
}

// storedStream is the stream of a tensor.
type storedStream struct {
	t    *tensor.Tensor
	off  int64   // the stream's offset in the source
	head []byte  // the bytes before the payload
	at   []int64 // the offset of each block in the stream, and the end of the stream
}

// addStream adds the stream of a tensor, and returns its offset, its size, and where its blocks end.
func (s *streamSource) addStream(t *tensor.Tensor) (off, n int64, cuts []int64) {
	x := storedStream{t: t, off: beyond}
	if k := len(s.streams) - 1; k >= 0 {
		last := &s.streams[k]
		x.off = sizes.RoundUp(last.off+last.at[last.t.Count], tensor.ChunkAlign)
	}
	algo, _ := byID(X16)
	lengths := make([]int64, t.Count)
	for k, c := range s.ix.Chunks[t.First : t.First+t.Count] {
		lengths[k] = x16Head + int64(c.Stored)
	}
	x.head = make([]byte, nativeTables(algo, int64(t.Count), false))
	x.at = putNative(x.head, &Spec{Chunk: int64(t.ChunkBytes)}, algo, t.Bytes, lengths, nil)
	n = x.at[t.Count-1] + algo.paddedBytes(lengths[t.Count-1])
	x.at = append(x.at, n)
	s.streams = append(s.streams, x)
	return x.off, n, x.at[1:]
}

// Facts returns the facts of the source, without a view, because a view has no streams.
func (s *streamSource) Facts() source.Facts {
	f := s.Source.Facts()
	file := f.File
	f = f.ReadAtOnly()
	f.File, f.Prefetch = file, nil // loads use the file's size and read mode
	return f
}

// ReadAt implements source.Source. Bytes between streams are zero.
func (s *streamSource) ReadAt(ctx context.Context, p []byte, off int64) error {
	for len(p) > 0 {
		k := sort.Search(len(s.streams), func(k int) bool { return s.streams[k].off > off }) - 1
		if k < 0 {
			return errs.New(errs.ErrEngine, "no stream has offset %d", off)
		}
		x := &s.streams[k]
		from := off - x.off
		n := min(int64(len(p)), x.at[x.t.Count]-from)
		if n > 0 {
			if err := s.fillStream(ctx, p[:n], x, from); err != nil {
				return err
			}
		} else {
			n = int64(len(p))
			if k+1 < len(s.streams) {
				n = min(n, s.streams[k+1].off-off)
			}
			clear(p[:n])
		}
		p, off = p[n:], off+n
	}
	return nil
}

// fillStream fills p with the bytes of a stream, starting at off.
func (s *streamSource) fillStream(ctx context.Context, p []byte, x *storedStream, off int64) error {
	if off < int64(len(x.head)) {
		n := copy(p, x.head[off:])
		p, off = p[n:], off+int64(n)
	}
	most := int64(0)
	if s.Source.Facts().Concurrency > 0 {
		most = mostStored
	}
	k := sort.Search(len(x.at), func(k int) bool { return x.at[k] > off }) - 1
	for len(p) > 0 {
		end := k + 1
		for off == x.at[k] && end < int(x.t.Count) && x.at[end+1]-off <= min(most, int64(len(p))) {
			end++
		}
		n := x.at[end] - off
		if off == x.at[k] && n <= int64(len(p)) {
			if err := s.readBlocks(ctx, p[:n], x, k, end); err != nil {
				return err
			}
		} else {
			b, err := s.cache.Get(ctx, x.t.First+int32(k), func() ([]byte, error) {
				whole := make([]byte, x.at[k+1]-x.at[k])
				return whole, s.readBlocks(ctx, whole, x, k, k+1)
			})
			if err != nil {
				return err
			}
			n = int64(copy(p, b.Data[off-x.at[k]:]))
			s.cache.Put(b)
		}
		p, off, k = p[n:], off+n, end
	}
	return nil
}

// readBlocks reads blocks [k, end) of a stream, and compares the checksums of their chunks. It first reads all chunks
// to the end of p, and then moves each forward to its offset.
func (s *streamSource) readBlocks(ctx context.Context, p []byte, x *storedStream, k, end int) error {
	chunks := s.ix.Chunks[x.t.First : x.t.First+x.t.Count]
	first, last := &chunks[k], &chunks[end-1]
	n := last.Off + int64(last.Stored) - first.Off
	for j := k; end > k+1 && j < end; j++ {
		to, from := x.at[j]-x.at[k]+x16Head, int64(len(p))-n+chunks[j].Off-first.Off
		if to <= from && from+int64(chunks[j].Stored) <= int64(len(p)) {
			continue
		}
		for ; k < end; k++ { // the file has these chunks in another order, or with larger gaps
			m := x.at[k+1] - x.at[k]
			if err := s.readBlocks(ctx, p[:m], x, k, k+1); err != nil {
				return err
			}
			p = p[m:]
		}
		return nil
	}
	bytes, moves := p[int64(len(p))-n:], end > k+1
	if !moves {
		bytes = p[x16Head:][:n]
	}
	if err := s.Source.ReadAt(ctx, bytes, first.Off); err != nil {
		return errs.Locate("read", s.URI(), x.t.Name, int64(k), err)
	}
	for base := x.at[k]; k < end; k++ {
		c := &chunks[k]
		block := p[x.at[k]-base : x.at[k+1]-base]
		data := block[x16Head:][:c.Stored]
		if moves {
			copy(data, bytes[c.Off-first.Off:])
		}
		if sum := codec.Sum(data); sum != c.Sum {
			return &errs.At{Verb: "check", Source: s.URI(), Tensor: x.t.Name, Chunk: int64(k), Offset: c.Off,
				Err: errs.NewMismatch(c.Sum, sum)}
		}
		putX16Head(block, c)
		clear(block[x16Head+len(data):])
	}
	return nil
}
