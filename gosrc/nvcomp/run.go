package nvcomp

// Encodes or decodes a batch of buffers with one algorithm on all cores, and predicts whether it finishes quickly.

import (
	"context"
	"encoding/binary"
	"hash/crc32"
	"sync"

	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/device/cpu"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/sizes"
	"github.com/overwire/overwire/gosrc/internal/spawn"
	"github.com/overwire/overwire/gosrc/knob"
	"github.com/overwire/overwire/gosrc/nvcomp/cascaded"
	"github.com/overwire/overwire/gosrc/tensor"
)

// Operations of Run.
const (
	OpEncode = "encode"
	OpDecode = "decode"
	OpSize   = "size"  // the size of a stream's content
	OpBound  = "bound" // the maximum size of an encoded stream
)

// Values of Verify: when decoding compares the checksums of a Native stream.
const (
	VerifyNever     = ""
	VerifyIfPresent = "present"
	VerifyAlways    = "always" // a stream without checksums is an error
)

// Default content bytes per chunk: 64 KiB as in nvCOMP, and the best size for X16.
const (
	defaultChunk    = 64 << 10
	defaultChunkX16 = 1 << 20
)

// A Spec is the specification of an operation. Except for Op, the zero value of each field is a good default.
type Spec struct {
	Op        string            `json:"op"`
	Algorithm string            `json:"algorithm"` // "": the algorithm that a Native stream states
	Kind      Kind              `json:"kind"`
	Chunk     int64             `json:"chunk"`    // content bytes of a Native chunk; 0 means the algorithm's default
	Level     int               `json:"level"`    // nvCOMP's algorithm_type, for Deflate, Gzip and GDeflate
	DType     string            `json:"dtype"`    // safetensors name of the dtype; "": X16 uses samples
	Cascaded  *cascaded.Options `json:"cascaded"` // nil: cascaded.Default; DType defines the elements
	Sums      bool              `json:"sums"`     // when encoding, add checksums to Native streams
	Verify    string            `json:"verify"`
	Sizes     []int64           `json:"sizes"` // for OpBound: lengths of contents, instead of buffers

	transform uint8
}

// A Buffer is one input and, if Own is set, the caller's memory for its output.
type Buffer struct {
	Src, Dst []byte
	Own      bool
}

// A Result is the result for one Buffer. The caller owns Mem, which is zero if the Buffer has Own set. If Err is set,
// Mem and Bytes may still be set, for callers that want the invalid bytes.
type Result struct {
	Mem    device.Memory
	Bytes  int64
	Err    error
	Summed bool // whether its checksums were compared
}

// Release frees the memory of results.
func Release(results []Result) {
	for i := range results {
		results[i].Mem.Release()
		results[i].Mem = device.Memory{}
	}
}

// Run processes every buffer according to s on all cores. An error of one buffer is in its Err and does not affect
// the others. If Run itself returns an error, it is about the Spec, the context or a lack of memory, and there are no
// results.
func Run(ctx context.Context, s Spec, in []Buffer) ([]Result, error) {
	var algo *algorithm
	if s.Algorithm != "" {
		var err error
		if algo, err = byName(s.Algorithm); err != nil {
			return nil, err
		}
	}
	if s.Op != OpDecode && s.Op != OpSize {
		if algo == nil {
			return nil, errs.New(errs.ErrArgument, "name an algorithm: encoding needs one")
		}
		if s.Chunk == 0 {
			s.Chunk = defaultChunk
			if algo.id == X16 {
				s.Chunk = defaultChunkX16
			}
		}
		if s.Chunk < 1 || s.Chunk > algo.maxChunk {
			return nil, errs.New(errs.ErrArgument, "invalid chunk size %d for %s: expected 1 to %d",
				s.Chunk, algo.name, algo.maxChunk)
		}
		if s.Sums && s.Kind != Native {
			return nil, errs.New(errs.ErrArgument, "only native streams have checksums")
		}
	}
	if s.Kind < Native || s.Kind > WithSize {
		return nil, errs.New(errs.ErrArgument, "unknown kind of bitstream: %d", s.Kind)
	}
	switch s.Op {
	case OpEncode:
		return encodeAll(ctx, &s, algo, in)
	case OpDecode:
		return decodeAll(ctx, &s, algo, in)
	case OpSize:
		out := make([]Result, len(in))
		err := onAllCores(ctx, len(in), contentBytes(in), func(i int) {
			var l layout
			l, out[i].Err = parseStream(in[i].Src, &s, algo)
			out[i].Bytes = l.size
		})
		return out, err
	case OpBound:
		out := make([]Result, len(s.Sizes))
		for i, n := range s.Sizes {
			if n < 0 || n > 1<<50 {
				return nil, errs.New(errs.ErrArgument, "invalid content size %d: expected 0 to %d bytes",
					n, int64(1)<<50)
			}
			out[i].Bytes = streamBound(&s, algo, n)
		}
		return out, nil
	}
	return nil, errs.New(errs.ErrArgument, "unknown operation %q", s.Op)
}

