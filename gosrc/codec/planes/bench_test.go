package planes

import (
	"math/rand/v2"
	"testing"
)

// weights returns 2-byte elements with little information in their high bytes.
func weights(r *rand.Rand, n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(r.Uint32())
		if i%2 == 1 {
			b[i] = byte(60 + 3*r.NormFloat64())
		}
	}
	return b
}

func BenchmarkDecode(b *testing.B) {
	src := weights(rand.New(rand.NewPCG(1, 2)), 1<<20)
	var e Encoder
	out, ok := e.Encode(nil, src, 5)
	if !ok {
		b.Fatal("the data was not compressed")
	}
	dst := make([]byte, len(src))
	b.SetBytes(int64(len(src)))
	for b.Loop() {
		if err := Decode(dst, out, 5); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkEncode(b *testing.B) {
	src := weights(rand.New(rand.NewPCG(1, 2)), 1<<20)
	var e Encoder
	var out []byte
	b.SetBytes(int64(len(src)))
	for b.Loop() {
		out, _ = e.Encode(out[:0], src, 5)
	}
}
