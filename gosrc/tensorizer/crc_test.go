package tensorizer

import (
	"hash/crc32"
	"math/rand/v2"
	"testing"
)

// For any cut, the joined sums of two parts equal the sum of the whole.
func TestJoin(t *testing.T) {
	b := make([]byte, 5000)
	for i := range b {
		b[i] = byte(i * i >> 3)
	}
	for cut := 0; cut <= len(b); cut += 13 {
		if got := crcJoin(crc32.ChecksumIEEE(b[:cut]), crc32.ChecksumIEEE(b[cut:]),
			int64(len(b)-cut)); got != crc32.ChecksumIEEE(b) {
			t.Fatalf("cut at %d: got %08x", cut, got)
		}
	}
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	for range 300 {
		b := make([]byte, r.IntN(10_000))
		for i := range b {
			b[i] = byte(r.Uint32())
		}
		cut := r.IntN(len(b) + 1)
		if got := crcJoin(crc32.ChecksumIEEE(b[:cut]), crc32.ChecksumIEEE(b[cut:]),
			int64(len(b)-cut)); got != crc32.ChecksumIEEE(b) {
			t.Fatalf("%d bytes cut at %d: %08x", len(b), cut, got)
		}
	}
}

// crcPower equals repeated multiplication, even for exponents above 32 bits.
func TestPower(t *testing.T) {
	p := uint32(1) << 31
	for n := range uint64(3000) {
		if got := crcPower(n); got != p {
			t.Fatalf("x to the %d: got %08x, want %08x", n, got, p)
		}
		p = multiplyCRC(1<<30, p)
	}
	if a, b := crcPower(1<<40+5), multiplyCRC(crcPower(1<<39), multiplyCRC(crcPower(1<<39), crcPower(5))); a != b {
		t.Errorf("x to the 2^40+5: got %08x, want %08x", a, b)
	}
}
