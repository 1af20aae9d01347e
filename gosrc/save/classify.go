package save

// This file chooses how each tensor is stored: compressed, plain or as an alias.

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"slices"
	"sync/atomic"
	"unsafe"

	"github.com/overwire/overwire/gosrc/codec"
	"github.com/overwire/overwire/gosrc/codec/planes"
	"github.com/overwire/overwire/gosrc/codec/x16"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/sizes"
	"github.com/overwire/overwire/gosrc/internal/spawn"
	"github.com/overwire/overwire/gosrc/tensor"
)

const (
	// minGain is a ratio of stored bytes to logical bytes. A tensor that does not compress below it is stored plain,
	// so any safetensors reader can read it.
	minGain = 0.99
	// minWide is how many bytes compression must save for a multi-byte integer tensor.
	// Readers of format 1.1 refuse files with such compressed tensors.
	minWide = 4096

	sampleRuns  = 16
	sampleBytes = 16 << 10 // bytes of one run; a multiple of every element size and of the tile size
	wholeSample = sampleRuns * sampleBytes

	mostTrials = 16 << 20 // bytes of small tensors that are encoded only once, as a trial
)

// A classifier chooses how the tensors of one save are stored. It reads samples of large tensors. It reads a large
// tensor completely only if the tensor may be equal to another one.
type classifier struct {
	spec    *Spec
	path    string // only used in messages
	threads int
	trials  atomic.Int64 // bytes of the tensors with trials in memory, at most mostTrials
}

// classify chooses the form and the transform of every item.
func (c *classifier) classify(ctx context.Context, items []*Item) error {
	for _, t := range items {
		t.parts = t.chooseParts(c.spec.Parts)
	}
	if err := c.findAliases(ctx, items); err != nil {
		return err
	}
	// If an alias has rows of a different size than the tensor with its bytes, that tensor cannot have column parts.
	for _, t := range items {
		if t.form == alias && t.rowBits() != t.of.rowBits() {
			t.of.joinParts()
		}
	}
	return spawn.Each(ctx, "save.classify", c.threads, len(items), func(k int) error {
		t := items[k]
		if t.form == alias {
			return nil
		}
		e := encoders.Get().(*codec.Encoder)
		defer encoders.Put(e)
		if err := c.chooseTransform(ctx, e, t); err != nil {
			return errs.Locate("save", c.path, t.name, -1, err)
		}
		if t.form != compressed {
			t.joinParts()
		}
		return nil
	})
}

