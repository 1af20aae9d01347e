package save

// This file decides how each tensor is stored.

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"slices"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/overwire/overwire/gosrc/codec"
	"github.com/overwire/overwire/gosrc/codec/digest"
	"github.com/overwire/overwire/gosrc/codec/planes"
	"github.com/overwire/overwire/gosrc/codec/x16"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/sizes"
	"github.com/overwire/overwire/gosrc/internal/spawn"
	"github.com/overwire/overwire/gosrc/tensor"
	"github.com/zeebo/xxh3"
)

const (
	// minAlias: smaller tensors are not compared for equality, since the saved
	// record is worth less than the comparison.
	minAlias = 1024
	// minGain: a tensor whose ratio is above this is stored plain, so that any
	// safetensors reader can read it.
	minGain = 0.99
	// minWide: an integer tensor that saves fewer bytes is stored plain, since
	// readers of format 1.1 refuse a file with such a one compressed.
	minWide = 4096

	sampleRuns  = 16
	sampleBytes = 16 << 10 // of one run; a multiple of every element size and of a tile
	wholeSample = sampleRuns * sampleBytes

	mostTrials = 16 << 20 // bytes of small tensors that are encoded once, to be tried and to be written

	glanceBytes = 512 // of one piece of a glance; less than minAlias
)

// classifyItems decides for every item whether it is stored compressed, plain or as an
// alias. It reads samples, and whole tensors only where two may be equal.
func (w *writer) classifyItems(ctx context.Context, items []*item) error {
	for _, t := range items {
		t.parts = t.chooseParts(w.spec.Parts)
	}
	if err := w.findAliases(ctx, items); err != nil {
		return err
	}
	// Column parts of a tensor are none of an alias that has rows of another size.
	for _, t := range items {
		if t.form == alias && t.rowBits() != t.of.rowBits() {
			t.of.joinParts()
		}
	}
	var trials atomic.Int64
	return spawn.Each(ctx, "save.classify", w.threads, len(items), func(k int) error {
		t := items[k]
		if t.form == alias {
			return nil
		}
		e := encoders.Get().(*codec.Encoder)
		defer encoders.Put(e)
		if err := t.chooseTransform(ctx, e, &w.spec, &trials); err != nil {
			return errs.Locate("save", w.spec.Path, t.name, -1, err)
		}
		if t.form != compressed {
			t.joinParts()
		}
		return nil
	})
}

// chooseTransform takes the best transform for a tensor and decides whether to use it. It
// encodes tensors up to the size of a sample completely, so that small ones account
// for their tables, and 16 evenly spread runs of larger ones. kept counts the bytes of all tensors whose trials are
// kept: at most mostTrials.
func (t *item) chooseTransform(ctx context.Context, e *codec.Encoder, spec *Spec, kept *atomic.Int64) error {
	t.form, t.expect = plain, 1
	if spec.Level == levelSmaller && t.parts == 1 {
		t.ways.Planes = planes.TransformFor(t.dtype)
	}
	candidates := x16.TransformsFor(t.dtype)
	if t.ways.Planes != 0 && candidates == nil {
		candidates = []uint8{0}
	}
	if t.bytes == 0 || candidates == nil {
		return nil
	}
	best := minGain
	take := func(c uint8, ratio float64) bool {
		if ratio >= best || t.ways.Planes == 0 && t.dtype.Wide() && (1-ratio)*float64(t.bytes) < minWide {
			return false
		}
		best = ratio
		t.form, t.ways.X16, t.expect = compressed, c, ratio
		return true
	}
	if t.bytes <= wholeSample {
		keeps := kept.Add(t.bytes) <= mostTrials
		for _, c := range candidates {
			stored, trials, err := t.tryTransform(ctx, e, c, spec.ChunkBytes, keeps)
			if err != nil {
				return err
			}
			if take(c, float64(stored)/float64(t.bytes)) {
				t.trials = trials
			}
		}
		if t.trials == nil {
			kept.Add(-t.bytes)
		}
		return nil
	}
	if t.known != nil && !t.knownPlanes && t.ways.Planes == 0 { // keep the decision of the source's writer
		if t.knownTransform != 0 {
			take(t.knownTransform, float64(t.known.Stored)/float64(t.known.Bytes))
		}
		return nil
	}
	sample, err := t.readSample(ctx)
	if err != nil {
		return err
	}
	for _, c := range candidates {
		take(c, x16.Estimate(sample, c))
	}
	if t.ways.Planes != 0 {
		out := e.Encode(nil, sample, t.ways, &tensor.Chunk{})
		take(t.ways.X16, float64(len(out))/float64(len(sample)))
	}
	return nil
}