func contentBytes(in []Buffer) (n int64) {
	for i := range in {
		n += int64(len(in[i].Src))
	}
	return n
}

// maxWhole is the maximum content size of a single block. It is LZ4's limit.
const maxWhole = 0x7E000000

// alone is the number of bytes below which starting goroutines costs more than it saves.
const alone = 256 << 10

// onAllCores calls fn for 0 to n-1, on all cores if there are enough bytes. fn must store its own errors; onAllCores
// only returns errors of the context and of panics.
func onAllCores(ctx context.Context, n int, bytes int64, fn func(i int)) error {
	workers := knob.Workers(0)
	if bytes < alone {
		workers = 1
	}
	return spawn.Each(ctx, "codec", workers, n, func(i int) error { fn(i); return nil })
}

// placeOutputs provides every buffer's output: the caller's memory or new memory. Buffers with an Err get none.
func placeOutputs(in []Buffer, out []Result) ([][]byte, error) {
	sizes := make([]int64, len(in))
	for i := range in {
		switch {
		case out[i].Err != nil:
		case !in[i].Own:
			sizes[i] = out[i].Bytes
		case int64(len(in[i].Dst)) < out[i].Bytes:
			out[i].Err = errs.New(errs.ErrArgument, "the output has %d bytes, %d are needed", len(in[i].Dst),
				out[i].Bytes)
		}
	}
	mem, err := cpu.Alloc(sizes)
	if err != nil {
		return nil, err
	}
	dst := make([][]byte, len(in))
	for i := range in {
		switch {
		case out[i].Err != nil:
		case in[i].Own:
			dst[i] = in[i].Dst[:out[i].Bytes:out[i].Bytes]
		default:
			out[i].Mem = mem[i]
			if sizes[i] > 0 {
				dst[i] = mem[i].Slice()
			}
		}
	}
	return dst, nil
}

func decodeAll(ctx context.Context, s *Spec, algo *algorithm, in []Buffer) ([]Result, error) {
	out := make([]Result, len(in))
	layouts := make([]layout, len(in))
	err := onAllCores(ctx, len(in), contentBytes(in), func(i int) {
		layouts[i], out[i].Err = parseStream(in[i].Src, s, algo)
		out[i].Bytes, out[i].Summed = layouts[i].size, layouts[i].summed
	})
	if err != nil {
		return nil, err
	}
	dst, err := placeOutputs(in, out)
	if err != nil {
		return nil, err
	}
	type task struct{ buffer, block int32 }
	var tasks []task
	var bytes int64
	for i := range layouts {
		if dst[i] == nil && out[i].Bytes > 0 || out[i].Err != nil {
			continue
		}
		bytes += out[i].Bytes
		for k := range layouts[i].blocks {
			tasks = append(tasks, task{int32(i), int32(k)})
		}
	}
	var mu sync.Mutex
	err = onAllCores(ctx, len(tasks), bytes, func(t int) {
		i, k := tasks[t].buffer, tasks[t].block
		l := &layouts[i]
		p := &l.blocks[k]
		to := dst[i][p.at : p.at+p.n : p.at+p.n]
		err := decodeBlock(l, to, p)
		if err != nil {
			mu.Lock()
			if out[i].Err == nil {
				out[i].Err = &errs.At{Verb: "decode", Chunk: int64(k), Offset: -1, Err: err}
			}
			mu.Unlock()
		}
	})
	if err != nil {
		Release(out)
		return nil, err
	}
	for i := range layouts {
		if layouts[i].damaged && out[i].Err == nil {
			out[i].Err = errs.New(errs.ErrCorrupt, "Checksum doesn't match.")
		}
	}
	return out, nil
}

func decodeBlock(l *layout, to []byte, p *block) error {
	if l.summed && crc32.ChecksumIEEE(p.src) != p.stored {
		// Decode anyway, for callers that want the bytes.
		_ = l.algo.decode(to, p.src)
		return errs.New(errs.ErrCorrupt, "Checksum doesn't match.")
	}
	if err := l.algo.decode(to, p.src); err != nil {
		return err
	}
	if l.summed && crc32.ChecksumIEEE(to) != p.contents {
		return errs.New(errs.ErrCorrupt, "Checksum doesn't match.")
	}
	return nil
}