// chooseTransform finds the best transform for a tensor and decides whether to use it. It encodes small tensors
// completely, because tables are a large part of them, and 16 evenly spread runs of larger tensors.
func (c *classifier) chooseTransform(ctx context.Context, e *codec.Encoder, t *Item) error {
	t.form, t.expect = plain, 1
	if c.spec.Level == levelSmaller && t.parts == 1 {
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
	take := func(transform uint8, ratio float64) bool {
		if ratio >= best || t.ways.Planes == 0 && t.dtype.Wide() && (1-ratio)*float64(t.bytes) < minWide {
			return false
		}
		best = ratio
		t.form, t.ways.X16, t.expect = compressed, transform, ratio
		return true
	}
	if t.bytes <= wholeSample {
		keeps := c.trials.Add(t.bytes) <= mostTrials
		for _, transform := range candidates {
			stored, trials, err := c.tryTransform(ctx, e, t, transform, keeps)
			if err != nil {
				return err
			}
			if take(transform, float64(stored)/float64(t.bytes)) {
				t.trials = trials
			}
		}
		if t.trials == nil {
			c.trials.Add(-t.bytes)
		}
		return nil
	}
	if t.known() != nil && !t.from.planes && t.ways.Planes == 0 { // keep the choice of the source's writer
		if t.from.transform != 0 {
			take(t.from.transform, float64(t.from.known.Stored)/float64(t.from.known.Bytes))
		}
		return nil
	}
	sample, err := readSample(ctx, t)
	if err != nil {
		return err
	}
	for _, transform := range candidates {
		take(transform, x16.Estimate(sample, transform))
	}
	if t.ways.Planes != 0 {
		out := e.Encode(nil, sample, t.ways, &tensor.Chunk{})
		take(t.ways.X16, float64(len(out))/float64(len(sample)))
	}
	return nil
}

// tryTransform encodes a whole small tensor and returns its stored size. If keeps is set, it also returns its chunks.
func (c *classifier) tryTransform(ctx context.Context, e *codec.Encoder, t *Item, transform uint8, keeps bool) (
	int64, []trial, error) {
	buf, enc := pieces.Get().(*[1 << 20]byte), pieces.Get().(*[1 << 20]byte)
	defer pieces.Put(buf)
	defer pieces.Put(enc)
	var total int64
	var trials []trial
	ways := codec.Ways{X16: transform, Planes: t.ways.Planes}
	for p := range t.parts {
		for off := int64(0); off < t.bytes/t.parts; off += c.spec.ChunkBytes {
			n := min(c.spec.ChunkBytes, t.bytes/t.parts-off)
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

// readSample returns evenly spread runs of a tensor that is larger than a sample.
func readSample(ctx context.Context, t *Item) ([]byte, error) {
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

// sameKey groups tensors that may be equal. In successive steps, mark is the address of the
// bytes, a hash of a few of them, and a hash of all.
type sameKey struct {
	dtype tensor.DType
	bytes int64
	mark  [16]byte
}

// findAliases marks tensors that have the same dtype and bytes as another tensor. The first
// tensor by name stores the bytes. Shapes may differ. findAliases compares samples of tensors
// of equal size, then hashes of tensors with equal samples, then all bytes.
func (c *classifier) findAliases(ctx context.Context, items []*Item) error {
	sorted := slices.Clone(items)
	slices.SortFunc(sorted, func(a, b *Item) int { return cmp.Compare(a.name, b.name) })

	// Tensors in the same memory are equal; there is no need to read them.
	at := map[sameKey]*Item{}
	for _, t := range sorted {
		var addr uintptr
		switch m := t.body.(type) {
		case memory:
			addr = uintptr(unsafe.Pointer(unsafe.SliceData(m)))
		case *deviceBody:
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

	pool, err := c.findCandidates(ctx, sorted)
	if err != nil {
		return err
	}
	first := map[sameKey]*Item{}
	for _, t := range pool {
		k := sameKey{t.dtype, t.bytes, t.sums.hash}
		f := first[k]
		if f == nil {
			first[k] = t
			continue
		}
		same, err := isEqual(ctx, t, f)
		if err != nil {
			return errs.Locate("save", c.path, t.name, -1, err)
		}
		if same {
			t.form, t.of = alias, f
		}
	}
	for _, t := range sorted { // the holder may have become an alias
		if t.form == alias && t.of.form == alias {
			t.of = t.of.of
		}
	}
	return nil
}

// findCandidates lists the tensors that may be equal to another one. It compares hashes of a few samples, and then
// hashes of all bytes. It omits small tensors and aliases.
func (c *classifier) findCandidates(ctx context.Context, sorted []*Item) ([]*Item, error) {
	pool := slices.DeleteFunc(slices.Clone(sorted), func(t *Item) bool {
		return t.form == alias || t.bytes < minAlias
	})
	for _, mark := range []func(*Item) ([16]byte, error){
		func(*Item) ([16]byte, error) { return [16]byte{}, nil },
		func(t *Item) ([16]byte, error) { return t.hashGlances(ctx) },
		func(t *Item) ([16]byte, error) { return t.hashAll(ctx) },
	} {
		keys := make([]sameKey, len(pool))
		err := spawn.Each(ctx, "save.alias", c.threads, len(pool), func(k int) error {
			m, err := mark(pool[k])
			keys[k] = sameKey{pool[k].dtype, pool[k].bytes, m}
			return errs.Locate("save", c.path, pool[k].name, -1, err)
		})
		if err != nil {
			return nil, err
		}
		count := map[sameKey]int{}
		for _, k := range keys {
			count[k]++
		}
		shared := pool[:0]
		for i, t := range pool {
			if count[keys[i]] > 1 {
				shared = append(shared, t)
			}
		}
		pool = shared
	}
	return pool, nil
}
