package x16

import (
	"bytes"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

// Rates are in logical bytes. A busy machine distorts the mean, so each benchmark also reports the best single run.

// timed runs f as a benchmark over n logical bytes.
func timed(b *testing.B, n int, f func() error) {
	b.Helper()
	b.SetBytes(int64(n))
	best := time.Duration(math.MaxInt64)
	for b.Loop() {
		t := time.Now()
		if err := f(); err != nil {
			b.Fatal(err)
		}
		best = min(best, time.Since(t))
	}
	b.ReportMetric(float64(n)/float64(best.Nanoseconds()), "best-GB/s")
}

// benchSample returns a sample of n elements for a transform.
func benchSample(t uint8, n int) []byte {
	r := rand.New(rand.NewPCG(7, 0))
	for _, s := range samples(r, n) {
		if s.transform == t && s.packs {
			return s.data
		}
	}
	return nil
}

// BenchmarkDecode decodes one chunk that stays in the cache, for each transform and level.
func BenchmarkDecode(b *testing.B) {
	for t := uint8(BF16); t <= Bytes; t++ {
		src := benchSample(t, 1<<17)
		var e Encoder
		chunk, st, ok := e.Encode(nil, src, t)
		if !ok {
			b.Fatalf("%s: the sample was not compressed", Name(t))
		}
		for _, l := range Levels() {
			b.Run(Name(t)+"/"+l.String(), func(b *testing.B) {
				dst := make([]byte, len(src))
				if err := DecodeAt(l, dst, chunk, t, st); err != nil || !bytes.Equal(dst, src) {
					b.Fatalf("wrong bytes: %v", err)
				}
				timed(b, len(src), func() error { return DecodeAt(l, dst, chunk, t, st) })
			})
		}
	}
}

// BenchmarkStream decodes bf16 chunks to 64 MiB of memory, as a load does. The baseline copies the same number of
// bytes. Each run uses the next chunk. The second rate is that of the fastest quarter of the runs.
func BenchmarkStream(b *testing.B) {
	const chunkBytes, chunks = 1 << 20, 64
	src := benchSample(BF16, chunkBytes/2)
	var e Encoder
	chunk, st, _ := e.Encode(nil, src, BF16)
	var stored [chunks][]byte
	for i := range stored {
		stored[i] = bytes.Clone(chunk)
	}
	dst, plain := make([]byte, chunks*chunkBytes), bytes.Repeat(src, chunks)
	each := func(b *testing.B, f func(dst []byte, i int) error) {
		b.SetBytes(chunkBytes)
		var took []float64
		for n := 0; b.Loop(); n++ {
			i := n % chunks
			t := time.Now()
			if err := f(dst[i*chunkBytes:(i+1)*chunkBytes], i); err != nil {
				b.Fatal(err)
			}
			if n >= chunks { // the first round hits unmapped pages
				took = append(took, float64(time.Since(t).Nanoseconds()))
			}
		}
		if len(took) >= chunks && !bytes.Equal(dst, plain) {
			b.Fatal("wrong bytes")
		}
		if slices.Sort(took); len(took) > 0 {
			b.ReportMetric(chunkBytes/took[len(took)/4], "best-GB/s")
		}
	}
	b.Run("memcpy", func(b *testing.B) {
		each(b, func(dst []byte, i int) error {
			copy(dst, plain[i*chunkBytes:])
			return nil
		})
	})
	for _, l := range Levels() {
		b.Run(l.String(), func(b *testing.B) {
			each(b, func(dst []byte, i int) error { return DecodeAt(l, dst, stored[i], BF16, st) })
		})
	}
}

// BenchmarkEncode encodes on one core.
func BenchmarkEncode(b *testing.B) {
	for t := uint8(BF16); t <= Bytes; t++ {
		src := benchSample(t, 1<<19)
		for _, l := range Levels() {
			b.Run(Name(t)+"/"+l.String(), func(b *testing.B) {
				e := Encoder{level: l, forced: true}
				buf, _, _ := e.Encode(nil, src, t)
				timed(b, len(src), func() error {
					buf, _, _ = e.Encode(buf[:0], src, t)
					return nil
				})
			})
		}
	}
}