// streamBound returns the maximum size of a stream for n bytes of content.
func streamBound(s *Spec, algo *algorithm, n int64) int64 {
	switch s.Kind {
	case Native:
		chunks := sizes.CeilDiv(n, s.Chunk)
		return nativeTables(algo, chunks, s.Sums) + chunks*algo.paddedBytes(algo.bound(min(n, s.Chunk)))
	case WithSize:
		return int64(algo.prefixBytes()) + algo.bound(n)
	}
	return algo.bound(n)
}

// An encoding is one block to encode: the bytes [from, to) of a buffer.
type encoding struct {
	buffer   int32
	block    int32
	from, to int64
}

// encodeAll encodes the blocks of every buffer on all cores and joins them in its output.
func encodeAll(ctx context.Context, s *Spec, algo *algorithm, in []Buffer) ([]Result, error) {
	d, isKnown, err := fillDefaults(s, algo)
	if err != nil {
		return nil, err
	}
	out := make([]Result, len(in))
	blocks := make([][][]byte, len(in))
	sums := make([][][2]uint32, len(in))
	specs := make([]Spec, len(in))
	tasks := divideIntoBlocks(s, algo, in, out)
	count := make([]int, len(in))
	for _, t := range tasks {
		count[t.buffer]++
	}
	for i, n := range count {
		specs[i], blocks[i] = *s, make([][]byte, n)
		if s.Sums {
			sums[i] = make([][2]uint32, n)
		}
	}
	if algo.id == X16 {
		if err := onAllCores(ctx, len(in), contentBytes(in), func(i int) {
			specs[i].transform = transformFor(d, isKnown, in[i].Src)
		}); err != nil {
			return nil, err
		}
	}
	var mu sync.Mutex
	err = onAllCores(ctx, len(tasks), contentBytes(in), func(t int) {
		x := tasks[t]
		from := in[x.buffer].Src[x.from:x.to]
		block, err := algo.encode(nil, from, &specs[x.buffer])
		if err != nil {
			mu.Lock()
			if out[x.buffer].Err == nil {
				out[x.buffer].Err = &errs.At{Verb: "encode", Chunk: int64(x.block), Offset: x.from, Err: err}
			}
			mu.Unlock()
			return
		}
		blocks[x.buffer][x.block] = block
		if s.Sums {
			sums[x.buffer][x.block] = [2]uint32{crc32.ChecksumIEEE(block), crc32.ChecksumIEEE(from)}
		}
	})
	if err != nil {
		return nil, err
	}
	for i := range in {
		if out[i].Err == nil {
			out[i].Bytes = streamBytes(s, algo, blocks[i])
		}
	}
	dst, err := placeOutputs(in, out)
	if err != nil {
		return nil, err
	}
	err = onAllCores(ctx, len(in), contentBytes(in), func(i int) {
		if out[i].Err == nil {
			joinBlocks(dst[i], &specs[i], algo, int64(len(in[i].Src)), blocks[i], sums[i])
		}
		blocks[i] = nil
	})
	if err != nil {
		Release(out)
		return nil, err
	}
	return out, nil
}

// fillDefaults sets the algorithm's defaults and refuses unsupported settings. known reports whether the Spec has a
// dtype, which is d.
func fillDefaults(s *Spec, algo *algorithm) (d tensor.DType, known bool, err error) {
	if d, known, err = dtypeNamed(s.DType); err != nil {
		return d, known, err
	}
	if algo.id == Cascaded {
		o := cascaded.Default(0)
		if s.Cascaded != nil {
			o = *s.Cascaded
		}
		o.Type = elementType(d)
		s.Cascaded = &o
		if s.Kind == Native && s.Chunk%int64(s.Cascaded.Type.Size()) != 0 {
			return d, known, errs.New(errs.ErrArgument, "chunk size %d is not a multiple of the element size, %d",
				s.Chunk, s.Cascaded.Type.Size())
		}
	}
	switch algo.id {
	case Deflate, Gzip, GDeflate, Cascaded:
		_, err = algo.encode(nil, nil, s) // checks the level or the options
	}
	return d, known, err
}

// dtypeNamed returns the dtype with a safetensors name. known is false for "".
func dtypeNamed(name string) (d tensor.DType, known bool, err error) {
	if d, known = tensor.ParseDType(name); !known && name != "" {
		err = errs.New(errs.ErrArgument, "unknown dtype %q", name)
	}
	return d, known, err
}