// A trial is a chunk as it was encoded to learn its size, with its codec. out: nil for a raw chunk.
type trial struct {
	out   []byte
	codec tensor.Chunk
}

// tryTransform encodes a whole small tensor and returns its stored size, and its chunks if they are to be kept.
func (t *item) tryTransform(ctx context.Context, e *codec.Encoder, transform uint8, chunkBytes int64, keeps bool) (
	int64, []trial, error) {
	buf, enc := pieces.Get().(*[1 << 20]byte), pieces.Get().(*[1 << 20]byte)
	defer pieces.Put(buf)
	defer pieces.Put(enc)
	var total int64
	var trials []trial
	ways := codec.Ways{X16: transform, Planes: t.ways.Planes}
	for p := range t.parts {
		for off := int64(0); off < t.bytes/t.parts; off += chunkBytes {
			n := min(chunkBytes, t.bytes/t.parts-off)
			data, err := t.gatherColumns(ctx, buf[:n], p, off)
			if err != nil {
				return 0, nil, err
			}
			var one trial
			out := e.Encode(enc[:0], data, ways, &one.codec)
			if keeps {
				if one.codec.Codec != tensor.CodecRaw {
					one.out = bytes.Clone(out)
				}
				trials = append(trials, one)
			}
			total = sizes.RoundUp(total, 16) + int64(len(out))
		}
	}
	return sizes.RoundUp(total, 64), trials, nil
}

// takeTrial gives a chunk the bytes and the codec that its tensor was tried with; false: they were not kept.
func (t *item) takeTrial(c *task, chunkBytes int64, x *encodedChunk, ch *tensor.Chunk) bool {
	if t.trials == nil {
		return false
	}
	one := &t.trials[int64(c.part)*sizes.CeilDiv(t.bytes/t.parts, chunkBytes)+c.off/chunkBytes]
	ch.Codec, ch.Transform, ch.SegTiles = one.codec.Codec, one.codec.Transform, one.codec.SegTiles
	if one.out != nil {
		x.out = one.out
	}
	return true
}

// readSample returns evenly spread runs of a tensor that is larger than a sample.
func (t *item) readSample(ctx context.Context) ([]byte, error) {
	out := make([]byte, wholeSample)
	for i, off := range sampleOffsets(t.bytes) {
		if err := t.fillBytes(ctx, out[i*sampleBytes:(i+1)*sampleBytes], off); err != nil {
			return nil, err
		}
	}
	return out, nil
}

func sampleOffsets(bytes int64) []int64 {
	out := make([]int64, sampleRuns)
	for i := range out {
		off := (bytes - sampleBytes) / (sampleRuns - 1) * int64(i)
		out[i] = off - off%256 // whole elements of any size
	}
	return out
}

// sameKey groups tensors that may be equal. From one step to the next, mark is the
// address of the bytes, a hash of a few of them, or a hash of all.
type sameKey struct {
	dtype tensor.DType
	bytes int64
	mark  [16]byte
}

