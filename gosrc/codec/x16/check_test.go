package x16

import (
	"bytes"
	"math/rand/v2"
	"testing"

	"github.com/overwire/overwire/gosrc/tensor"
)

// Check accepts every chunk that Decode accepts. Segments returns the number of segments in the directory.
func TestCheck(t *testing.T) {
	const seed = 7
	r := rand.New(rand.NewPCG(seed, 0))
	var e Encoder
	refused := 0
	for _, n := range []int{1 << 14, 3000} {
		for _, s := range samples(r, n) {
			chunk, st, ok := e.Encode(nil, s.data, s.transform)
			if !ok {
				continue
			}
			c := tensor.Chunk{Codec: tensor.CodecX16, Transform: s.transform, SegTiles: st,
				Logical: uint32(len(s.data)), Stored: uint32(len(chunk))}
			if err := Check(chunk, c); err != nil {
				t.Fatalf("%s: %v", s.name, err)
			}
			d := decoders.Get().(*decoder)
			if err := d.chunk.parse(make([]byte, len(s.data)), chunk, c.Transform, st); err != nil ||
				Segments(c) != max(1, d.chunk.segs) && !d.chunk.symbols.one {
				t.Errorf("%s: %d segments, the directory has %d: %v", s.name, Segments(c), d.chunk.segs, err)
			}
			d.chunk.src, d.chunk.dst = nil, nil
			decoders.Put(d)
			for range 30 {
				p := bytes.Clone(chunk)
				hurt(r, p)
				if Check(p, c) == nil {
					continue
				}
				refused++
				if err := Decode(make([]byte, len(s.data)), p, s.transform, st); err == nil {
					t.Fatalf("%s: Decode accepts a chunk that Check refuses", s.name)
				}
			}
			c.Stored--
			if Check(chunk, c) == nil {
				t.Errorf("%s: accepted with a different size", s.name)
			}
		}
	}
	if refused == 0 {
		t.Error("nothing was refused")
	}
	if Check(nil, tensor.Chunk{Logical: tensor.MaxChunkBytes + 1}) == nil {
		t.Error("a chunk over the maximum size was accepted")
	}
}
