package sleep

// This file makes a file of the image.

import (
	"context"
	"encoding/binary"
	"runtime"

	"github.com/overwire/overwire/gosrc/codec"
	"github.com/overwire/overwire/gosrc/codec/blocksum"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/spawn"
	"github.com/overwire/overwire/gosrc/save"
	"github.com/zeebo/xxh3"
)

// hashesOnGPU reports whether a GPU makes the sums of a tensor's hash: those of what it encodes.
func (s *sleeper) hashesOnGPU(t *item) bool {
	return s.way.gpu && s.Path != "" && t.transform != 0
}

func (s *sleeper) addSums(b *batch) error {
	at := s.tensorOf(b.first)
	for i := range b.rows {
		if !b.rows[i].Hash {
			continue
		}
		c := int32(b.first + i)
		for c >= s.lay.Tensors[at].First+s.lay.Tensors[at].Count {
			at++
		}
		t := &s.lay.Tensors[at]
		it := &s.items[s.lay.Items[at]]
		if c == t.First {
			it.sums = blocksum.New(t.Bytes)
		}
		sums, tail := b.rows[i].SumsAndTail()
		it.sums.Add(sums)
		if c < t.First+t.Count-1 {
			continue
		}
		high, low, ok := it.sums.Finish(tail)
		if !ok {
			return errs.New(errs.ErrEngine, "tensor %q: sums of its hash are missing", t.Name)
		}
		t.Hash = hashOf(high, low)
	}
	return nil
}

// hashOf has the byte order of docs/format.md.
func hashOf(high, low uint64) (out [16]byte) {
	binary.LittleEndian.PutUint64(out[:], high)
	binary.LittleEndian.PutUint64(out[8:], low)
	return out
}

// writeFile writes the file, once the tensors whose sums no GPU has made are hashed: where they
// are, or, on a GPU, which stores them as they are, in the image. The memory then is what
// the file has.
func (s *sleeper) writeFile(ctx context.Context) error {
	all := s.lay.Tensors
	err := spawn.Each(ctx, "sleep hash", runtime.GOMAXPROCS(0), len(all), func(i int) error {
		t := &all[i]
		it := &s.items[s.lay.Items[i]]
		switch {
		case t.Alias >= 0 || s.hashesOnGPU(it):
			return nil
		case s.way.gpu:
			sum := xxh3.Hash128(s.mem.Bytes(t.Off, t.Bytes))
			t.Hash = hashOf(sum.Hi, sum.Lo)
		default:
			sum := xxh3.Hash128(it.Data)
			t.Hash = hashOf(sum.Hi, sum.Lo)
		}
		return nil
	})
	if err != nil {
		return err
	}
	front, size, err := s.lay.Seal(codec.Known)
	if err != nil {
		return err
	}
	if size != s.size {
		return errs.New(errs.ErrEngine, "an image of %d bytes, %d were expected", s.size, size)
	}
	copy(s.mem.Bytes(0, int64(len(front))), front)
	return save.WriteWhole(ctx, s.Path, s.mem.Bytes(0, size))
}
