// Package stored opens models and reads their tensors in blocks, which it checks and decodes. It is used by saves,
// conversions, verification and digests, and by loads of tensors that only the host can decode.
package stored

import (
	"context"
	"slices"
	"sync"

	"github.com/overwire/overwire/gosrc/codec"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/blocks"
	"github.com/overwire/overwire/gosrc/internal/crc32c"
	"github.com/overwire/overwire/gosrc/internal/ordered"
	"github.com/overwire/overwire/gosrc/internal/sizes"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/tensor"
)

// plainBlock is the block size for tensors without chunks. For encrypted files it is
// rounded up to whole encryption boxes.
const plainBlock = 1 << 20

// A Tensor reads one tensor of a source. Its chunks are read, checked and decoded when their bytes are needed. In the
// common case, a request for exactly one whole chunk, the chunk is decoded directly to its destination. Other requests,
// such as column parts or a different chunk size, use a cache, so each chunk is decoded about once.
type Tensor struct {
	src   source.Source
	idx   *tensor.Index
	t     *tensor.Tensor // never an alias
	cache *Cache
	row   int64 // bytes of a row
	width int64 // bytes of a row in one column part
	plain int64 // block size of a tensor without chunks
}

// New returns a reader for tensor t of idx, which must not be an alias.
func New(src source.Source, idx *tensor.Index, t *tensor.Tensor, c *Cache) *Tensor {
	s := &Tensor{src: src, idx: idx, t: t, cache: c, plain: plainBlock}
	if t.Block > 0 && t.Block <= tensor.MaxChunkBytes {
		s.plain = sizes.RoundUp(plainBlock, t.Block)
	}
	s.row = t.Bytes
	if len(t.Shape) > 0 && t.Bytes > 0 {
		s.row = t.Bytes / t.Shape[0]
	}
	s.width = s.row / s.partCount()
	c.Need(3 * s.partCount() * s.Block())
	return s
}

func (s *Tensor) partCount() int64 { return max(1, int64(s.t.Parts)) }

// Block returns the chunk size, or the block size of a tensor without chunks.
func (s *Tensor) Block() int64 {
	if s.t.Count == 0 {
		return s.plain
	}
	return int64(s.t.ChunkBytes)
}

// Step returns the size of aligned pieces with which reading the whole tensor decodes no chunk twice.
func (s *Tensor) Step() int64 {
	if s.partCount() > 1 {
		return plainBlock
	}
	return s.Block()
}

// Fill fills buf with bytes [off, off+len(buf)) of the tensor in row-major order. It is safe for concurrent use.
func (s *Tensor) Fill(ctx context.Context, buf []byte, off int64) error {
	if s.partCount() == 1 {
		return s.fillFlat(ctx, buf, off)
	}
	for p := range s.partCount() {
		if err := s.spreadPart(ctx, buf, p, off); err != nil {
			return err
		}
	}
	return nil
}

// spreadPart copies the bytes of part p that belong in buf. buf holds the tensor's bytes in row-major order, starting
// at off.
func (s *Tensor) spreadPart(ctx context.Context, buf []byte, p, off int64) error {
	end := off + int64(len(buf))
	// Include the part's bytes in every row that the request touches. Bytes outside the request are clipped below.
	lo, hi := off/s.row*s.width, sizes.CeilDiv(end, s.row)*s.width
	for b := lo / s.Block(); b*s.Block() < hi; b++ {
		from, to := max(lo, b*s.Block()), min(hi, (b+1)*s.Block())
		// plain returns the offset in the tensor of byte i of the part.
		plain := func(i int64) int64 { return i/s.width*s.row + p*s.width + i%s.width }
		if plain(from) >= end || plain(to-1) < off {
			continue
		}
		e, err := s.holdBlock(ctx, p, b)
		if err != nil {
			return err
		}
		for i := from; i < to; {
			n := min(s.width-i%s.width, to-i)
			at, data := plain(i)-off, e.Data[i-b*s.Block():][:n]
			i += n
			if at < 0 {
				data = data[min(n, -at):]
				at = 0
			}
			if at < int64(len(buf)) {
				copy(buf[at:], data)
			}
		}
		s.cache.Put(e)
	}
	return nil
}

// holdBlock gets a block of a part from the cache.
func (s *Tensor) holdBlock(ctx context.Context, p, b int64) (*blocks.Block[key], error) {
	size := s.t.Bytes / s.partCount()
	per := (size + s.Block() - 1) / s.Block()
	return s.cache.Get(ctx, key{s, p*per + b}, func() ([]byte, error) {
		d := make([]byte, min(s.Block(), size-b*s.Block()))
		return d, s.readBlock(ctx, d, p*per+b, int64(len(d)))
	})
}

func (s *Tensor) fillFlat(ctx context.Context, buf []byte, off int64) error {
	for len(buf) > 0 {
		b := off / s.Block()
		from := off - b*s.Block()
		whole := min(s.Block(), s.t.Bytes-b*s.Block())
		n := min(whole-from, int64(len(buf)))
		if n == whole {
			if err := s.readBlock(ctx, buf[:n], b, whole); err != nil {
				return err
			}
		} else {
			e, err := s.holdBlock(ctx, 0, b)
			if err != nil {
				return err
			}
			copy(buf[:n], e.Data[from:])
			s.cache.Put(e)
		}
		buf, off = buf[n:], off+n
	}
	return nil
}

