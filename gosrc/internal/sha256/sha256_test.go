package sha256

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"hash"
	"math/rand/v2"
	"testing"
	"time"
)

// check writes pieces of some lengths to as many hashes, twice, from addresses
// of any alignment, and holds the sums to those of crypto/sha256.
func check(t *testing.T, r *rand.Rand, lengths []int) {
	t.Helper()
	hashes := make([]hash.Hash, len(lengths))
	whole := make([][]byte, len(lengths))
	for i := range hashes {
		hashes[i] = New()
		whole[i] = make([]byte, r.IntN(130)) // what went before
		fill(r, whole[i])
		_, _ = hashes[i].Write(whole[i])
	}
	for range 2 {
		pieces := make([][]byte, len(lengths))
		for i, n := range lengths {
			pieces[i] = make([]byte, n+64)[r.IntN(64):][:n]
			fill(r, pieces[i])
			whole[i] = append(whole[i], pieces[i]...)
		}
		kept := fmt.Sprint(lengthsOf(pieces))
		Write(hashes, pieces)
		if kept != fmt.Sprint(lengthsOf(pieces)) {
			t.Fatal("the caller's pieces were changed")
		}
	}
	for i, h := range hashes {
		if want := sha256.Sum256(whole[i]); !bytes.Equal(h.Sum(nil), want[:]) {
			t.Fatalf("message %d of lengths %v is another", i, lengths)
		}
	}
}

func lengthsOf(p [][]byte) (n []int) {
	for _, b := range p {
		n = append(n, len(b))
	}
	return n
}

func fill(r *rand.Rand, b []byte) {
	for len(b) >= 8 {
		binary.LittleEndian.PutUint64(b, r.Uint64())
		b = b[8:]
	}
	for i := range b {
		b[i] = byte(r.Uint32())
	}
}

// Any number of messages of any lengths, around the edges of blocks and of
// bursts too, have crypto/sha256's sums.
func TestWrite(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d, together %v", seed, Together(Lanes))
	r := rand.New(rand.NewPCG(seed, 0))
	for _, n := range []int{0, 1, 7, 8, 9, 15, 16, 17, 24, 25, 33, 40} {
		lengths := make([]int, n)
		for _, same := range []int{0, 1, 63, 64, 65, 127, 128, 129, 1000, burst*64 - 1, burst * 64, burst*64 + 65} {
			for i := range lengths {
				lengths[i] = same
			}
			check(t, r, lengths)
		}
		for range 5 {
			for i := range lengths {
				lengths[i] = r.IntN(1 + r.IntN(5000))
			}
			check(t, r, lengths)
		}
	}
}

// Messages cut anywhere have crypto/sha256's sums.
func FuzzWrite(f *testing.F) {
	f.Add([]byte("some bytes that are cut"), []byte{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 200, 12, 64, 65, 128, 129, 130}, uint64(1))
	f.Fuzz(func(t *testing.T, _, cuts []byte, seed uint64) {
		if len(cuts) > 64 {
			return
		}
		lengths := make([]int, len(cuts))
		for i, c := range cuts {
			lengths[i] = int(c) * (1 + i%3)
		}
		check(t, rand.New(rand.NewPCG(seed, 0)), lengths)
	})
}

func BenchmarkWrite(b *testing.B) {
	const size = 32 << 10
	for _, n := range []int{1, 7, 8, 12, 16} {
		hashes, pieces := make([]hash.Hash, n), make([][]byte, n)
		for i := range hashes {
			hashes[i], pieces[i] = New(), make([]byte, size)
		}
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			b.SetBytes(int64(n) * size)
			for b.Loop() {
				Write(hashes, pieces)
			}
		})
	}
}