// findAliases marks tensors whose dtype and bytes equal another's: the first by
// name keeps the bytes. Shapes may differ. Tensors of equal size are compared by a
// few samples; those with equal samples are hashed, and those with equal hashes
// compared.
func (w *writer) findAliases(ctx context.Context, items []*item) error {
	sorted := slices.Clone(items)
	slices.SortFunc(sorted, func(a, b *item) int { return cmp.Compare(a.name, b.name) })
	none := func(*item) ([16]byte, error) { return [16]byte{}, nil }

	// Tensors in the same memory are equal without reading.
	at := map[sameKey]*item{}
	for _, t := range sorted {
		var addr uintptr
		switch m := t.body.(type) {
		case memory:
			addr = uintptr(unsafe.Pointer(unsafe.SliceData(m)))
		case *away:
			addr = m.Addr
		}
		if addr == 0 || t.bytes == 0 {
			continue
		}
		k := sameKey{dtype: t.dtype, bytes: t.bytes}
		binary.LittleEndian.PutUint64(k.mark[:], uint64(addr))
		if first := at[k]; first != nil {
			t.form, t.of = alias, first
		} else {
			at[k] = t
		}
	}

	pool := slices.DeleteFunc(slices.Clone(sorted), func(t *item) bool {
		return t.form == alias || t.bytes < minAlias
	})
	for _, mark := range []func(*item) ([16]byte, error){
		none,
		func(t *item) ([16]byte, error) { return t.hashGlances(ctx) },
		func(t *item) ([16]byte, error) { return t.hashAll(ctx) },
	} {
		keys := make([]sameKey, len(pool))
		err := spawn.Each(ctx, "save.alias", w.threads, len(pool), func(k int) error {
			m, err := mark(pool[k])
			keys[k] = sameKey{pool[k].dtype, pool[k].bytes, m}
			return errs.Locate("save", w.spec.Path, pool[k].name, -1, err)
		})
		if err != nil {
			return err
		}
		count := map[sameKey]int{}
		for _, k := range keys {
			count[k]++
		}
		kept := pool[:0]
		for i, t := range pool {
			if count[keys[i]] > 1 {
				kept = append(kept, t)
			}
		}
		pool = kept
	}

	first := map[sameKey]*item{}
	for _, t := range pool {
		k := sameKey{t.dtype, t.bytes, t.hash}
		f := first[k]
		if f == nil {
			first[k] = t
			continue
		}
		same, err := isEqual(ctx, t, f)
		if err != nil {
			return errs.Locate("save", w.spec.Path, t.name, -1, err)
		}
		if same {
			t.form, t.of = alias, f
		}
	}
	for _, t := range sorted { // tensors of shared memory whose first is now an alias
		if t.form == alias && t.of.form == alias {
			t.of = t.of.of
		}
	}
	return nil
}

// hashGlances hashes three small pieces of a tensor; for an overwire source it returns
// the stored hash of the whole.
func (t *item) hashGlances(ctx context.Context) ([16]byte, error) {
	if t.known != nil {
		return t.known.Hash, nil
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
	return sumOf(&h), nil
}

func glanceOffsets(bytes int64) []int64 { return []int64{0, bytes / 2, bytes - glanceBytes} }

// hashAll is XXH3-128 of the logical bytes, computed once for each tensor.
func (t *item) hashAll(ctx context.Context) ([16]byte, error) {
	if t.hashed {
		return t.hash, nil
	}
	if t.known != nil {
		// The bytes are checked against it when they are read: see fileWriter.takeTurn.
		t.hash, t.hashed = t.known.Hash, t.parts > 1
		return t.hash, nil
	}
	var h xxh3.Hasher
	err := t.walkBytes(ctx, func(p []byte) error { _, _ = h.Write(p); return nil })
	t.hash, t.hashed = sumOf(&h), err == nil
	return t.hash, err
}

// digestAll adds all bytes of a tensor, and compares them with the hash of their source.
func (t *item) digestAll(ctx context.Context, sum *digest.State) error {
	var h xxh3.Hasher
	at := int64(0)
	err := t.walkBytes(ctx, func(p []byte) error {
		sum.Add(at, p)
		at += int64(len(p))
		if t.known != nil {
			_, _ = h.Write(p)
		}
		return nil
	})
	if err == nil && t.known != nil && t.bytes > 0 && sumOf(&h) != t.known.Hash {
		return t.errOtherBytes()
	}
	return err
}

// pieces are the buffers of walk and equal.
var pieces = sync.Pool{New: func() any { return new([1 << 20]byte) }}

// walkBytes calls f with all bytes of a tensor, in plain order.
func (t *item) walkBytes(ctx context.Context, f func(p []byte) error) error {
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
func isEqual(ctx context.Context, a, b *item) (bool, error) {
	if x, ok := a.body.(fromFile); ok && b.body == body(x) {
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

// sumOf has the byte order of docs/format.md: the high half first, each half
// little-endian.
func sumOf(h *xxh3.Hasher) [16]byte {
	s := h.Sum128()
	return hashOf(s.Hi, s.Lo)
}

func hashOf(high, low uint64) (out [16]byte) {
	binary.LittleEndian.PutUint64(out[:], high)
	binary.LittleEndian.PutUint64(out[8:], low)
	return out
}

func hashOfNothing() [16]byte {
	var h xxh3.Hasher
	return sumOf(&h)
}
