package blocksum

import (
	"encoding/binary"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/zeebo/xxh3"
)

// sums returns the block sums that the kernel computes.
func sums(p []byte) (out []byte) {
	for ; len(p) >= Block; p = p[Block:] {
		var acc [8]uint64
		for i := range Block / stripe {
			add(&acc, p[i*stripe:], 8*i)
		}
		for _, v := range acc {
			out = binary.LittleEndian.AppendUint64(out, v)
		}
	}
	return out
}

// The hash equals the library's for any bytes, whatever bytes each call gets.
func TestAgainstLibrary(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 1))
	lengths := []int{0, 1, 16, 17, 128, 129, 240, 241, 1023, 1024, 1025, 1087, 1088, 1089, 2047, 2048, 2049, 4096,
		1 << 16, 1<<16 + 1}
	for range 200 {
		lengths = append(lengths, r.IntN(20000))
	}
	for _, n := range lengths {
		p := make([]byte, n)
		for i := range p {
			p[i] = byte(r.Uint32())
		}
		s := New(int64(n))
		for off := 0; off < n; {
			end := min(n, off+Block*(1+r.IntN(5)))
			s.Add(sums(p[off:end]))
			off = end
		}
		want := xxh3.Hash128(p)
		if high, low, ok := s.Finish(p[n-Tail(int64(n)):]); !ok || high != want.Hi || low != want.Lo {
			t.Errorf("%d bytes: got %x %x (%v), want %x %x", n, high, low, ok, want.Hi, want.Lo)
		}
	}
}

// Finish refuses missing sums and a tail of the wrong length.
func TestMissing(t *testing.T) {
	p := make([]byte, 5000)
	s := New(int64(len(p)))
	s.Add(sums(p[:2048]))
	if _, _, ok := s.Finish(p[len(p)-Tail(5000):]); ok {
		t.Error("the sums of only two of four blocks were accepted")
	}
	s.Add(sums(p[2048:4096]))
	if _, _, ok := s.Finish(p[len(p)-Tail(5000)+1:]); ok {
		t.Error("a tail that is too short was accepted")
	}
}

func BenchmarkAdd(b *testing.B) {
	p := make([]byte, 1<<20)
	b.SetBytes(int64(len(p)) / Sum * Block)
	for b.Loop() {
		s := New(1 << 40)
		s.Add(p)
	}
}