var buffers = sync.Pool{New: func() any { return new([]byte) }}

// readBlock reads, checks and decodes one whole block into dst.
func (s *Tensor) readBlock(ctx context.Context, dst []byte, k, whole int64) error {
	t := s.t
	if t.Count == 0 {
		off := t.Off + k*s.plain
		return errs.Locate("read", s.src.URI(), t.Name, -1, s.src.ReadAt(ctx, dst, off))
	}
	c := s.idx.Chunks[int64(t.First)+k]
	fail := func(verb string, err error) error {
		return &errs.At{Verb: verb, Source: s.src.URI(), Tensor: t.Name, Chunk: k, Offset: c.Off, Err: err}
	}
	if int64(c.Logical) != whole {
		return fail("decode", errs.New(errs.ErrCorrupt, "the chunk has %d bytes, expected %d", c.Logical, whole))
	}
	in := dst
	if c.Codec != tensor.CodecRaw || c.Stored != c.Logical {
		p := buffers.Get().(*[]byte)
		defer buffers.Put(p)
		*p = slices.Grow((*p)[:0], int(c.Stored))
		in = (*p)[:c.Stored]
	}
	if err := s.src.ReadAt(ctx, in, c.Off); err != nil {
		return errs.Locate("read", s.src.URI(), t.Name, k, err)
	}
	if sum := crc32c.Sum(in); sum != c.Sum {
		return fail("check", errs.NewMismatch(c.Sum, sum))
	}
	if len(dst) > 0 && &in[0] == &dst[0] {
		return nil
	}
	if err := codec.Decode(dst, in, c); err != nil {
		return fail("decode", err)
	}
	return nil
}

// key identifies block k of a tensor.
type key struct {
	s *Tensor
	k int64
}

// A Cache holds decoded blocks of the tensors of a model.
type Cache = blocks.Cache[key]

// NewCache makes a cache that is large enough for the given number of workers.
func NewCache(workers int) *Cache { return CacheOf(int64(workers+2) * (16 << 20)) }

// CacheOf makes a cache of n bytes.
func CacheOf(n int64) *Cache { return blocks.New[key](n) }

// CheckPadding checks that the bytes between and after the chunks of source k of ix are
// zero, as the writer leaves them. If not, the error is errs.ErrCorrupt, with the offset.
func CheckPadding(ctx context.Context, src source.Source, ix *tensor.Index, k int) error {
	var pad [64]byte
	gap := func(i int, from, to int64) error {
		for from < to {
			if ctx.Err() != nil {
				return errs.Cause(ctx)
			}
			p := pad[:min(int64(len(pad)), to-from)]
			if err := src.ReadAt(ctx, p, from); err != nil {
				return err
			}
			for n, b := range p {
				if b != 0 {
					return errs.Place("verify", ix.Sources[k].URI, ix.Tensors[i].Name, from+int64(n),
						errs.New(errs.ErrCorrupt, "bytes between chunks are not zero: the file is damaged"))
				}
			}
			from += int64(len(p))
		}
		return nil
	}
	for i := range ix.Tensors {
		t := &ix.Tensors[i]
		if int(t.Source) != k || t.Count == 0 {
			continue
		}
		at := t.Off
		for _, c := range ix.Chunks[t.First : t.First+t.Count] {
			if err := gap(i, at, c.Off); err != nil {
				return err
			}
			at = c.Off + int64(c.Stored)
		}
		if err := gap(i, at, t.Off+t.Stored); err != nil {
			return err
		}
	}
	return nil
}

// A Span is a range of a tensor's bytes in row-major order.
type Span struct {
	Reader *Tensor
	Number int // tensor number, for the caller
	Off, N int64
	Last   bool
}

// AppendSpans appends the spans of a tensor with the given number of bytes. Reading them decodes no chunk twice.
func AppendSpans(spans []Span, r *Tensor, number int, bytes int64) []Span {
	step := r.Step()
	for off := int64(0); off < bytes; off += step {
		n := min(step, bytes-off)
		spans = append(spans, Span{r, number, off, n, off+n == bytes})
	}
	return spans
}

// Read reads the span into *buf, which grows as needed.
func (s *Span) Read(ctx context.Context, buf *[]byte) ([]byte, error) {
	*buf = slices.Grow((*buf)[:0], int(s.N))[:s.N]
	return *buf, s.Reader.Fill(ctx, *buf, s.Off)
}

// Window returns how many spans ReadInOrder keeps in memory for some workers.
func Window(workers int) int { return 3*workers + 2 }

// ReadInOrder reads spans with several workers. It calls work in parallel with a span's number and bytes. Then it calls
// turn for the spans in order, one at a time. The bytes are valid until turn returns. work may be nil.
func ReadInOrder(ctx context.Context, name string, workers int, spans []Span, work func(k int, b []byte),
	turn func(k int, b []byte) error) error {
	bufs := make([][]byte, Window(workers))
	o := ordered.Tasks{N: len(spans), Window: len(bufs), Workers: workers,
		Work: func(_, k int) error {
			b, err := spans[k].Read(ctx, &bufs[k%len(bufs)])
			if err == nil && work != nil {
				work(k, b)
			}
			return err
		},
		Turn: func(k int) error { return turn(k, bufs[k%len(bufs)]) },
	}
	return o.Run(ctx, name)
}