// divideIntoBlocks divides the buffers into blocks, in order. A buffer that is too long for its kind of stream gets
// an error in out and no block.
func divideIntoBlocks(s *Spec, algo *algorithm, in []Buffer, out []Result) (tasks []encoding) {
	for i := range in {
		n := int64(len(in[i].Src))
		if s.Kind != Native && n > maxWhole {
			out[i].Err = errs.New(errs.ErrArgument,
				"a buffer of %d bytes is too long for one block of %s: use a native stream", n, algo.name)
			continue
		}
		step, count := s.Chunk, int(sizes.CeilDiv(n, max(s.Chunk, 1)))
		if s.Kind != Native {
			step, count = max(n, 1), 1 // empty content also has a block
		}
		for k := range count {
			at := int64(k) * step
			tasks = append(tasks, encoding{int32(i), int32(k), at, min(at+step, n)})
		}
	}
	return tasks
}

// elementType returns Cascaded's type for a dtype. It is unsigned bytes for other dtypes and for the zero value,
// which means that there is no dtype.
func elementType(d tensor.DType) cascaded.Type {
	switch d {
	case tensor.I8:
		return cascaded.Char
	case tensor.I16:
		return cascaded.Short
	case tensor.U16, tensor.F16, tensor.BF16:
		return cascaded.UShort
	case tensor.I32:
		return cascaded.Int
	case tensor.U32, tensor.F32:
		return cascaded.UInt
	case tensor.I64:
		return cascaded.LongLong
	case tensor.U64, tensor.F64:
		return cascaded.ULongLong
	}
	return cascaded.UChar
}

// streamBytes returns the length of a stream with these blocks.
func streamBytes(s *Spec, algo *algorithm, blocks [][]byte) int64 {
	switch s.Kind {
	case Native:
		n := nativeTables(algo, int64(len(blocks)), s.Sums)
		for _, p := range blocks {
			n += algo.paddedBytes(int64(len(p)))
		}
		return n
	case WithSize:
		return int64(algo.prefixBytes() + len(blocks[0]))
	}
	return int64(len(blocks[0]))
}

// joinBlocks writes a stream with these blocks into dst, which must have the correct length.
func joinBlocks(dst []byte, s *Spec, algo *algorithm, size int64, blocks [][]byte, sums [][2]uint32) {
	switch s.Kind {
	case Native:
		tables := dst[:nativeTables(algo, int64(len(blocks)), s.Sums)]
		clear(tables)
		lengths := make([]int64, len(blocks))
		for i, p := range blocks {
			lengths[i] = int64(len(p))
		}
		at := putNative(tables, s, algo, size, lengths, sums)
		for i, p := range blocks {
			n := copy(dst[at[i]:], p)
			clear(dst[at[i]+int64(n) : at[i]+algo.paddedBytes(int64(n))])
		}
	case WithSize:
		k := algo.prefixBytes()
		if k == 4 {
			binary.LittleEndian.PutUint32(dst, uint32(size))
		} else {
			binary.LittleEndian.PutUint64(dst, uint64(size))
		}
		copy(dst[k:], blocks[0])
	default:
		copy(dst, blocks[0])
	}
}

// quickBytes is the maximum content of a quick Run. The slowest decoder takes some tens of milliseconds for it.
const quickBytes = 32 << 20

// Quick reports whether Run finishes so quickly, mostly without goroutines, that it need not be interruptible. This
// is the case if the input and everything that it can decode to are small.
func Quick(s *Spec, in []Buffer) bool {
	n := contentBytes(in)
	if n > alone || s.Op == OpEncode || s.Op == OpBound {
		return n <= alone
	}
	var most int64
	for i := range in {
		most += mostBytes(s, in[i].Src)
	}
	return most <= quickBytes
}

// mostBytes returns the maximum number of bytes that decoding or measuring src can process.
func mostBytes(s *Spec, src []byte) int64 {
	limit := int64(1) << 40
	a, _ := byName(s.Algorithm)
	switch {
	case s.Kind == Native:
		h, err := parseHeader(src)
		if err != nil {
			return 0
		}
		a, _ = byID(h.format)
		limit = int64(min(h.size, 1<<40))
	case s.Kind == WithSize && a != nil && len(src) >= a.prefixBytes():
		limit = int64(min(readPrefix(src[:a.prefixBytes()]), 1<<40))
	}
	if a == nil {
		return 0 // Run returns an error
	}
	return min(limit, int64(len(src))*a.mostRatio())
}
