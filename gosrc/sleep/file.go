package sleep

// This file makes a file of the image.

import (
	"context"
	"encoding/binary"
	"runtime"

	"github.com/overwire/overwire/gosrc/codec"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/atomicfile"
	"github.com/overwire/overwire/gosrc/internal/spawn"
	"github.com/zeebo/xxh3"
)

// write hashes the tensors, as they come out of their chunks, and writes the file. The
// memory then is what the file has.
func (s *sleeper) write(ctx context.Context) error {
	all := s.lay.Tensors
	err := spawn.Each(ctx, "sleep hash", runtime.GOMAXPROCS(0), len(all), func(i int) error {
		t := &all[i]
		if t.Alias >= 0 {
			return nil
		}
		var h xxh3.Hasher
		buf := make([]byte, min(t.Bytes, chunkBytes))
		for k, c := range s.lay.Chunks[t.First : t.First+t.Count] {
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
			out := buf[:c.Logical]
			if err := codec.Decode(out, s.mem.Bytes(c.Off, int64(c.Stored)), c); err != nil {
				return &errs.At{Verb: "sleep", Source: name, Tensor: t.Name, Chunk: int64(k), Offset: c.Off, Err: err}
			}
			_, _ = h.Write(out)
		}
		sum := h.Sum128()
		binary.LittleEndian.PutUint64(t.Hash[:], sum.Hi)
		binary.LittleEndian.PutUint64(t.Hash[8:], sum.Lo)
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
	return atomicfile.Write(ctx, s.Path, s.mem.Bytes(0, size))
}
