package codec

import (
	"hash/crc32"
	"math/rand/v2"
	"testing"
	"time"
)

// Sum equals the standard library's CRC-32C for every length and alignment.
func TestSumEqualsTheStandardLibrary(t *testing.T) {
	now := uint64(time.Now().UnixNano())
	t.Logf("seed %d", now)
	r := rand.New(rand.NewPCG(now, 0))
	data := make([]byte, 1<<20)
	for i := range data {
		data[i] = byte(r.Uint32())
	}
	check := func(off, n int) {
		if got, want := Sum(data[off:off+n]), crc32.Checksum(data[off:off+n], castagnoli); got != want {
			t.Fatalf("%d bytes at %d: %08x, want %08x", n, off, got, want)
		}
	}
	for n := range 5000 {
		check(n%64, n)
	}
	for range 500 {
		off := r.IntN(1000)
		check(off, r.IntN(len(data)-off))
	}
	check(0, len(data))
	clear(data)
	check(3, 4096)
}

func BenchmarkSum(b *testing.B) {
	p := make([]byte, 700<<10)
	b.SetBytes(int64(len(p)))
	for b.Loop() {
		Sum(p)
	}
}
