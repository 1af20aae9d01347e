package crc32c

import (
	"bytes"
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

// bitwise computes CRC-32C by its definition, one bit at a time.
func bitwise(crc uint32, p []byte) uint32 {
	crc = ^crc
	for _, b := range p {
		crc ^= uint32(b)
		for range 8 {
			crc = crc>>1 ^ 0x82f63b78*(crc&1)
		}
	}
	return ^crc
}

// The checksum matches its definition at every alignment and for every length up to several folds. It detects every
// flipped bit, every pair of flipped bits, and every burst of at most 32 bits.
func TestSumByDefinition(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	data := make([]byte, 9000)
	for i := range data {
		data[i] = byte(r.Uint32())
	}
	for n := range 2200 {
		off := r.IntN(64)
		if got, want := Sum(data[off:off+n]), bitwise(0, data[off:off+n]); got != want {
			t.Fatalf("%d bytes at %d: %08x, want %08x", n, off, got, want)
		}
	}
	for _, n := range []int{1, 255, 1024, 1025, 4097, 9000} {
		p := bytes.Clone(data[:n])
		want := Sum(p)
		flip := func(bit int) { p[bit/8] ^= 1 << (bit % 8) }
		for range 300 {
			a, b := r.IntN(8*n), r.IntN(8*n)
			flip(a)
			if Sum(p) == want {
				t.Fatalf("%d bytes: the flipped bit %d was not detected", n, a)
			}
			flip(b)
			if a != b && Sum(p) == want {
				t.Fatalf("%d bytes: the flipped bits %d and %d were not detected", n, a, b)
			}
			flip(a)
			flip(b)
			at, burst := r.IntN(max(1, 8*n-32)), r.Uint32()|1
			for i := range min(32, 8*n-at) {
				if burst>>i&1 == 1 {
					flip(at + i)
				}
			}
			if Sum(p) == want {
				t.Fatalf("%d bytes: the burst %08x at bit %d was not detected", n, burst, at)
			}
			copy(p, data)
		}
	}
	for _, fill := range []byte{0, 0xff} { // for these, an error in the first sums may go unnoticed
		for n := range 3000 {
			p := bytes.Repeat([]byte{fill}, n)
			if got := Sum(p); got != crc32.Checksum(p, castagnoli) {
				t.Fatalf("%d bytes of %#x: got %08x", n, fill, got)
			}
		}
	}
}

// The checksum is CRC-32C, tested with its well-known check value.
func TestSum(t *testing.T) {
	if got := Sum([]byte("123456789")); got != 0xe3069283 {
		t.Errorf("got %#x", got)
	}
}

func BenchmarkSum(b *testing.B) {
	p := make([]byte, 700<<10)
	b.SetBytes(int64(len(p)))
	for b.Loop() {
		Sum(p)
	}
}
