package x16

import (
	"bytes"
	"math/rand/v2"
	"testing"
)

// For every sample and size, the decoder of every level gives the original bytes.
func TestRoundTrip(t *testing.T) {
	const seed = 1
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	var e Encoder
	for _, n := range []int{70000, 2048, 1 << 17, 300, 256, 511, 1 << 12} {
		for _, s := range samples(r, n) {
			for _, cut := range []int{0, 1, 3, 255} {
				src := s.data[:max(0, len(s.data)-cut)]
				out, st, ok := e.Encode([]byte("prefix"), src, s.transform)
				if !ok {
					if s.packs && n >= 1<<16 {
						t.Errorf("%s, %d bytes: not compressed", s.name, len(src))
					}
					if string(out) != "prefix" {
						t.Fatalf("%s: not compressed, but dst was changed", s.name)
					}
					continue
				}
				chunk := out[6:]
				if cut == 0 && n == 1<<17 {
					t.Logf("%-32s %8d -> %8d  %.4f  estimate %.4f", s.name, len(src), len(chunk),
						float64(len(chunk))/float64(len(src)), Estimate(src, s.transform))
				}
				for _, l := range Levels() {
					dst := make([]byte, len(src))
					if err := DecodeAt(l, dst, chunk, s.transform, st); err != nil {
						t.Fatalf("%v: %s, %d bytes: %v", l, s.name, len(src), err)
					}
					if !bytes.Equal(dst, src) {
						t.Fatalf("%v: %s, %d bytes: differs", l, s.name, len(src))
					}
				}
			}
		}
	}
}

// Segments of any length up to the maximum are decoded correctly, in groups of one to four, with a shorter last
// segment.
func TestSegmentLengths(t *testing.T) {
	src := benchSample(E4M3, 1<<18+2048+77)
	for _, longest := range []int{1, 2, 7, 129, 200, 256} {
		for _, tiles := range []int{1, 2, 3, 9, 130, 500, 1000, 1024, 1031} {
			e := Encoder{segTiles: longest}
			part := src[:tiles*tileSyms+9]
			chunk, st, ok := e.Encode(nil, part, E4M3)
			if !ok {
				continue
			}
			for _, l := range Levels() {
				dst := make([]byte, len(part))
				if err := DecodeAt(l, dst, chunk, E4M3, st); err != nil || !bytes.Equal(dst, part) {
					t.Errorf("%v: %d tiles in segments of %d: %v", l, tiles, st, err)
				}
			}
		}
	}
}
