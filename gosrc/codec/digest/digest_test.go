package digest

import (
	"encoding/binary"
	"math/bits"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

func random(t *testing.T) *rand.Rand {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	return rand.New(rand.NewPCG(seed, 0))
}

// bytesOf returns n reproducible bytes: byte i is the top byte of (i + 1) * 2654435761, modulo 2^32.
func bytesOf(n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(uint32(i+1) * 2654435761 >> 24)
	}
	return b
}

// The digests listed in docs/format.md never change.
func TestGoldens(t *testing.T) {
	for _, g := range []struct {
		n    int
		want string
	}{
		{0, "f4028dc2f7a7f05e8c0a2ebcfb4a0e0a"},
		{1, "68d25416a2c3b689b8fa9268b6c6c114"},
		{7, "218d36b1106971a481bf3905d4cdd8c0"},
		{8, "9898460f15ead36e6667c52c154ea0c7"},
		{9, "6da7c0121b7c667efcace6c4accb14e6"},
		{64, "2cdfa4966ca55ab6911dc28a68d644ca"},
		{4095, "e895074860bb3524fa0c748141365126"},
		{4096, "5871b7426b1683ecb490471d77437763"},
		{1000003, "de85f414867bf0d5c6e8af29d3b55752"},
	} {
		if got := Of(bytesOf(g.n)).String(); got != g.want {
			t.Errorf("{%d, %q},", g.n, got)
		}
	}
}

// twin computes the digest by its definition, word by word.
func twin(p []byte) Sum {
	a, b := uint64(0), uint64(0)
	word := func(i int) (w uint64) {
		for k := range 8 {
			if 8*i+k < len(p) {
				w |= uint64(p[8*i+k]) << (8 * k)
			}
		}
		return w
	}
	shuffle := func(x uint64) uint64 {
		x = (x ^ x>>32) * 0xa54ff53a5f1d36f1
		x = (x ^ x>>32) * 0xbb67ae8584caa73b
		return x ^ x>>32
	}
	for i := range (len(p) + 7) / 8 {
		t := shuffle(word(i) + uint64(i+1)*0x9e3779b97f4a7c15)
		a += t
		b += t * (t>>32 | 1)
	}
	high := shuffle(a + uint64(len(p)+1)*0x3c6ef372fe94f82b)
	return Sum{high, shuffle(b + high)}
}

// For any length and address, and for parts in any order, the digest matches its definition.
func TestTwins(t *testing.T) {
	r := random(t)
	data := make([]byte, 1<<16)
	for i := range data {
		data[i] = byte(r.Uint32())
	}
	for k := range 600 {
		n, off := k, r.IntN(64)
		if k >= 300 {
			n = r.IntN(len(data) - 64)
		}
		p := data[off : off+n]
		want := twin(p)
		if got := Of(p); got != want {
			t.Fatalf("%d bytes at %d: %v, want %v", n, off, got, want)
		}
		cuts := []int{0, n}
		for range r.IntN(6) {
			cuts = append(cuts, r.IntN(n+1)&^7)
		}
		slices.Sort(cuts)
		var all State
		for _, c := range r.Perm(len(cuts) - 1) {
			var s State
			s.Add(int64(cuts[c]), p[cuts[c]:cuts[c+1]])
			all.Merge(s)
		}
		if got := all.Sum(int64(n)); got != want {
			t.Fatalf("%d bytes cut at %v: %v, want %v", n, cuts, got, want)
		}
	}
}

// Many similar tensors have different digests, and even different halves. The tensors differ in one or two bits,
// swapped words, a shift, or the length.
func TestEveryChangeChangesTheDigest(t *testing.T) {
	base := bytesOf(512)
	for i := 256; i < 512; i++ {
		base[i] = 0 // real weights also contain zeros
	}
	halves := [2]map[uint64]string{{}, {}}
	add := func(p []byte, what string) {
		s := Of(p)
		for i, v := range []uint64{s.High, s.Low} {
			if other, twice := halves[i][v]; twice {
				t.Fatalf("%s has the digest of %s", what, other)
			}
			halves[i][v] = what
		}
	}
	add(base, "the tensor")
	flip := func(p []byte, bit int) { p[bit/8] ^= 1 << (bit % 8) }
	for i := range 8 * len(base) {
		p := slices.Clone(base)
		flip(p, i)
		add(p, "a changed bit")
		for _, j := range []int{i + 1, i + 8, i + 16, i + 64, i + 128, i + 2048} {
			if j < 8*len(p) {
				flip(p, j)
				add(p, "two changed bits")
				flip(p, j)
			}
		}
	}
	for i := range 32 {
		for j := range i {
			if p := base; string(p[8*i:8*i+8]) == string(p[8*j:8*j+8]) {
				continue
			}
			p := slices.Clone(base)
			copy(p[8*i:8*i+8], base[8*j:])
			copy(p[8*j:8*j+8], base[8*i:])
			add(p, "exchanged words")
		}
	}
	for n := range 256 {
		add(base[:n], "a shorter tensor")
	}
	for n := range 255 {
		add(base[n+1:], "a shifted tensor")
	}
	for n := range 64 {
		add(make([]byte, 600+n), "zeros")
	}
}

func TestBadViews(t *testing.T) {
	for _, v := range []View{
		{Address: 8, Item: 3}, {Address: 8, Item: 32}, {Address: 8, Item: 0}, {Address: 8, Item: 1, Shape: []int64{2}},
		{Address: 8, Item: 1, Shape: []int64{-2}, Strides: []int64{1}},
		{Address: 0, Item: 1, Shape: []int64{2}, Strides: []int64{1}},
		{Address: 8, Item: 8, Shape: []int64{1 << 40, 1 << 40}, Strides: []int64{8, 8}},
		{Address: 8, Item: 8, Shape: make([]int64, 65), Strides: make([]int64, 65)},
	} {
		if _, err := All(t.Context(), []View{v}, 1, nil); err == nil {
			t.Errorf("%+v was accepted", v)
		}
	}
	empty := View{Item: 8, Shape: []int64{1 << 40, 0, 1 << 40}, Strides: []int64{8, 8, 8}}
	if got, err := All(t.Context(), []View{empty}, 1, nil); err != nil || got[0] != Of(nil) {
		t.Error(got, err)
	}
}

// mixWord has an avalanche effect: a flipped input bit changes each output bit with a probability of about one half.
func TestAvalanche(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	const rounds = 4000
	var counts [64][64]int
	for range rounds {
		x := r.Uint64() >> (r.IntN(3) * 16) // includes small numbers
		for i := range 64 {
			d := mixWord(x) ^ mixWord(x^1<<i)
			for ; d != 0; d &= d - 1 {
				counts[i][bits.TrailingZeros64(d)]++
			}
		}
	}
	for i := range counts {
		for j, n := range counts[i] {
			if n < rounds*40/100 || n > rounds*60/100 {
				t.Errorf("bit %d changes bit %d %d times in %d", i, j, n, rounds)
			}
		}
	}
}

func BenchmarkDigest(b *testing.B) {
	p := make([]byte, 1<<20)
	for i := 0; i < len(p); i += 8 {
		binary.LittleEndian.PutUint64(p[i:], uint64(i)*stepA)
	}
	for _, c := range []struct {
		name string
		sum  func(*State)
	}{{"best", func(s *State) { s.Add(0, p) }}, {"scalar", func(s *State) { sumScalar(s, 0, p) }}} {
		b.Run(c.name, func(b *testing.B) {
			b.SetBytes(int64(len(p)))
			var s State
			for b.Loop() {
				c.sum(&s)
			}
		})
	}
}
